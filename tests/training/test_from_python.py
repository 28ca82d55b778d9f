"""The code of docs/training.md runs as it stands."""

import math
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_trainer_from_python(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {}
    exec(code, names)
    history = names["trainer"].state.log_history
    evaluations = [entry for entry in history if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [10, 20]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert all(math.isfinite(entry[f"eval_layer_{layer}_window"]) for entry in evaluations for layer in range(2))
    assert all(entry["mfu"] > 0 for entry in history if "loss" in entry)
    assert list((tmp_path / "runs" / "mine" / "tensorboard").glob("events.out.tfevents.*"))
    assert {path.name for path in (tmp_path / "runs" / "mine").iterdir()} == {"tensorboard", "checkpoint-20"}
