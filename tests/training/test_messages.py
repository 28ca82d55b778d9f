"""From Python a run says what the command says, and what of it is unlikely to be meant."""

import json
import logging

import pytest
from transformers.utils import logging as transformers_logging

from metaplastic.training import train
from metaplastic.training.parallel import one_voice

from .test_card import card_of, row


@pytest.fixture
def bare(monkeypatch):
    """As a script has it that has set up no logging."""
    logger = logging.getLogger("metaplastic")
    monkeypatch.setattr(logger, "propagate", False)  # to the handlers of these tests
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()  # levels that were looked up before
    before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    yield logger
    if not before:
        transformers_logging.disable_progress_bar()
    logger.manager._clear_cache()


def test_a_run_from_python_says_what_the_command_says(tiny, tmp_path, bare, capsys):
    bare.handlers.clear()
    result = train(tiny(steps=2, recipe="a-recipe"), tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    assert "tokens to train on" in err and "step 2 of 2: loss" in err
    assert "warning: the warm-up is not over when the run is: warmup is 2 of 2 steps" in err
    assert "the learning rate rises to 0.0015, not 0.003" in err
    assert "Writing" not in err and "it/s" not in err
    assert (bare.handlers, bare.level) == ([], logging.NOTSET)
    assert transformers_logging.is_progress_bar_enabled()
    assert (result["settings"]["recipe"], result["settings"]["processes"]) == ("a-recipe", 1)
    assert "recipe" not in json.loads((tmp_path / "run" / "run.json").read_text())
    assert row(card_of(tmp_path / "run" / "final"), "recipe") == "a-recipe"


def test_who_has_set_up_logging_decides_where_it_goes(tiny, tmp_path, bare, capsys, caplog):
    bare.handlers[:] = [caplog.handler]
    train(tiny(steps=3, warmup=4), tmp_path / "run")
    assert capsys.readouterr().err == ""
    assert "the learning rate rises to 0.0015, not 0.003" in caplog.text
    assert "step 3 of 3" not in caplog.text  # the level is theirs too
    assert "| recipe |" not in card_of(tmp_path / "run" / "final").text


def test_the_first_process_speaks_for_all(monkeypatch):
    logger, slept = logging.getLogger("metaplastic"), []
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr("metaplastic.training.parallel.time.sleep", slept.append)
    for rank, expected in (("0", []), ("1", [5.0])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match="mine"), one_voice():
            raise ValueError("mine")
        assert slept == expected
    assert logger.level == logging.ERROR
    logger.manager._clear_cache()
