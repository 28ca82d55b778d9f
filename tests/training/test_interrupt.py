"""Ctrl-C saves after the step; a second one does not wait."""

import os
import signal
import threading

import pytest

from metaplastic.training import MetaplasticTrainer, train
from metaplastic.training.checkpoint import checkpoints, step_of
from metaplastic.training.interrupt import Interruption

from .test_run import assert_same_run


def interrupt_at(monkeypatch, *micro_steps):
    """Sends Ctrl-C within these training steps (three make a step of the optimiser); counts those that ended."""
    original, done = MetaplasticTrainer.training_step, []

    def training_step(self, *args):
        if len(done) in micro_steps:
            os.kill(os.getpid(), signal.SIGINT)
        result = original(self, *args)
        done.append(self.state.global_step)
        return result

    monkeypatch.setattr(MetaplasticTrainer, "training_step", training_step)
    return done


@pytest.mark.parametrize("save_every", [3, 0])
def test_an_interrupted_run_saves_after_its_step_and_goes_on(
    tiny, tmp_path, monkeypatch, caplog, undisturbed, save_every
):
    config = tiny(save_every=save_every)
    with monkeypatch.context() as patch:
        done = interrupt_at(patch, 13)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run")
    assert len(done) == 15 and done[-1] == 4  # the fifth step was finished
    assert [step_of(folder) for folder in checkpoints(tmp_path / "run")][-1] == 5
    assert not (tmp_path / "run" / "final").exists()
    assert "saving a checkpoint after this step" in caplog.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = train(config, tmp_path / "run")
    assert result["measurements"]["steps_this_call"] == 5
    assert_same_run(tmp_path / "run", undisturbed, only_results=True)


def test_a_second_one_stops_at_once(tiny, tmp_path, monkeypatch):
    done = interrupt_at(monkeypatch, 13, 14)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run")
    assert len(done) == 14
    assert [step_of(folder) for folder in checkpoints(tmp_path / "run")] == [3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_the_last_step_nothing_is_lost(tiny, tmp_path, monkeypatch, undisturbed):
    with monkeypatch.context() as patch:
        original = MetaplasticTrainer.training_step

        def training_step(self, *args):
            if self.state.global_step == 9:
                os.kill(os.getpid(), signal.SIGINT)
                patch.setattr(MetaplasticTrainer, "training_step", original)
            return original(self, *args)

        patch.setattr(MetaplasticTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path / "run")
    assert train(tiny(), tmp_path / "run")["measurements"]["steps_this_call"] == 0
    assert_same_run(tmp_path / "run", undisturbed, only_results=True)


def test_an_error_is_not_hidden():
    def fail():
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            assert interruption.came
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_threads_and_processes_are_left_alone(monkeypatch):
    def mine(*args):
        pass

    signal.signal(signal.SIGINT, mine)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []

    def elsewhere():
        with Interruption():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Interruption():
        found.append(signal.getsignal(signal.SIGINT))
    assert found == [signal.default_int_handler] * 2
