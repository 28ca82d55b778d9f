"""What activations wait for the backward pass decides bytes and time, and no bit of a gradient."""

import functools
import types

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from metaplastic.layers import MIXERS
from metaplastic.models.checkpointing import KINDS, checkpoint_activations, keep_answers, once
from metaplastic.ops import cross_entropy

from .conftest import make, tokens


class Made(TorchDispatchMode):
    """Which operators have run, and the bytes of what they made that is still held by something."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ran: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.ran.append(str(function))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def held(self, model) -> int:
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        return sum(n for key, (ref, n) in self.made.items() if not ref.expired() and key not in weights)


def gradients(model, ids, *, bf16=False, **options):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(ids, labels=ids, **options).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_gradients_are_the_same_bits(kind):
    """Of every mixer: padded, packed, and in bfloat16."""
    model, ids, mask = make(kind).train(), tokens(), torch.ones(3, 12)
    mask[0, :4] = 0
    batches = [
        (ids, {"attention_mask": mask}),
        (ids.view(1, -1), {"cu_seqlens": torch.tensor([0, 5, 12, 36])}),
        (ids, {"bf16": True}),
    ]
    found = {}
    for how in KINDS:
        checkpoint_activations(model, how)
        found[how] = [gradients(model, batch, **options) for batch, options in batches]
    for how in ("full", "selective"):
        for a, b in zip(found["none"], found[how], strict=True):
            for name, gradient in a.items():
                assert gradient.any() and torch.equal(gradient, b[name]), (how, name)


def test_what_is_dear_is_not_computed_again():
    """In the backward pass: no memory and no product of the forward pass a second time, which `full` does."""
    model, ids = make(num_hidden_layers=1, mixers="palimpsa_d").train(), tokens()
    memory, products = "metaplastic.palimpsa_cpu.default", ("aten.mm.default", "aten.addmm.default")
    counts = {}
    for how in KINDS:
        checkpoint_activations(model, how)
        loss = model(ids, labels=ids).loss
        with Made() as backward:
            loss.backward()
        counts[how] = (backward.ran.count(memory), sum(backward.ran.count(name) for name in products))
        assert ("aten.convolution.default" in backward.ran) == (how != "none")  # what is cheap is
    assert counts["selective"] == counts["none"] and counts["none"][0] == 0
    assert counts["full"][0] == 1 and counts["full"][1] > counts["none"][1]


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "attention"])
def test_bytes_that_wait_for_the_backward_pass(mixer):
    """In the proportions of the published 170M models: less than half for selective, an eighth or so for full."""
    options = {"num_heads": 4, "key_size": 12, "value_size": 12} | ({"num_groups": 4} if "groups" in mixer else {})
    sizes = {"hidden_size": 48, "intermediate_size": 128, "mixer_options": {mixer: options}, "num_hidden_layers": 2}
    model, ids = make(mixer, **sizes, mixers=mixer).train(), tokens(1, 64)
    held = {}
    for how in KINDS:
        checkpoint_activations(model, how)
        with Made() as forward:
            out = model.model(ids, use_cache=False).last_hidden_state
        held[how] = forward.held(model)
        del out
    assert held["full"] < 0.2 * held["none"]
    assert held["full"] < held["selective"] < 0.5 * held["none"], held


@pytest.mark.slow
@pytest.mark.parametrize("how", KINDS)
def test_compiled_with_a_fused_loss_equals_eager(how):
    if cross_entropy.choose("cpu", torch.float32) is None:
        pytest.skip("needs PyTorch 2.13")
    torch._dynamo.reset()
    model, ids = make(num_hidden_layers=1, mixers="palimpsa_d").train(), tokens(5, 11)
    model.loss_form = "fused"
    checkpoint_activations(model, how)
    weights = list(model.parameters())
    expected = model(ids, labels=ids).loss
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    found = compiled(ids, labels=ids).loss
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    pairs = zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", KINDS)
def test_what_a_block_is_told_is_not_asked_again(how, first):
    """Every run of a block has its own answers, however often and in whatever order their gradients are asked for.

    What was noted for a call (here a factor) is there again too, whatever has been noted since.
    """
    model, ids, asked = make(num_hidden_layers=2, mixers="palimpsa_d").train(), tokens(), []
    notes = types.SimpleNamespace(factor=1.0)

    def ask():
        asked.append(len(asked) + 1.0)
        return torch.tensor(asked[-1]), (torch.tensor(2.0),)

    def told(mixer_forward, *args, **options):
        y, state = mixer_forward(*args, **options)
        factor, (other,) = once(ask)
        return y * factor * other * notes.factor, state

    for block in model.model.layers:
        block.mixer.forward = functools.partial(told, block.mixer.forward)
    losses = []
    for kind in ("none", how):
        keep = functools.partial(keep_answers, notes=notes, name="factor")
        for change in (keep, functools.partial(checkpoint_activations, kind=kind))[:: 1 if first else -1]:
            change(model)
        asked.clear()
        losses.append([])
        for notes.factor in (1.0, 3.0):
            losses[-1].append(model(ids, labels=ids).loss)
        assert len(asked) == 4
    for plain, found in zip(*losses, strict=True):
        expected = torch.autograd.grad(plain, list(model.parameters()))
        again = torch.autograd.grad(found, list(model.parameters()), retain_graph=how != "selective")
        assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
        if how != "selective":
            again = torch.autograd.grad(found, list(model.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert len(asked) == 4 and notes.factor == 3.0


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="checkpointing must be one of none, full, selective, got 'some'"):
        checkpoint_activations(make(), "some")
