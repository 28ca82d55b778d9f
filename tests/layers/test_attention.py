"""Attention: against Hugging Face's, and what every mixer promises, with a state that grows.

Two states are the same belief if their real slots are: an unpadded row on its own has no slots of padding.
"""

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

from metaplastic.layers import Attention
from metaplastic.layers import attention as module
from metaplastic.layers.attention import AttentionState
from metaplastic.layers.mixer import MixerState

from .mixers import TOLERANCE, WIDTH, close, cut, gradients, inputs, make, masks, sampled, trained

KINDS = {
    "plain": {"key_size": 4},
    "window, shared keys, odd size": {"num_key_heads": 2, "window": 4, "key_size": 3},
    "no positions, window of one": {"window": 1, "rotary_base": None},
    "shared keys": {"num_key_heads": 1, "key_size": 6},
}


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def attention(kind="plain", dtype=torch.float64, **options):
    return make("attention", dtype=dtype, **(KINDS[kind] | options))


def changed(state, floats, others=lambda s: s):
    return MixerState(
        state.convolution, AttentionState(*(floats(s) if s.is_floating_point() else others(s) for s in state.memory))
    )


def floats(state):
    return [state.memory.keys, state.memory.values]


def row(state, i):
    """The real slots of one row."""
    real = state.memory.positions[i] >= 0
    return AttentionState(*(s[i : i + 1, real] for s in state.memory))


def one(state, i):
    return None if state is None else changed(state, lambda s: s[i : i + 1], lambda s: s[i : i + 1])


def start_of(layer, batch, dtype, padded=True):
    """A state that was padded, as a leaf."""
    keep = masks("interior" if padded else "none", batch, 5)
    device = layer.o_proj.weight.device
    with torch.no_grad():
        _, state = layer(inputs(batch, 5, 7, dtype).to(device), mask=keep.to(device))
    return changed(state, lambda s: s.detach().requires_grad_())


@pytest.mark.parametrize(("kind", "dtype", "padding", "continued"), sampled([(kind,) for kind in KINDS]))
@devices
def test_padding_cuts_and_lengths(kind, dtype, padding, continued, device):
    """As of every mixer: the oracle is each row alone, unpadded and whole, in float64."""
    layer = attention(kind, dtype)
    exact = copy.deepcopy(layer).double()
    layer = layer.to(device)
    for length in (0, 1, 2, 9):
        batch = 1 if length == 2 and padding == "none" else 4
        keep = masks(padding, batch, length)
        x = inputs(batch, length, seed=length, dtype=dtype).requires_grad_()
        x64 = x.detach().double().requires_grad_()
        start = start_of(layer, batch, dtype) if continued else None
        start64 = None
        if start is not None:
            start64 = changed(start, lambda s: s.detach().cpu().double().requires_grad_(), torch.Tensor.cpu)
        weights = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        loss, outputs, finals = 0, [], []
        for i in range(batch):
            real = keep[i].nonzero()[:, 0]
            y, state = exact(x64[i : i + 1, real], one(start64, i))
            outputs.append(torch.zeros_like(x64[i]).index_copy(0, real, y[0]))
            finals.append(row(state, 0))
            loss = loss + (y[0] * weights[i, real]).sum() + sum(s.square().sum() for s in finals[-1][:2])
        wanted = gradients(loss, x64, *([] if start64 is None else floats(start64)), *trained(exact))
        for split in ("whole", "tokens", "pieces"):
            state, ys, at = start, [], 0
            filled = x.masked_fill(~keep[..., None], torch.nan).to(device)
            for piece in filled.split(cut(length, split), 1):
                mask = None if padding == "none" else keep[:, at : at + piece.shape[1]].to(device)
                y, state = layer(piece, state, mask=mask)
                ys.append(y)
                at += piece.shape[1]
            y, case = torch.cat(ys, 1).cpu(), f"{length} tokens, {split}"
            assert y.dtype == dtype
            assert not y[~keep].any(), case
            close(y, torch.stack(outputs), dtype, f"{case}: output")
            loss = (y.double() * weights).sum()
            for i, final in enumerate(finals):
                found = AttentionState(*(s.cpu() for s in row(state, i)))
                assert torch.equal(found.positions, final.positions), case
                for name in ("keys", "values"):
                    assert getattr(found, name).dtype == dtype
                    close(getattr(found, name), getattr(final, name).detach(), dtype, f"{case}: {name} of row {i}")
                loss = loss + sum(s.double().square().sum() for s in found[:2])
            found = gradients(loss, x, *([] if start is None else floats(start)), *trained(layer))
            found = [d.cpu() for d in found]
            assert not found[0][~keep].any(), case
            if dtype in (torch.bfloat16, torch.float16):
                a, b = (torch.cat([d.double().flatten() for d in ds]) for ds in (found, wanted))
                assert (a - b).norm() <= TOLERANCE[dtype] * b.norm(), f"{case}: gradients"
                continue
            least = max(1e-3, 1e-2 * max(b.abs().max().item() for b in wanted if b.numel()))
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                close(a, b, dtype, f"{case}: gradient {i}", least)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("continued", [False, True])
@devices
def test_packed_equals_a_loop(kind, continued, device):
    """Output, every gradient, initial and final states; empty and one-token sequences; garbage in the tail."""
    layer, offsets = attention(kind).to(device), [0, 0, 1, 3, 9, 9, 16]
    x = inputs(1, 20).to(device).requires_grad_()
    start = start_of(layer, 6, torch.float64) if continued else None
    filled = x.masked_fill((torch.arange(20, device=device) >= 16)[:, None], torch.nan)
    y, state = layer(filled, start, cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device))
    later = inputs(6, 2, seed=9).to(device)
    after, _ = layer(later, state)
    loss, expected = y.square().sum() + after.square().sum(), 0
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, last = layer(x[:, a:b], one(start, n))
        torch.testing.assert_close(y[:, a:b], alone, rtol=0, atol=1e-12)
        for s, t in zip(row(state, n), row(last, 0), strict=True):
            torch.testing.assert_close(s, t, rtol=0, atol=1e-12)
        following, _ = layer(later[n : n + 1], last)
        torch.testing.assert_close(after[n : n + 1], following, rtol=0, atol=1e-12)
        expected = expected + alone.square().sum() + following.square().sum()
    assert not y[:, 16:].any()
    leaves = [x, *([] if start is None else floats(start)), *trained(layer)]
    for a, b in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    nothing, state = layer(x[:, :0], cu_seqlens=torch.tensor([0, 0], device=device))
    assert nothing.shape == (1, 0, WIDTH)
    assert state.memory.positions.shape[0] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_a_large_mask(kind, packed, monkeypatch):
    """The same as in one piece, with and without padding, a state, and a window to skip slots by."""
    layer, x = attention(kind), inputs(1 if packed else 2, 300)
    for past, keep in itertools.product((False, True), (None, masks("interior", 3, 300)[:2])):
        if packed and keep is not None:
            continue
        start = start_of(layer, 2, torch.float64, keep is not None) if past else None
        layout = {"cu_seqlens": torch.tensor([0, 130, 290])} if packed else {"mask": keep}
        monkeypatch.setattr(module, "_LARGE", 1 << 24)
        whole, final = layer(x, start, **layout)
        monkeypatch.setattr(module, "_LARGE", 1)  # blocks of 64
        y, state = layer(x, start, **layout)
        torch.testing.assert_close(y, whole, rtol=0, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(state.memory, final.memory, strict=True))


def test_blocks_of_packed_tokens_read_no_earlier_sequence(monkeypatch):
    """From the beginning of the one that a block begins in."""
    layer, x, read = attention(), inputs(1, 300), []
    attend = layer._attend
    monkeypatch.setattr(module, "_LARGE", 1)  # blocks of 64
    monkeypatch.setattr(
        layer, "_attend", lambda q, seen, allowed: read.append(allowed.shape[1:]) or attend(q, seen, allowed)
    )
    layer(x, cu_seqlens=torch.tensor([0, 0, 130, 130, 290, 290]))
    assert read == [(64, 64), (64, 128), (64, 192), (64, 256 - 130), (44, 300 - 130)]


def test_65537_tokens():
    """A window keeps a long text affordable; its end follows from its middle."""
    layer, x = attention(window=9, dtype=torch.float32), inputs(1, 65_537, dtype=torch.float32)
    with torch.no_grad():
        y, final = layer(x)
        _, state = layer(x[:, :65_000])
        rest, last = layer(x[:, 65_000:], state)
    assert y.isfinite().all()
    torch.testing.assert_close(rest, y[:, 65_000:], rtol=1e-4, atol=1e-5)
    assert torch.equal(last.memory.positions, final.memory.positions)
    exact, _ = copy.deepcopy(layer).double()(x[:, -20:].double())  # positions are relative
    torch.testing.assert_close(y[:, -5:].double(), exact[:, -5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_values(kind):
    layer = attention(kind)
    with torch.no_grad():
        _, state = layer(inputs())
        kept = [s.clone() for s in state.memory]
        first, later = layer(inputs(2, 3, 1), state)
        held = [s.clone() for s in later.memory]
        layer(inputs(2, 5, 2), later)
        again, _ = layer(inputs(2, 3, 1), state)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(kept + held, [*state.memory, *later.memory], strict=True))
    empty = layer.init_state(2)
    assert torch.equal(layer(inputs(), empty)[0], layer(inputs(), changed(empty, torch.clone))[0])
    torch.testing.assert_close(layer(inputs(), empty)[0], layer(inputs())[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_strictly_causal_and_layouts(kind):
    layer, x = attention(kind, torch.float32), inputs(2, 70, dtype=torch.float32)
    altered = x.clone()
    altered[:, 40] += 1
    a, b = layer(x)[0], layer(altered)[0]
    assert torch.equal(a[:, :40], b[:, :40])
    assert not torch.equal(a[:, 40:], b[:, 40:])
    scattered = torch.stack([x, x], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not scattered.is_contiguous()
    assert torch.equal(layer(scattered)[0], a)
    layer(x.requires_grad_())[0].sum().backward()


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (1, 7), (5, 1), (33, 20), (256, 3), (2, 256)])
def test_head_sizes(key_size, value_size):
    """Against the definition, written out."""
    layer, x = attention(key_size=key_size, value_size=value_size, window=3), inputs(1, 6)
    q, k, v = (p(x).view(6, 4, -1) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    half = key_size // 2
    angle = torch.arange(6)[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    for z in (q, k):
        turned = torch.complex(z[..., :half], z[..., half : 2 * half]) * turn
        z[..., :half], z[..., half : 2 * half] = turned.real, turned.imag
    scores = torch.einsum("thk,shk->hts", q, k) * key_size**-0.5
    apart = torch.arange(6)[:, None] - torch.arange(6)
    weights = scores.masked_fill((apart < 0) | (apart >= 3), -torch.inf).softmax(-1)
    o = torch.einsum("hts,shv->thv", weights, v)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(1))[None], rtol=0, atol=1e-12)


def hugging_face(window):
    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 8,
        "attention_bias": False, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(1)
    if window is None:
        config = LlamaConfig(**sizes)
        theirs, rotary = LlamaAttention(config, 0), LlamaRotaryEmbedding(config)
    else:
        config = MistralConfig(**sizes, sliding_window=window)
        theirs, rotary = MistralAttention(config, 0), MistralRotaryEmbedding(config)
    ours = Attention(32, 4, 8, 8, num_key_heads=2, window=window)
    ours.load_state_dict(theirs.state_dict())
    return theirs, rotary, ours


@pytest.mark.parametrize("window", [None, 5])
def test_equals_hugging_face(window):
    """Llama's and Mistral's attention with the same weights: outputs, gradients, prefill and steps."""
    theirs, rotary, ours = hugging_face(window)
    x = torch.randn(2, 17, 32, requires_grad=True)
    apart = torch.arange(17)[:, None] - torch.arange(17)
    seen = (apart >= 0) & (apart < (window or 17))
    mask = torch.zeros(17, 17).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    y, _ = theirs(x, rotary(x, torch.arange(17)[None]), mask)
    z, _ = ours(x)
    torch.testing.assert_close(z, y, rtol=0, atol=1e-5)
    wanted = gradients(y.square().sum(), x, *(theirs.get_parameter(n) for n, _ in ours.named_parameters()))
    for a, b in zip(gradients(z.square().sum(), x, *ours.parameters()), wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    cache, state = DynamicCache(), None
    for a, b in ((0, 9), (9, 10), (10, 11)):
        places = rotary(x, torch.arange(a, b)[None])
        y, _ = theirs(x[:, a:b], places, mask[:, :, a:b, :b], cache=cache)
        z, state = ours(x[:, a:b], state)
        torch.testing.assert_close(z, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "window, shared keys, odd size"])
def test_compiles_to_one_graph(kind):
    """Training and a decode step, fullgraph; no recompilation for a new length, batch or state."""
    torch._dynamo.reset()
    layer = attention(kind, window=KINDS[kind].get("window") and 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for batch, length in ((2, 7), (3, 12), (4, 40)):
            torch._dynamo.config.error_on_recompile = (batch, length) == (4, 40)
            x = inputs(batch, length).requires_grad_()
            y, _ = compiled(x)
            torch.testing.assert_close(y, layer(x)[0], rtol=0, atol=1e-12)
            y.sum().backward()
        torch._dynamo.config.error_on_recompile = False
        for batch in (2, 3, 5):
            torch._dynamo.config.error_on_recompile = batch == 5
            with torch.no_grad():
                state, x = layer(inputs(batch, 4 + batch))[1], inputs(batch, 1, seed=1)
                y, new = compiled(x, state)
            torch.testing.assert_close(y, layer(x, state)[0], rtol=0, atol=1e-12)
            assert new.memory.positions.shape[1] == layer(x, state)[1].memory.positions.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@devices
def test_inductor_compiles_training(kind, device):
    torch._dynamo.reset()
    layer = attention(kind, torch.float32).to(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for batch, length in ((2, 40), (3, 25)):
        x = inputs(batch, length, dtype=torch.float32).to(device).requires_grad_()
        y, expected = compiled(x)[0], layer(x)[0]
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        leaves = [x, *trained(layer)]
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for a, b in zip(torch.autograd.grad(y.square().sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, b.abs().max().item()))


def test_autocast():
    layer, x = attention(dtype=torch.float32), inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        again, _ = layer(x[:, :1], state)
    assert y.dtype == again.dtype == torch.bfloat16
    assert (y.float() - layer(x)[0]).abs().max() < 0.1 * layer(x)[0].abs().max()


def test_packed_training_makes_no_state():
    """Which would hold as many slots for each of many short sequences as the longest needs."""
    layer, x = attention(), inputs(1, 20)
    y, state = layer(x, cu_seqlens=torch.tensor([0, 15, 16, 17, 20]), keep_state=False)
    assert state is None
    assert torch.equal(y, layer(x, cu_seqlens=torch.tensor([0, 15, 16, 17, 20]))[0])


@pytest.mark.parametrize(("key_size", "value_size"), [(16, 32), (32, 16), (16, 16)])
def test_memory_grows_with_the_length(key_size, value_size):
    """Not with its square, also where K and V differ: PyTorch's kernel of linear memory is the one that runs."""
    layer = attention(key_size=key_size, value_size=value_size, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        layer(inputs(1, 256, dtype=torch.float32))
    assert any("flash" in event.key for event in profile.key_averages())


def test_bad_inputs():
    layer, x = attention(), inputs()
    state = layer(x)[1]
    memory = state.memory
    for call, error, message in (
        (lambda: layer(x[..., :5]), ValueError, r"x must be \[B, T, 12\], got \[2, 11, 5\]"),
        (lambda: layer(x, mask=torch.ones(2, 3, dtype=torch.bool)), ValueError, r"mask must be \[B, T\]"),
        (lambda: layer(x, memory), TypeError, "state must be a MixerState"),
        (lambda: layer(x, MixerState(state.convolution, (1, 2))), TypeError, "must be an AttentionState, got tuple"),
        (
            lambda: layer(x.masked_fill(x > 1, torch.nan)),
            ValueError,
            "Attention: q, projected from x, must be finite, got NaN",
        ),
        (
            lambda: layer(x, MixerState(state.convolution, memory._replace(positions=memory.positions.bool()))),
            TypeError,
            "positions must be int64, got torch.bool",
        ),
        (lambda: attention(rotary_base=10**400), ValueError, "rotary_base must be"),
        (lambda: layer(x[:1], state), ValueError, r"keys: the state must be \[1, 11, 4, 4\], got \[2, 11, 4, 4\]"),
        (
            lambda: layer(x, MixerState(state.convolution, memory._replace(values=memory.values[:, 1:]))),
            ValueError,
            r"values: the state must be \[2, 11, 4, 5\], got \[2, 10, 4, 5\]",
        ),
        (lambda: attention(num_key_heads=3), ValueError, "num_key_heads must divide num_heads = 4, got 3"),
        (lambda: attention(window=0), ValueError, "window must be an integer >= 1, got 0"),
        (lambda: attention(rotary_base=0.0), ValueError, "rotary_base must be"),
    ):
        with pytest.raises(error, match=message):
            call()
