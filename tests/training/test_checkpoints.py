import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from metaplastic.training import MetaplasticTrainer, last_checkpoint
from metaplastic.training import checkpoint as module
from metaplastic.training.checkpoint import STAGING, checkpoints

from .rows import weights_of


class Stop(Exception):
    pass


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("during", ["_save_optimizer_and_scheduler", "_save_rng_state", "_mend_best_checkpoint"])
def test_a_crash_while_saving_leaves_the_checkpoint_before(build, tmp_path, monkeypatch, during):
    run, owner = tmp_path / "run", MetaplasticTrainer if during.startswith("_mend") else Trainer
    original = getattr(owner, during)

    def crash(self, *args):
        if self.state.global_step == 4:
            raise OSError("No space left on device")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, during, crash)
        with pytest.raises(OSError, match="No space left"):
            build(**SAVING).train()
    assert [path.name for path in run.iterdir()] == ["checkpoint-2"]
    (run / STAGING / "checkpoint-4").mkdir(parents=True)  # as a killed process leaves it
    assert last_checkpoint(run) == str(run / "checkpoint-2")
    trainer = build(**SAVING, callbacks=[StopAt(2)])
    with pytest.raises(Stop):
        trainer.train(resume_from_checkpoint=last_checkpoint(run))
    assert [path.name for path in run.iterdir()] == ["checkpoint-2"]  # the leftovers are gone from the start


def test_rotation_keeps_the_newest_and_what_is_not_a_checkpoint(build, tmp_path):
    mine = tmp_path / "run" / "checkpoint-2-of-mine"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("x")
    build(**SAVING, max_steps=10, save_total_limit=3).train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-6", "checkpoint-8", "checkpoint-10"]
    assert (mine / "notes.txt").is_file()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*(f"checkpoint-{n}" for n in (6, 8, 10)), mine.name}


def test_a_crash_while_deleting_leaves_no_half_of_a_checkpoint(build, tmp_path, monkeypatch):
    def crash(folder, **_):
        if (file := Path(folder) / "optimizer.pt").exists():
            file.unlink()
            raise Stop

    monkeypatch.setattr(module.shutil, "rmtree", crash)
    with pytest.raises(Stop):
        build(**SAVING, save_total_limit=1).train()
    run = tmp_path / "run"
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4"]
    assert (run / "checkpoint-4" / "optimizer.pt").is_file()
    assert (run / f"{STAGING}-checkpoint-2").is_dir()


def test_no_limit_keeps_every_checkpoint(build, tmp_path):
    build(**SAVING, max_steps=8, save_total_limit=None).train()
    assert len(checkpoints(tmp_path / "run")) == 4


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_survives_rotation_and_is_loaded_at_the_end(build, tmp_path, monkeypatch, limit):
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 4.0}
    monkeypatch.setattr(MetaplasticTrainer, "evaluate", lambda self, **_: {"eval_loss": losses[self.state.global_step]})
    best = {}

    class Watch(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                best.update(weights_of(model))

    trainer = build(
        **SAVING, max_steps=10, eval_strategy="steps", eval_steps=2, save_total_limit=limit,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False, callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    run = tmp_path / "run"
    assert trainer.state.best_model_checkpoint == str(run / "checkpoint-4")
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4", "checkpoint-10"][:limit]
    for checkpoint in checkpoints(run):
        assert json.loads((checkpoint / "trainer_state.json").read_text())["best_model_checkpoint"] == str(
            run / "checkpoint-4"
        )
    for name, value in weights_of(trainer.model).items():
        assert torch.equal(value, best[name]), name


def test_a_best_step_that_was_not_saved_is_not_claimed_to_be(build, tmp_path, monkeypatch):
    monkeypatch.setattr(MetaplasticTrainer, "evaluate", lambda self, **_: {"eval_loss": float(self.state.global_step)})
    trainer = build(
        **SAVING,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert trainer.state.best_model_checkpoint is None


def test_a_checkpoint_holds_no_arbitrary_pickles(build, tmp_path):
    build(**SAVING, max_steps=2).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pkl", ".pickle"))]
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.load(checkpoint / name, weights_only=True)
    with safe_globals():  # numpy's arrays, as Hugging Face reads them
        torch.load(checkpoint / "rng_state.pth", weights_only=True)
    assert json.loads((checkpoint / "config.json").read_text())["use_cache"] is True


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_resuming_from_weights_that_do_not_fit_is_an_error(build, tmp_path, change):
    build(**SAVING, max_steps=2).train()
    file = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mixer.q_proj.weight"
    if change == "shape":
        weights[name] = weights[name][:3].contiguous()
    else:
        weights["model.bogus.weight"] = weights.pop(name) if change == "missing" else torch.ones(1)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit.*(bogus|q_proj)"):
        build(**SAVING).train(resume_from_checkpoint=str(file.parent))


@pytest.mark.parametrize("steps", [5, 8])  # 8: the end of an epoch
def test_resuming_a_finished_run_does_not_train_further(build, tmp_path, steps):
    first = build(**SAVING, max_steps=steps)
    first.train()
    second = build(**SAVING, max_steps=steps)
    second.train(resume_from_checkpoint=last_checkpoint(tmp_path / "run"))
    assert second.state.global_step == steps
    assert [path.name for path in checkpoints(tmp_path / "run")][-1] == f"checkpoint-{steps}"
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
