import json
import logging
import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from metaplastic.tasks.text import collate_packed
from metaplastic.training import MetaplasticTrainer, last_checkpoint, training_arguments
from metaplastic.training import trainer as module
from metaplastic.training.trainer import STAGING, checkpoints

SPARED = {"A_log", "dt_bias", "D", "b_scale", "prior_log"}


def packed_rows(count, length=12, seed=0):
    """Rows with one to three documents and every number of labels from none to all."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(0, 40, (length,), generator=generator)
        labels = ids.clone()
        labels[: (number * 5) % (length + 1)] = -100
        starts = torch.tensor([0, *range(3, length, 4)][: 1 + number % 3])
        rows.append({"input_ids": ids, "labels": labels.index_fill(0, starts, -100), "starts": starts})
    return rows


def padded_rows(count, length=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(0, 40, (length,), generator=generator)
        padding = (number * 4) % length
        mask = (torch.arange(length) >= padding).long()  # on the left; rows 0, 3, ... have none
        rows.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    return rows


def collate_padded(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture
def build(network, tmp_path):
    def make(model=None, rows=None, eval_rows=None, collator=collate_packed, callbacks=None, **arguments):
        settings = {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "train_sampling_strategy": "sequential",
            "disable_tqdm": True,
        }
        return MetaplasticTrainer(
            model=network() if model is None else model,
            args=training_arguments(tmp_path / "run", **(settings | arguments)),
            train_dataset=packed_rows(16) if rows is None else rows,
            eval_dataset=packed_rows(7, seed=2) if eval_rows is None else eval_rows,
            data_collator=collator,
            callbacks=callbacks,
        )

    return make


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Weight decay


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_decay_would_bias_is_spared_from_it(build, network, tied):
    options = {"palimpsa_d": {"num_heads": 2, "train_prior": True}}  # or the prior is no parameter
    model = network(tie_word_embeddings=tied, mixer_options=options)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(1.0)
    trainer = build(model, weight_decay=0.5, learning_rate=0.1)
    optimizer = trainer.create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # without a gradient AdamW only decays
    decayed = {name for name, parameter in model.named_parameters() if bool((parameter != 1).all())}
    kept = {name for name, parameter in model.named_parameters() if bool((parameter == 1).all())}
    assert {name.rsplit(".", 1)[-1] for name in kept if "norm" not in name} == SPARED
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert decayed | kept == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in decayed) == (not tied)
    assert "model.embed_tokens.weight" in decayed
    assert "model.layers.0.mixer.conv.weight" in decayed
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sum(sizes) == len(decayed) + len(kept)  # every weight once, the tied one too


def test_parameters_are_spared_under_the_names_of_wrappers(build, network):
    model = network()
    trainer = build(model)
    plain = set(trainer.get_decay_parameter_names(model)) & {name for name, _ in model.named_parameters()}

    class Parallel(nn.Module):  # as torch's DistributedDataParallel names things
        def __init__(self, module):
            super().__init__()
            self.module = module

    for wrapped, prefix in ((torch.compile(model), "_orig_mod."), (Parallel(model), "module.")):
        names = {name for name, _ in wrapped.named_parameters()}
        assert set(trainer.get_decay_parameter_names(wrapped)) & names == {prefix + name for name in plain}
    model.model.layers[0].mixer = torch.compile(model.model.layers[0].mixer)
    decayed = set(trainer.get_decay_parameter_names(model))
    assert not [name for name in decayed if name.rsplit(".", 1)[-1] in SPARED]


# Checkpoints


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
    assert {path.name for path in run.iterdir()} == {"checkpoint-2", STAGING}
    assert (run / STAGING / "checkpoint-4").is_dir()
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


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_resuming_from_weights_that_do_not_fit_is_an_error(build, tmp_path, change):
    build(**SAVING, max_steps=2).train()
    file = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    weights = load_file(file)
    weights["model.bogus.weight"] = (
        weights.pop("model.layers.0.mixer.q_proj.weight") if change == "missing" else torch.ones(1)
    )
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit.*bogus"):
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


# One function of the data, however it is cut


def one_step(build, network, rows, collator, **arguments):
    """What one step of plain gradient descent with rate 1 takes off the weights, and the logged loss."""
    model = network()
    before = weights_of(model)
    trainer = build(
        model, rows, collator=collator, max_steps=1, optim="sgd", learning_rate=1.0, weight_decay=0.0,
        max_grad_norm=0.0, lr_scheduler_type="constant", **arguments,
    )  # fmt: skip
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return {name: before[name] - value for name, value in weights_of(model).items()}, loss


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_accumulation_with_unequal_label_counts_is_one_large_batch(build, network, kind):
    rows, collator = (packed_rows(8), collate_packed) if kind == "packed" else (padded_rows(8), collate_padded)
    counts = [int((row["labels"][1:] != -100).sum()) for row in rows]
    assert len(set(counts)) > 2  # otherwise a mean of means would do
    model = network()
    expected = model(**collator(rows)).loss
    expected.backward()
    whole, loss = one_step(build, network, rows, collator, per_device_train_batch_size=8)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for size, accumulation in ((2, 4), (1, 8)):
        parts, part_loss = one_step(
            build, network, rows, collator, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
        )
        assert part_loss == pytest.approx(loss, abs=1e-6)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert parameter.grad.abs().max() > 1e-5, name
                torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
                torch.testing.assert_close(parts[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("rows", [packed_rows(7, seed=2), padded_rows(7, seed=3)], ids=["packed", "padded"])
def test_evaluation_does_not_depend_on_the_batch_size(build, network, rows):
    model, collator = network(), collate_packed if "starts" in rows[0] else collate_padded
    model.train()
    total, count = 0.0, 0
    for row in rows:  # each predicted token by itself
        batch = collator([row])
        with torch.no_grad():
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
        for position, label in enumerate(batch["labels"][0].tolist()[1:]):
            if label != -100:
                total -= float(logits[position].log_softmax(-1)[label])
                count += 1
    for size in (1, 3, 16):
        metrics = build(model, collator=collator, eval_rows=rows, per_device_eval_batch_size=size).evaluate()
        assert metrics["eval_loss"] == pytest.approx(total / count, abs=1e-6)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert metrics["eval_tokens"] == count
    assert model.training  # as it was


def test_evaluation_of_nothing_is_an_error(build):
    blank = [row | {"labels": torch.full_like(row["labels"], -100)} for row in packed_rows(2)]
    for rows in (blank, []):
        with pytest.raises(ValueError, match="eval_dataset has no token to predict"):
            build(eval_rows=[{}]).evaluate(rows)


def test_evaluation_holds_the_logits_of_one_batch(build, network):
    model, alive = network(), []

    def watch(module, args, output):
        assert not [ref for ref in alive if ref() is not None], "the logits of an earlier batch are still held"
        assert not output.requires_grad
        alive.append(weakref.ref(output))

    model.lm_head.register_forward_hook(watch)
    build(model, per_device_eval_batch_size=1).evaluate()
    assert len(alive) == 7


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("through", ["arguments", "model"])
def test_checkpointing_gives_the_same_gradients(build, network, reentrant, through):
    rows, how = packed_rows(4), {"use_reentrant": reentrant}
    plain, loss = one_step(build, network, rows, collate_packed, per_device_train_batch_size=4)
    calls = []

    def checkpointed(**changes):
        model = network(**changes)
        model.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        if through == "model":
            model.activation_checkpointing_enable(how)
        return model

    arguments = (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": how} if through == "arguments" else {}
    )
    again, loss_again = one_step(build, checkpointed, rows, collate_packed, per_device_train_batch_size=4, **arguments)
    assert len(calls) == 2  # once forward, once again for the gradient
    assert loss_again == loss
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_bf16_is_autocast_in_training_and_evaluation(build, network):
    model, seen = network(), []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer = build(model, bf16=True, max_steps=2)
    first = trainer.evaluate()["eval_loss"]  # before training has wrapped the model
    trainer.train()
    trainer.evaluate()
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert first == pytest.approx(build(network()).evaluate()["eval_loss"], rel=0.02)


# What is logged and shown


def test_logs_carry_the_speed_of_training_alone(build, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    class Tick(TrainerCallback):  # a step of 24 tokens takes 2 seconds, an evaluation 100
        def on_step_end(self, args, state, control, **kwargs):
            now[0] += 2

        def on_prediction_step(self, args, state, control, **kwargs):
            now[0] += 100

    trainer = build(callbacks=[Tick()], eval_strategy="steps", eval_steps=2, max_steps=4)
    trainer.train()
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert speeds == [12.0] * 4
    assert trainer.state.num_input_tokens_seen == 4 * 24
    assert not [entry for entry in trainer.state.log_history if "loss" in entry and "train_runtime" in entry]


def test_a_loss_that_is_not_a_number_is_logged_as_such(build, network):
    model = network()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    trainer = build(model, max_steps=1)
    trainer.train()
    assert math.isnan(trainer.state.log_history[0]["loss"])


def test_every_checkpoint_closes_the_average_of_the_logged_loss(build):
    trainer = build(**SAVING, max_steps=5, logging_steps=100)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4, 5]


def test_the_bar_shows_losses_and_speed_and_nothing_else_is_printed(build, capsys):
    build(disable_tqdm=False, eval_strategy="steps", eval_steps=3, max_steps=4).train()
    out, err = capsys.readouterr()
    assert out == ""
    last = [line for line in err.replace("\n", "\r").split("\r") if "4/4" in line][-1]
    assert "loss=" in last and "eval_loss=" in last and "tokens/s=" in last
    assert "{" not in err
    assert "4/4" in err and "7/7" not in err  # seven rows are one batch of evaluation


def test_without_a_bar_there_is_a_line_for_each_evaluation(build, capsys, caplog):
    caplog.set_level(logging.INFO, logger="metaplastic")
    build(eval_strategy="steps", eval_steps=2, max_steps=4).train()
    lines = [record.getMessage() for record in caplog.records if record.name == "metaplastic"]
    assert len(lines) == 2
    assert lines[1].startswith("step 4 of 4: loss ") and "eval_loss" in lines[1] and "tokens/s" in lines[1]
    assert capsys.readouterr().out == ""
