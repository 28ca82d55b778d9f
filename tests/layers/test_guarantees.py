"""What every mixer promises: one suite over kind, backend, dtype, length, padding side, cuts, and state.

The oracle of all of them is the simplest use of a layer: one unpadded row at a time, whole, token by token in float64.
"""

import copy
import itertools

import pytest
import torch

from metaplastic import ops, rules
from metaplastic.layers import MIXERS
from metaplastic.ops import fused
from metaplastic.rules import AdditiveState, DeltaState, GaussianState, PalimpsaState

from .mixers import (
    CELLS,
    KINDS,
    TOLERANCE,
    close,
    cut,
    flat,
    gradients,
    inputs,
    make,
    masks,
    rebuilt,
    sampled,
    trained,
)  # fmt: skip

SLOW = pytest.mark.slow


def oracle(layer, x, keep, start):
    """Outputs (0 at padding) and final states of the real tokens of each row on their own."""
    outputs, finals = [], []
    for row in range(x.shape[0]):
        state = None if start is None else rebuilt(start, lambda s, row=row: s[row : row + 1])
        real = keep[row].nonzero()[:, 0]
        y, state = layer(x[row : row + 1, real], state)
        outputs.append(torch.zeros_like(x[row]).index_copy(0, real, y[0]))
        finals.append(flat(state))
    return torch.stack(outputs), [torch.cat(parts) for parts in zip(*finals, strict=True)]


@pytest.mark.parametrize(("kind", "backend", "dtype", "padding", "continued"), sampled(CELLS))
def test_padding_cuts_and_lengths(kind, backend, dtype, padding, continued):
    """Outputs, final states and every gradient, however the sequence is padded and cut; garbage in padded inputs."""
    layer = make(kind, backend, dtype)
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    low = dtype in (torch.bfloat16, torch.float16)
    few = (0, 2, 9) if continued else (1, 9)
    for length in few if dtype != torch.float64 else (0, 1, 2, 9) if padding == "none" else (9,):
        batch = 1 if length == 2 and padding == "none" else 4
        keep = masks(padding, batch, length)
        x = inputs(batch, length, seed=length, dtype=dtype).requires_grad_()
        start = None
        if continued:
            start = rebuilt(layer(inputs(batch, 5, 7, dtype))[1], lambda s: s.detach().requires_grad_())
        x64 = x.detach().double().requires_grad_()
        start64 = None if start is None else rebuilt(start, lambda s: s.detach().double().requires_grad_())
        expected, finals = oracle(exact, x64, keep, start64)
        weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        starts = [] if start is None else flat(start)
        loss = (expected * weights).sum() + sum(s.square().sum() for s in finals)
        wanted = gradients(loss, x64, *([] if start64 is None else flat(start64)), *trained(exact))
        for split in ("whole", "tokens", "pieces") if length > 1 else ("whole", "pieces"):
            filled = x.masked_fill(~keep[..., None], torch.nan)
            state, ys, at = start, [], 0
            for piece in filled.split(cut(length, split), 1):
                mask = None if padding == "none" else keep[:, at : at + piece.shape[1]]
                y, state = layer(piece, state, mask=mask)
                ys.append(y)
                at += piece.shape[1]
            y = torch.cat(ys, 1)
            case = f"{length} tokens, {split}"
            assert y.dtype == dtype
            assert not y[~keep].any(), case
            close(y, expected, dtype, f"{case}: output")
            for name, s, t in zip(("convolution", *type(state.memory)._fields), flat(state), finals, strict=True):
                close(s, t, dtype, f"{case}: {name}")
            assert all(s.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) for s in state.memory)
            loss = (y.double() * weights).sum() + sum(s.double().square().sum() for s in flat(state))
            found = gradients(loss, x, *starts, *trained(layer))
            assert not found[0][~keep].any(), case
            assert all(d.isfinite().all() for d in found), case
            if low:
                a, b = (torch.cat([d.double().flatten() for d in ds]) for ds in (found, wanted))
                # The filter's gains divide by small noises that 16-bit projections round.
                bound = TOLERANCE[dtype] * (1.5 if kind.startswith("bayesian") else 1)
                assert (a - b).norm() <= bound * b.norm(), f"{case}: gradients"
                continue
            # A gradient may be a small difference of large ones (a norm cancels what only scales its input).
            least = max(1e-3, 1e-2 * max(b.abs().max().item() for b in wanted if b.numel()))
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                close(a, b, dtype, f"{case}: gradient {i}", least)


@pytest.mark.parametrize(("kind", "backend"), CELLS)
def test_lengths_around_the_chunk(kind, backend):
    """One chunk is 64 tokens at most: whole against two cuts, with gradients."""
    layer = make(kind, backend)
    for length in (63, 64, 65, 130):
        x = inputs(1, length).requires_grad_()
        whole, final = layer(x)
        a, state = layer(x[:, :31])
        b, state = layer(x[:, 31:], state)
        pieces = torch.cat([a, b], 1)
        close(pieces, whole.detach(), torch.float64, f"{length}: output")
        for s, t in zip(flat(state), flat(final), strict=True):
            close(s, t.detach(), torch.float64, f"{length}: state")
        leaves = [x, *trained(layer)]
        for d, e in zip(
            gradients(pieces.square().sum() + state.memory[0].sum(), *leaves),
            gradients(whole.square().sum() + final.memory[0].sum(), *leaves),
            strict=True,
        ):
            close(d, e, torch.float64, f"{length}: gradient")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_of_every_type(kind, dtype):
    layer, x, keep = make(kind), inputs(4), masks("interior", 4, 11)
    y, state = layer(x, mask=keep.to(dtype))
    expected, finals = oracle(layer, x, keep, None)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    for a, b in zip(flat(state), finals, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "backend"), CELLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("continued", [False, True])
def test_packed_equals_a_loop(kind, backend, dtype, continued):
    """Output, every gradient, initial and final states; empty and one-token sequences; garbage in the tail."""
    layer, offsets = make(kind, backend), [0, 0, 1, 3, 9, 9, 16]
    x = inputs(1, 20).requires_grad_()
    start = None
    if continued:
        start = rebuilt(layer(inputs(6, 4, 7))[1], lambda s: s.detach().requires_grad_())
    filled = x.masked_fill((torch.arange(20) >= 16)[:, None], torch.nan)
    y, state = layer(filled, start, cu_seqlens=torch.tensor(offsets, dtype=dtype))
    loss, expected = y.square().sum() + sum(s.square().sum() for s in flat(state)), 0
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, last = layer(x[:, a:b], None if start is None else rebuilt(start, lambda s, n=n: s[n : n + 1]))
        torch.testing.assert_close(y[:, a:b], alone, rtol=0, atol=1e-12)
        for s, t in zip(flat(state), flat(last), strict=True):
            torch.testing.assert_close(s[n : n + 1], t, rtol=0, atol=1e-12)
        expected = expected + alone.square().sum() + sum(s.square().sum() for s in flat(last))
    assert not y[:, 16:].any()
    leaves = [x, *([] if start is None else flat(start)), *trained(layer)]
    found = gradients(loss, *leaves)
    assert not found[0][:, 16:].any()
    for a, b in zip(found, gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_values(kind):
    """Continuing twice from one state gives the same; nothing that went in or came out has changed."""
    layer = make(kind)
    with torch.no_grad():
        _, state = layer(inputs())
        kept = [s.clone() for s in flat(state)]
        first, later = layer(inputs(2, 3, 1), state)
        held = [s.clone() for s in flat(later)]
        layer(inputs(2, 5, 2), later)
        again, _ = layer(inputs(2, 3, 1), state)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(kept + held, flat(state) + flat(later), strict=True))


@pytest.mark.parametrize(("kind", "backend"), [c for c in CELLS if c[1] != "reference"])
def test_strictly_causal(kind, backend):
    layer, x = make(kind, backend, torch.float32), inputs(2, 70, dtype=torch.float32)
    changed = x.clone()
    changed[:, 40] += 1
    a, b = layer(x)[0], layer(changed)[0]
    assert torch.equal(a[:, :40], b[:, :40])
    assert not torch.equal(a[:, 40:], b[:, 40:])


@pytest.mark.parametrize("kind", ["palimpsa_m", "mamba2, groups", "palimpsa_d"])
def test_65537_tokens(kind):
    """More tokens than 16 bits count; finite in float32, and the end follows from the middle."""
    layer, x = make(kind, dtype=torch.float32), inputs(1, 65_537, dtype=torch.float32)
    with torch.no_grad():
        y, final = layer(x)
        _, state = layer(x[:, :65_000])
        rest, last = layer(x[:, 65_000:], state)
    assert y.isfinite().all()
    torch.testing.assert_close(rest, y[:, 65_000:], rtol=1e-4, atol=1e-5)
    for a, b in zip(flat(last), flat(final), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "backend"), [c for c in CELLS if c[1] != "reference"])
@pytest.mark.parametrize("evidence", [-torch.inf, -18.0, 1.0, 1e8])
def test_extreme_gates_and_evidence(kind, backend, evidence):
    """Decays of 1 and exp(-1000) side by side, evidence of 0, 1e-8 and 1e8, zero and huge inputs: all finite."""
    layer = make(kind, backend, torch.float32)
    with torch.no_grad():
        layer.dt_bias.copy_(torch.tensor([-80.0, 10.0, -5.0, 3.0]).view(4, *[1] * (layer.dt_bias.dim() - 1)))
        layer.A_log.copy_(torch.tensor([-30.0, 5.0, 0.0, 3.0]).view(4, *[1] * (layer.A_log.dim() - 1)))
        if hasattr(layer, "b_scale"):
            layer.b_scale.fill_(evidence)
    x = inputs(2, 40, dtype=torch.float32)
    x[0, 5:12], x[1, 20:], x[0, 30:33] = 0, x[1, 3], 1e4
    x.requires_grad_()
    y, state = layer(x)
    assert layer.gates(x).g.min() < (-900 if "wide" not in kind else -5)  # one kind bounds its steps
    assert y.isfinite().all()
    assert all(s.isfinite().all() for s in flat(state))
    if isinstance(state.memory, PalimpsaState):
        assert (state.memory.excess_precision >= 0).all()
    if isinstance(state.memory, GaussianState):
        assert torch.equal(state.memory.covariance, state.memory.covariance.mT)
        assert torch.linalg.eigvalsh(state.memory.covariance.double()).min() > 0
    found = gradients(y.sum(), x, *trained(layer))
    assert all(d.isfinite().all() for d in found)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    layer, x = make(kind, dtype=torch.float32), inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        again, _ = layer(x[:, :1], state)
    assert y.dtype == again.dtype == torch.bfloat16
    assert all(s.dtype == torch.float32 for s in state.memory)
    reference = layer(x)[0]
    assert (y.float() - reference).abs().max() < 0.1 * reference.abs().max()
    y.float().sum().backward()
    assert layer.A_log.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["all in bfloat16", "autocast"])
def test_the_rule_is_given_bfloat16(kind, how):
    """What the fast kernels take: 16 bits but for what weighs long memories (decays, priors, noises)."""
    dtype = torch.bfloat16 if how == "all in bfloat16" else torch.float32
    layer, x = make(kind, dtype=dtype), inputs(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        gates = layer.gates(x)._asdict()
    for name, found in gates.items():
        if found is not None and name in ("q", "k", "v", "w", "beta") and found.shape[3:]:
            assert found.dtype == torch.bfloat16, name
    assert gates["g"].dtype == torch.float32


@pytest.mark.parametrize(("kind", "written"), [("palimpsa_m", ("w", "beta")), ("mamba2, groups", ("v",))])
def test_small_steps_do_not_vanish_in_float16(kind, written):
    """Whose range is small: what is written stays float32, and is as in float64 but for the rounding of its factors."""
    layer = make(kind, dtype=torch.float16)
    with torch.no_grad():
        layer.dt_bias.fill_(-15.0)  # steps of 3e-7, below float16's normal numbers
    x = inputs(dtype=torch.float16)
    found, exact = layer.gates(x)._asdict(), copy.deepcopy(layer).double().gates(x.double())._asdict()
    for name in written:
        assert found[name].dtype == torch.float32 and found[name].abs().max() < 1e-4
        assert (found[name] - exact[name]).norm() < 0.02 * exact[name].norm()


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("palimpsa_d", {"short_convolution", "l2", "evidence"}),
        ("palimpsa_m", {"short_convolution", "evidence"}),
        ("mamba2, groups", {"short_convolution"}),
        ("gated_deltanet", {"short_convolution", "l2"}),
        ("bayesian", {"short_convolution", "l2"}),
    ],
)
def test_the_reference_is_pytorchs_operations_around_the_rule_too(monkeypatch, kind, kernels):
    """It does not even ask whether kernels could run. (float32 for the steps of Mamba2, or no evidence in 16 bits.)"""
    asked = set()
    monkeypatch.setattr(fused, "reason_against", lambda name, device: asked.add(name) or "not here")
    for backend, expected in (("auto", kernels), ("reference", set())):
        asked.clear()
        make(kind, backend, torch.bfloat16)(inputs(1, 3, dtype=torch.bfloat16))
        assert asked == expected


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind):
    """Non-contiguous inputs, expanded gradients (out.sum().backward())."""
    layer, x = make(kind), inputs(4, 6)
    scattered = torch.stack([x, x], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not scattered.is_contiguous()
    a, b = x.clone().requires_grad_(), scattered.requires_grad_()
    ya, yb = layer(a)[0], layer(b)[0]
    torch.testing.assert_close(ya, yb, rtol=0, atol=1e-14)
    ya.sum().backward()
    (yb * torch.ones_like(yb)).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (1, 7), (5, 1), (33, 20), (256, 3), (2, 256)])
def test_head_sizes(name, key_size, value_size):
    """From 1 to 256, not powers of two, K != V."""
    layer = make(name, num_heads=2, key_size=key_size, value_size=value_size)
    exact = copy.deepcopy(layer)
    exact.backend = "reference"
    torch.testing.assert_close(layer(inputs(1, 5))[0], exact(inputs(1, 5))[0], rtol=0, atol=1e-11)


# The others in a usual run: inside a model (tests/models/test_compile.py), and their operators (tests/ops).
@pytest.mark.parametrize(
    "kind",
    ["palimpsa_m", *(pytest.param(k, marks=SLOW) for k in ("palimpsa_d", "palimpsa_d_additive", "mamba2, groups"))],
)
def test_compiles_to_one_graph(kind):
    """A layer and a decode step, fullgraph; no recompilation for a new length or batch."""
    torch._dynamo.reset()
    layer = make(kind)
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for batch, length in ((2, 7), (3, 12), (4, 40)):
            if (batch, length) == (3, 12):
                torch._dynamo.config.error_on_recompile = True
            x = inputs(batch, length)
            y, _ = compiled(x)
            torch.testing.assert_close(y, layer(x)[0], rtol=0, atol=1e-12)
        torch._dynamo.config.error_on_recompile = False
        with torch.no_grad():
            for batch in (2, 3, 5):
                if batch == 3:
                    torch._dynamo.config.error_on_recompile = True
                state = layer(inputs(batch))[1]
                x = inputs(batch, 1, seed=1)
                torch.testing.assert_close(compiled(x, state)[0], layer(x, state)[0], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_compiles_training(kind):
    """PyTorch's own compiler at symbolic sizes, which keeps other tensors for the backward pass than eager does."""
    torch._dynamo.reset()
    layer = make(kind, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for batch, length in ((2, 40), (3, 25)):
        x = inputs(batch, length, dtype=torch.float32).requires_grad_()
        y, expected = compiled(x)[0], layer(x)[0]
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        leaves = [x, *trained(layer)]
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for a, b in zip(torch.autograd.grad(y.square().sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("kind", KINDS)
def test_gates_replay_the_memory(kind):
    """gates(x) are the rule's inputs: scanning the rule over them gives the layer's own memory."""
    layer, x = make(kind), inputs()
    named = layer.gates(x)._asdict()
    named.pop("prior_variance", None)  # it is in the initial state
    rule = {
        PalimpsaState: rules.palimpsa,
        AdditiveState: rules.additive,
        DeltaState: rules.delta,
        GaussianState: rules.bayesian,
    }[layer.memory_type]
    _, _, state = rule.scan(**named, state=layer.init_state(2).memory, scale=layer.scale)
    for a, b in zip(state, layer(x)[1].memory, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("continued", [False, True])
def test_one_way_to_ask_how_sure(kind, continued, monkeypatch):
    """The operator by the names of the gates and with the layer's scale reads what the layer itself reads."""
    layer, x = make(kind), inputs()
    state = layer(inputs(seed=1))[1] if continued else None
    operator, reads = getattr(ops, layer.operator), []

    def spy(*args, **kwargs):
        reads.append(operator(*args, **kwargs))
        return reads[0]

    with monkeypatch.context() as patch:
        patch.setattr(ops, layer.operator, spy)
        layer(x, state)
    start = {} if state is None else {"initial_state": state.memory}
    read = operator(**layer.gates(x, state)._asdict(), scale=layer.scale, output_variance=True, **start)
    (own,) = reads
    torch.testing.assert_close(read.output, own.output, rtol=0, atol=1e-12)
    for a, b in zip(read.state, own.state, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert read.variance.shape[:3] == (*x.shape[:2], layer.num_heads) and (read.variance > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reset_parameters(kind):
    """Idempotent under one seed, touches only the module's own parameters, works on the meta device."""
    layer = make(kind)
    before = {n: p.clone() for n, p in layer.named_parameters()}
    torch.manual_seed(5)
    layer.reset_parameters()
    first = {n: p.clone() for n, p in layer.named_parameters()}
    torch.manual_seed(5)
    layer.reset_parameters()
    own = dict(layer.named_parameters(recurse=False))
    assert not torch.equal(layer.A_log, before["A_log"])
    for name, p in layer.named_parameters():
        assert torch.equal(p, first[name])
        assert name in own or torch.equal(p, before[name])
    assert set(layer.no_weight_decay) <= set(own) | {n for n, _ in layer.named_buffers(recurse=False)}
    with torch.device("meta"):
        make(kind).reset_parameters()


@pytest.mark.parametrize("kind", ["palimpsa_d", "palimpsa_m", "mamba2, groups"])
def test_bad_inputs(kind):
    layer, x = make(kind), inputs()
    state = layer(x)[1]
    other = {PalimpsaState: AdditiveState, AdditiveState: PalimpsaState}[layer.memory_type]
    wrong = other(*([state.memory[0]] * len(other._fields)))
    shorter = rebuilt(state, lambda s: s[:, :, :-1] if s.dim() == 3 else s)
    for call, error, message in (
        (lambda: layer(x[..., :5]), ValueError, r"x must be \[B, T, 12\], got \[2, 11, 5\]"),
        (lambda: layer(x.long()), TypeError, "x must be a floating point tensor, got torch.int64"),
        (lambda: layer(x, mask=torch.ones(2, 3, dtype=torch.bool)), ValueError, r"mask must be \[B, T\]"),
        (lambda: layer(x, mask=[[1] * 11] * 2), TypeError, "mask must be a tensor"),
        (
            lambda: layer(x, mask=torch.zeros(2, 11).index_fill(1, torch.tensor([0]), -torch.inf)),
            ValueError,
            "additive masks are not taken",
        ),
        (lambda: layer(x[:1], mask=torch.ones(1, 11).bool(), cu_seqlens=torch.tensor([0, 3])), ValueError, "not both"),
        (lambda: layer(x, state.memory), TypeError, "state must be a MixerState"),
        (lambda: layer(x, type(state)(state.convolution, wrong)), TypeError, layer.memory_type.__name__),
        (lambda: layer(x, shorter), ValueError, "convolution state must be"),
        (lambda: layer(x, cu_seqlens=torch.tensor([0, 3])), ValueError, "batch size must be 1"),
        (lambda: layer(x[:1], state), ValueError, "state must be"),
    ):
        with pytest.raises(error, match=message):
            call()
