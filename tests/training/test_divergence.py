"""A run whose numbers are no longer finite says so in one line, and its checkpoints are those of before."""

import pytest
import torch
from transformers import TrainerCallback

from metaplastic.training import MetaplasticTrainer, train
from metaplastic.training.checkpoint import checkpoints

from .rows import packed_rows


@pytest.mark.parametrize("mixer", ["palimpsa_d", "mamba2"])
def test_a_run_that_diverges_says_so(tiny, tmp_path, mixer):
    config = tiny(mixer=mixer, learning_rate=1e30, warmup=0, save_every=1)
    with pytest.raises(
        ValueError, match=r"learning_rate: got 1e\+30, and the loss has diverged by step \d+ \("
    ) as error:
        train(config, tmp_path / "run")
    assert "try a smaller one" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run" / "final").exists()


def test_nothing_that_is_not_finite_is_saved(tiny, tmp_path, monkeypatch):
    original = MetaplasticTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        return loss + float("nan") if self.state.global_step == 4 else loss

    monkeypatch.setattr(MetaplasticTrainer, "compute_loss", compute_loss)
    with pytest.raises(ValueError, match=r"the loss has diverged by step 6 \(loss is nan\)"):
        train(tiny(eval_every=0), tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3"]


def test_gradients_that_are_not_finite_are_not_saved(tiny, tmp_path, monkeypatch):
    original = MetaplasticTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        if self.state.global_step == 5:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    monkeypatch.setattr(MetaplasticTrainer, "compute_loss", compute_loss)
    with pytest.raises(ValueError, match=r"the loss has diverged by step 6 \((grad_norm is nan|.* nan)\)"):
        train(tiny(eval_every=0, accumulation=1), tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3"]


def test_weights_that_overflow_in_the_step_of_a_save_are_not_saved(build, tmp_path):
    class Overflow(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                with torch.no_grad():
                    model.model.layers[1].mixer.dt_bias.fill_(float("inf"))

    trainer = build(max_steps=6, save_strategy="steps", save_steps=2)
    trainer.add_callback(Overflow())
    with pytest.raises(ValueError, match=r"the loss has diverged by step 4 \(the norm of the weights is inf\)"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]


def test_an_error_of_another_kind_keeps_its_words(build, monkeypatch):
    monkeypatch.setattr(MetaplasticTrainer, "compute_loss", lambda *args, **kwargs: exec("raise ValueError('mine')"))
    with pytest.raises(ValueError, match="^mine$"):
        build().train()


def test_an_evaluation_that_diverges_says_so(build):
    trainer = build()
    with torch.no_grad():
        trainer.model.model.layers[1].mixer.dt_bias.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"learning_rate: got 0.01, and the loss has diverged by step 0 \(.* nan\)"):
        trainer.evaluate()


def test_a_step_in_which_nothing_is_predicted_has_the_loss_0(build):
    rows = packed_rows(12)
    for row in rows[4:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    trainer = build(rows=rows, max_steps=6)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[2:4] == [0.0, 0.0] and all(loss > 0 for loss in losses[:2] + losses[4:])
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
