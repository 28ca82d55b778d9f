"""The learning rate is the schedule's at every step, and resumes as if nothing had happened."""

import math

import pytest
import torch
from transformers import get_scheduler

from metaplastic.training import TrainConfig, train
from metaplastic.training.schedule import in_words, scheduler_arguments

from .test_run import Stop, assert_same_run, logged
from .test_streaming import stop_at

STEPS, WARMUP, PEAK = 40, 8, 0.01


def config(**changes):
    return TrainConfig(**({"steps": STEPS, "warmup": WARMUP, "learning_rate": PEAK} | changes))


def rates(config):
    """Of every step, from Hugging Face's own scheduler as its Trainer makes it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    given = scheduler_arguments(config)
    scheduler = get_scheduler(
        given["lr_scheduler_type"], optimizer, given["warmup_steps"], config.steps, given["lr_scheduler_kwargs"]
    )
    found = []
    for _ in range(config.steps):
        found.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        scheduler.step()
    return [*found, optimizer.param_groups[0]["lr"] / config.learning_rate]


def half_cosine(share, least):
    return least + (1 - least) * (1 + math.cos(math.pi * share)) / 2


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_each_schedule_in_closed_form(least):
    after = [(step - WARMUP) / (STEPS - WARMUP) for step in range(STEPS + 1)]
    stable = STEPS - 12
    expected = {
        "cosine": [half_cosine(share, least) for share in after],
        "linear": [least + (1 - least) * (1 - share) for share in after],
        "wsd": [1.0 if s < stable else half_cosine((s - stable) / 12, least) for s in range(STEPS + 1)],
    }
    for schedule, rate in expected.items():
        found = rates(config(schedule=schedule, minimum_rate=least, cooldown=12 if schedule == "wsd" else None))
        assert found[WARMUP:] == pytest.approx(rate[WARMUP:], abs=1e-12), schedule
        assert found[1:WARMUP] == sorted(found[1:WARMUP]) and found[0] <= least and found[1] < 0.3
        assert found[-1] == pytest.approx(least, abs=1e-12)
    assert rates(config(schedule="constant"))[WARMUP:] == [1.0] * (STEPS + 1 - WARMUP)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [STEPS, STEPS + 5])
def test_nothing_but_warm_up(schedule, warmup):
    least = 0.0 if schedule == "constant" else 0.1
    found = rates(config(schedule=schedule, minimum_rate=least, warmup=warmup, cooldown=None))[:STEPS]
    start = least if schedule == "wsd" else 0.0
    assert found == pytest.approx([start + (1 - start) * step / warmup for step in range(STEPS)], abs=1e-12)


def test_the_default_is_as_before():
    assert scheduler_arguments(config()) == {
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {},
        "warmup_steps": WARMUP,
    }
    falling = rates(config(schedule="wsd"))  # a fifth of all steps
    assert falling[STEPS - 8] == 1.0 > falling[STEPS - 7]


def test_a_run_takes_its_schedule_and_resumes_in_it(tiny, tmp_path, monkeypatch):
    """Stopped within the falling part; with other settings it is another run."""
    settings = {"schedule": "wsd", "cooldown": 5, "minimum_rate": 0.1, "max_grad_norm": 0.5, "eval_every": 0}
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            train(tiny(**settings), tmp_path / "run")
    result = train(tiny(**settings), tmp_path / "run")
    found = {entry["step"]: entry["learning_rate"] for entry in logged(result) if "learning_rate" in entry}
    whole = rates(tiny(**settings))
    for step, rate in found.items():  # that which the step was taken with
        assert rate == pytest.approx(3e-3 * whole[step - 1], rel=1e-6)
    assert found[9] < found[6]
    train(tiny(**settings), tmp_path / "undisturbed")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert (
        "| learning rate | 0.003, 2 steps of warm-up, then constant, in the last 5 steps cosine to 0.1 of it |" in card
    )
    assert "gradients clipped at 0.5" in card
    with pytest.raises(ValueError, match="another run .*schedule was 'wsd' and is 'linear'"):
        train(tiny(**(settings | {"schedule": "linear", "cooldown": None})), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "step"}, "schedule must be one of cosine, constant, wsd, linear, got 'step'"),
        ({"minimum_rate": 1.0}, "minimum_rate must be >= 0 and < 1, a share of learning_rate, got 1.0"),
        ({"minimum_rate": 0.1, "schedule": "constant"}, "minimum_rate is for a schedule that falls, got 0.1"),
        ({"cooldown": 5}, "cooldown is for schedule 'wsd', got 5 with 'cosine'"),
        ({"cooldown": 33, "schedule": "wsd"}, "cooldown must be >= 1 and <= 32, the steps after the warm-up, got 33"),
        ({"cooldown": 0, "schedule": "wsd"}, "cooldown must be >= 1"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be >= 0"),
        ({"loss": "quick"}, "loss must be one of auto, fused, plain, got 'quick'"),
        ({"checkpointing": "all"}, "checkpointing must be one of none, full, selective, got 'all'"),
        ({"peak_flops": 0.0}, "peak_flops must be > 0 and finite, got 0.0"),
    ],
)
def test_bad_settings_are_named(changes, expected):
    with pytest.raises(ValueError, match=expected):
        config(**changes)


def test_words():
    assert (
        in_words(config(schedule="linear", minimum_rate=0.05)) == "0.01, 8 steps of warm-up, then linear to 0.05 of it"
    )
    assert in_words(config(schedule="constant")) == "0.01, 8 steps of warm-up, then constant"
