"""The demo runs whole (few steps), leaves what it says, and repeats itself."""

import json

import pytest

from metaplastic.recipes.demo import DemoConfig, run_demo
from metaplastic.recipes.mqar import RecallRun, run_recall

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_demo(tmp_path):
    said = []
    result, page = run_demo(DemoConfig.quick(), tmp_path, say=said.append)
    summary = result["measurements"]["summary"]
    assert summary["memory after the prompt (bytes)"] == summary["memory at the end (bytes)"] > 0
    assert json.loads((tmp_path / "results.json").read_text())["measurements"]["summary"] == summary
    for file in ("recall.png", "language.png", "text/final/model.safetensors"):
        assert (tmp_path / file).stat().st_size > 0
    assert "Palimpsa-D" in page.read_text()
    assert any("queries right" in line for line in said)


def test_the_same_seed_gives_the_same_run(tmp_path):
    run = RecallRun(steps=4, train_rows=256, test_rows=64, measure_every=2)
    first = run_recall(run, tmp_path / "a", progress=False)["measurements"]
    again = run_recall(run, tmp_path / "b", progress=False)["measurements"]
    assert first["losses"] == again["losses"]
    assert first["accuracy"] == again["accuracy"]
    assert [p["step"] for p in first["curve"]] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["palimpsa_d", "palimpsa_d_additive"])
def test_the_demo_setting_is_learnt(mixer, tmp_path):
    """Rung 6 of the numerics ladder: a short training run that must reach a known accuracy."""
    assert run_recall(RecallRun(mixer=mixer), tmp_path, progress=False)["measurements"]["accuracy"] > 0.9
