import logging
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from metaplastic.ops import cross_entropy
from metaplastic.tasks.text import collate_packed
from metaplastic.training import trainer as module

from .rows import collate_padded, packed_rows, padded_rows, weights_of

needs_torch_fused = pytest.param(
    "fused",
    marks=pytest.mark.skipif(cross_entropy.choose("cpu", torch.float32) is None, reason="needs PyTorch 2.13"),
)
SPARED = {"A_log", "dt_bias", "D", "b_scale", "prior_log"}


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


@pytest.mark.parametrize("form", ["plain", needs_torch_fused])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_accumulation_with_unequal_label_counts_is_one_large_batch(build, network, kind, form):
    rows, collator = (packed_rows(8), collate_packed) if kind == "packed" else (padded_rows(8), collate_padded)
    counts = [int((row["labels"][1:] != -100).sum()) for row in rows]
    assert len(set(counts)) > 2  # otherwise a mean of means would do
    model = network()
    expected = model(**collator(rows)).loss
    expected.backward()

    def trained():
        model = network()
        model.loss_form = form
        return model

    whole, loss = one_step(build, trained, rows, collator, per_device_train_batch_size=8)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for size, accumulation in ((2, 4), (1, 8)):
        parts, part_loss = one_step(
            build, trained, rows, collator, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
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


# Nothing waits for the device


class NoReading(TorchDispatchMode):
    """Where a number of a tensor is read, an accelerator would be waited for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "a tensor is read"
        return function(*args, **(kwargs or {}))


def test_batches_are_counted_on_the_host(build, monkeypatch):
    """Every batch, without reading a tensor; in the state when there is a log, and at the end."""
    trainer = build(logging_steps=4, max_steps=6)
    original, seen = type(trainer)._track_num_input_tokens, []

    def track(self, inputs):
        with NoReading():
            original(self, inputs)
        seen.append(int(self.state.num_input_tokens_seen))

    monkeypatch.setattr(type(trainer), "_track_num_input_tokens", track)
    trainer.train()
    assert seen == [0] * 4 + [4 * 24] * 2
    assert trainer.state.num_input_tokens_seen == 6 * 24
    assert trainer.state.log_history[0]["num_input_tokens_seen"] == 4 * 24


def test_offsets_stay_on_the_host(build, monkeypatch):
    """Every operator reads them there: on the device each of them would wait for it."""
    trainer = build()
    monkeypatch.setattr(type(trainer.args), "device", torch.device("meta"))
    loader = trainer.get_train_dataloader()
    batch = next(iter(loader))
    assert {x.device.type for x in batch.values()} == {"cpu"}
    moved = trainer._prepare_inputs(batch)
    assert {name: x.device.type for name, x in moved.items()} == {
        "input_ids": "meta",
        "labels": "meta",
        "cu_seqlens": "cpu",
    }


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("collator", [collate_packed, collate_padded])
def test_a_step_between_logs_waits_for_nothing(build, network, collator):
    """PyTorch raises where the host waits for the device; the first steps compile and allocate."""

    class Impatient(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("error" if state.global_step >= 3 else "default")

        def on_step_end(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("default")

    rows = [{name: x for name, x in row.items() if name != "starts"} for row in packed_rows(16)]
    try:
        build(rows=rows, collator=collator, callbacks=[Impatient()], logging_steps=100, bf16=True).train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    trainer = build(save_strategy="steps", save_steps=2, max_steps=5, logging_steps=100)
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
