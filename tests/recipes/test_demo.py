"""The demo runs whole (few steps), leaves what it says, and repeats itself."""

import json
import re

import pytest

from metaplastic.recipes import demo
from metaplastic.recipes.demo import DemoConfig, run_demo
from metaplastic.recipes.mqar import RecallRun, run_recall

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_demo(tmp_path):
    said = []
    result, page = run_demo(DemoConfig.quick(), tmp_path, say=said.append)
    summary = result["measurements"]["summary"]
    assert summary["memory after the prompt (bytes)"] == summary["memory at the end (bytes)"] > 0
    assert json.loads((tmp_path / "results.json").read_text())["measurements"]["summary"] == summary
    for file in ("recall.png", "language.png", "memory.png", "memory/index.html", "text/final/model.safetensors"):
        assert (tmp_path / file).stat().st_size > 0
    html = page.read_text()
    assert "Palimpsa-D" in html and "One setting and one seed" in html
    assert "its numbers are not the findings" in html and result["settings"]["quick"] is True
    assert re.search(r"<td>limit \S+ to \S+, ratio \S+ to \S+</td><td>\S+ to \S+</td>", html)  # over heads
    assert len(set(re.findall('<img alt="(.*?)"', html))) == 3
    assert any("queries right" in line for line in said)
    (layer,) = result["measurements"]["memory"]
    assert summary["certainty, surest element (evidence / prior)"] == max(layer["limit"])
    surest = f"Reading 200 bytes, the surest element of the memory gathered {max(layer['limit']):.3g} times the prior's"
    assert surest in html.replace("&#x27;", "'") and layer["tokens"] == 200
    assert any(surest in line for line in said)


@pytest.mark.parametrize(
    ("metaplastic", "ablation", "expected"),
    [
        (
            (0.2, 0.95),
            (0.95, 0.99),
            "Palimpsa-D after 20 steps and the layer without metaplasticity after 10 steps: the ",
        ),
        ((0.95, 0.95), (0.5, 0.99), "after 20 steps: Palimpsa-D learned sooner"),
        ((0.1, 0.95), (0.1, 0.95), "both learned equally soon"),
        ((0.1, 0.95), (0.1, 0.2), "the layer without metaplasticity not at all: Palimpsa-D learned sooner"),
        ((0.1, 0.2), (0.1, 0.3), "Neither memory answered 90% of the queries within 20 steps"),
    ],
)
def test_the_finding_follows_the_numbers(metaplastic, ablation, expected):
    def ran(accuracies):
        return [{"curve": [{"step": 10 * (i + 1), "accuracy": a} for i, a in enumerate(accuracies)], "accuracy": 0.5}]

    told = demo._sooner({"palimpsa_d": ran(metaplastic), "palimpsa_d_additive": ran(ablation)}, 20)
    assert expected in told
    assert told.endswith("at the end Palimpsa-D answered 50.0% and the layer without metaplasticity answered 50.0%.")


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
