"""Trackers are the Hugging Face Trainer's, found out before anything runs, and decide nothing."""

import gc
import json
from pathlib import Path

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from metaplastic.training import MetaplasticTrainer, TrainConfig, train
from metaplastic.training.trackers import check_trackers

from .test_run import Stop, assert_same_run
from .test_streaming import stop_at

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Stand(TrainerCallback):
    """A tracker that writes down what it is told."""

    told: list = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append((state.global_step, dict(logs)))


class Absent(TrainerCallback):
    def __init__(self):
        raise RuntimeError("Absent requires absent: pip install absent")


@pytest.fixture(autouse=True)
def _table(monkeypatch):
    monkeypatch.setattr(Stand, "told", [])
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "stand", Stand)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "absent", Absent)


def test_a_tracker_is_told_what_is_logged(tiny, tmp_path, undisturbed):
    result = train(tiny(report_to="stand"), tmp_path / "run")
    assert result["settings"]["report_to"] == ("stand",)
    losses = [(step, logs["loss"]) for step, logs in Stand.told if "loss" in logs]
    history = [(entry["step"], entry["loss"]) for entry in result["measurements"]["history"] if "loss" in entry]
    assert losses == history and len(losses) == 4
    assert [step for step, logs in Stand.told if "eval_loss" in logs] == [4, 8, 10]
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_run_goes_on_with_another_tracker(tiny, tmp_path, undisturbed, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            train(tiny(), tmp_path / "run")
    assert "report_to" not in json.loads((tmp_path / "run" / "run.json").read_text())
    train(tiny(report_to=["stand"]), tmp_path / "run")
    assert {step for step, _ in Stand.told} == {8, 9, 10}
    assert_same_run(tmp_path / "run", undisturbed)
    assert train(tiny(), tmp_path / "run")["measurements"]["steps_this_call"] == 4  # finished: not run again


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mamba7", "report_to: got 'mamba7', expected some of .*stand, .*tensorboard"),
        ("all", "report_to: got 'all', expected"),
        ("absent", r"report_to: 'absent' is not installed \(Absent requires absent: pip install absent\)"),
    ],
)
def test_unknown_and_absent_trackers_are_found_out_first(tiny, tmp_path, monkeypatch, name, expected):
    monkeypatch.setattr("metaplastic.training.run.load_data", None)  # not even the data is read
    with pytest.raises(ValueError, match=expected):
        train(tiny(report_to=("stand", name)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_there_is_not_tidied_up(monkeypatch, capsys):
    """Of a real one: MLflow's expects in __del__ what its __init__ did not come to."""
    monkeypatch.setattr(integration_utils, "is_mlflow_available", lambda: False)
    with pytest.raises(ValueError, match=r"report_to: 'mlflow' is not installed \(MLflowCallback requires mlflow"):
        check_trackers(["mlflow"])
    gc.collect()
    assert capsys.readouterr().err == ""


def test_tensorboard_is_an_extra_of_ours(monkeypatch):
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    with pytest.raises(ValueError, match=r"not installed \(pip install 'metaplastic\[tensorboard\]'\)"):
        check_trackers(["tensorboard"])


def test_no_tracker_is_the_default(tiny, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(MetaplasticTrainer, "train", lambda self, **_: made.append(self.args.report_to) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(), tmp_path / "run")
    assert made == [[]] and TrainConfig().report_to == ()


def scalars(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_after_a_stop(tiny, tmp_path, monkeypatch):
    config = tiny(report_to=("tensorboard",), save_every=4)
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        patch.setattr(MetaplasticTrainer, "_save_checkpoint", _not_the_second(MetaplasticTrainer._save_checkpoint))
        with pytest.raises(Stop):
            train(config, tmp_path / "run")
    assert scalars(tmp_path / "run" / "tensorboard")["train/loss"] == [4, 8]  # the second is beyond the checkpoint
    train(config, tmp_path / "run")
    found = scalars(tmp_path / "run" / "tensorboard")
    assert found["train/loss"] == [4, 8, 10] and found["eval/loss"] == [4, 8, 10]
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir() and "tensor" in path.name) == [
        "tensorboard"
    ]
    assert not list((tmp_path / "run").glob("runs"))
    train(tiny(seed=1, steps=4, report_to=("tensorboard",)), tmp_path / "run", overwrite=True)
    assert scalars(tmp_path / "run" / "tensorboard")["eval/loss"] == [4]  # the old log went with the old run


def _not_the_second(original):
    def save(self, *args):
        if self.state.global_step < 8:
            original(self, *args)

    return save
