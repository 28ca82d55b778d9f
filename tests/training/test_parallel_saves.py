"""Checkpoints that are written while the training goes on are those that are written while it waits."""

import hashlib
import threading

import pytest
import torch
from transformers import TrainerCallback

from metaplastic.training import last_checkpoint, saving
from metaplastic.training import trainer as module
from metaplastic.training.checkpoint import check_seal, checkpoints, step_of
from metaplastic.training.interrupt import Interruption

from .rows import weights_of

SAVES = {"save_strategy": "steps", "save_steps": 2}


class Steps(TrainerCallback):
    """Sets an event when so many steps are done."""

    def __init__(self, steps: int):
        self.steps, self.done = steps, threading.Event()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.steps:
            self.done.set()


@pytest.fixture
def trainer_of(build, tmp_path, network):
    def make(asynchronous, callbacks=None, **arguments):
        trainer = build(network(tie_word_embeddings=True), callbacks=callbacks, **(SAVES | arguments))
        trainer.asynchronous = asynchronous
        trainer.run = "a run"
        trainer.beside = lambda folder: (folder / "README.md").write_text(f"step {trainer.state.global_step}")
        return trainer

    return make


def held_until(monkeypatch, event):
    """Nothing is written before the event."""
    original = saving._guarded

    def guarded(*args):
        assert event.wait(20)
        original(*args)

    monkeypatch.setattr(saving, "_guarded", guarded)


def test_on_a_cpu_the_training_waits_by_default(build):
    assert build().asynchronous is False


def test_what_is_written_later_is_the_same_to_the_bit(trainer_of, tmp_path, monkeypatch):
    """Although two steps have changed the weights and the optimiser by then."""
    trainer_of(False, max_steps=5, save_total_limit=None).train()
    expected = (tmp_path / "run").rename(tmp_path / "expected")
    later = Steps(4)
    held_until(monkeypatch, later.done)
    # The save after step 4 waits for the one after step 2, so the event has to come before it.
    trainer_of(True, [later], max_steps=5, save_total_limit=None, logging_steps=1).train()
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == [2, 4, 5]
    for checkpoint in checkpoints(expected):
        found = tmp_path / "run" / checkpoint.name
        check_seal(found, "a run")
        names = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*")}
        assert names == {str(file.relative_to(found)) for file in found.rglob("*")}
        assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "README.md"} <= names
        for name in names - {"trainer_state.json", "checkpoint.json"}:  # which have the speed of the training
            assert sha256(found / name) == sha256(checkpoint / name), name


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_it_goes_on_as_if_it_had_not_been_saved(trainer_of, tmp_path):
    constant = {"lr_scheduler_type": "constant"}  # or the shorter run would not be the beginning of the other
    undisturbed = trainer_of(False, max_steps=6, save_strategy="no", **constant)
    undisturbed.train()
    trainer_of(True, max_steps=3, save_steps=3, **constant).train()
    second = trainer_of(True, max_steps=6, save_steps=3, **constant)
    second.train(resume_from_checkpoint=last_checkpoint(tmp_path / "run"))
    for name, weight in weights_of(undisturbed.model).items():
        torch.testing.assert_close(weights_of(second.model)[name], weight, rtol=0, atol=0)


def test_the_next_save_waits_and_the_end_too(trainer_of, tmp_path, monkeypatch):
    """A writer that takes until the next save asks for it; no more than one writes, none is lost."""
    seal, writing, seen = saving.seal, threading.Semaphore(1), []

    def slowly(staged, *args):
        assert writing.acquire(blocking=False), "two checkpoints are written at once"
        threading.Event().wait(0.1)
        seen.append((staged.name, threading.current_thread() is threading.main_thread()))
        seal(staged, *args)
        writing.release()

    monkeypatch.setattr(saving, "seal", slowly)
    trainer_of(True, max_steps=6, save_total_limit=2).train()
    assert seen == [(f"checkpoint-{step}", False) for step in (2, 4, 6)]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize(("failing", "reached"), [(2, 4), (6, 6)])
def test_an_error_of_the_writer_is_raised_at_the_next_save_or_the_end(
    trainer_of, tmp_path, monkeypatch, failing, reached
):
    seal = saving.seal

    def full(staged, *args):
        if staged.name == f"checkpoint-{failing}":
            raise OSError("No space left on device")
        seal(staged, *args)

    monkeypatch.setattr(saving, "seal", full)
    trainer = trainer_of(True, max_steps=6)
    with pytest.raises(OSError, match=f"checkpoint-{failing} could not be saved in .*No space left"):
        trainer.train()
    assert trainer.state.global_step == reached
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == ({"checkpoint-2", "checkpoint-4"} if failing == 6 else set())


def test_an_error_of_the_training_waits_for_the_writer_and_comes_first(trainer_of, tmp_path, monkeypatch, caplog):
    class Fail(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                failed.set()
                raise ValueError("mine")

    failed = threading.Event()
    held_until(monkeypatch, failed)
    with pytest.raises(ValueError, match="mine"):
        trainer_of(True, [Fail()]).train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    failed.clear()
    monkeypatch.setattr(saving, "seal", lambda *args: (_ for _ in ()).throw(OSError("No space left")))
    with pytest.raises(ValueError, match="mine"):
        trainer_of(True, [Fail()]).train()
    assert "checkpoint-2 could not be saved" in caplog.text


def test_an_interrupted_run_leaves_with_its_checkpoint_whole(trainer_of, tmp_path, monkeypatch):
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            interruption.came |= state.global_step == 2

    interruption = Interruption()
    seal = saving.seal
    monkeypatch.setattr(saving, "seal", lambda *args: (threading.Event().wait(0.2), seal(*args)))
    with pytest.raises(KeyboardInterrupt), interruption:
        trainer_of(True, [Interrupt(), interruption], save_steps=100).train()
    (checkpoint,) = checkpoints(tmp_path / "run")
    assert checkpoint.name == "checkpoint-3"
    check_seal(checkpoint, "a run")


def test_the_best_checkpoint_is_there_when_it_is_loaded(trainer_of, tmp_path, monkeypatch):
    losses = {2: 1.0, 4: 2.0}
    monkeypatch.setattr(
        module.MetaplasticTrainer, "evaluate", lambda self, **_: {"eval_loss": losses[self.state.global_step]}
    )
    trainer = trainer_of(
        True, max_steps=4, eval_strategy="steps", eval_steps=2, save_total_limit=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2")
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == [2, 4]
