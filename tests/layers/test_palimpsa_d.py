"""Rung 4: the layer in parallel equals itself token by token; padding, packing, gradients, dtypes, initialisation."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from metaplastic import layers, rules
from metaplastic.layers import MIXERS
from metaplastic.layers.mixer import l2_normalize

NAMES = ["palimpsa_d", "palimpsa_d_additive"]


def make(name, backend="auto", **options):
    torch.manual_seed(0)
    options = {"hidden_size": 12, "num_heads": 4, "key_size": 3, "value_size": 5} | options
    return MIXERS[name](**options, backend=backend).double()


def inputs(batch=2, length=11, seed=0):
    return torch.randn(batch, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, retain_graph=True)


def flat(state):
    return [state.convolution, *state.memory]


def test_equations_written_out():
    """The layer is the published equations, token by token."""
    layer = make("palimpsa_d", num_key_heads=2)
    x = inputs(1, 6)
    y, _ = layer(x)
    heads, keys, values = 4, 3, 5
    raw = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    mixed = F.silu(
        F.conv1d(F.pad(raw.transpose(1, 2), (3, 0)), layer.conv.weight[:, None], groups=raw.shape[-1]).transpose(1, 2)
    )
    q, k, u = mixed.split([6, 6, 20], -1)
    q, k = (F.normalize(z.view(1, 6, 2, keys), dim=-1).repeat_interleave(2, 2) for z in (q, k))
    u = u.view(1, 6, heads, values)
    s = torch.sigmoid(layer.strength_proj(x))[..., None]
    evidence = torch.sigmoid(layer.beta_up(layer.beta_down(x))).view(1, 6, heads, values)
    beta = evidence * F.softplus(layer.b_scale)[:, None] * s
    g = -layer.A_log.exp() * F.softplus(layer.dt_proj(x) + layer.dt_bias)
    state = rules.palimpsa.init_state(1, heads, values, keys, dtype=torch.float64)
    o, _, _ = rules.palimpsa.scan(q, k, u * s, beta, g, torch.ones(heads, dtype=torch.float64), state, keys**-0.5)
    o = o + layer.D[:, None] * u
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    expected = layer.o_proj(o.flatten(2) * F.silu(layer.gate_proj(x)))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)  # F.normalize and ours differ in epsilon


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_any_split_with_its_gradients(name, backend):
    layer, x = make(name, backend), inputs().requires_grad_()
    whole, final = layer(x)
    for cuts in ([1] * 11, [2, 1, 0, 8], [10, 1]):
        state, pieces = layer.init_state(2), []
        for piece in x.split(cuts, 1):
            y, state = layer(piece, state)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
        for a, b in zip(flat(state), flat(final), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        def loss(y, state, weights=weights):
            return (y * weights).sum() + sum(s.square().sum() for s in flat(state))

        for a, b in zip(
            gradients(loss(torch.cat(pieces, 1), state), *leaves), gradients(loss(whole, final), *leaves), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("continued", [False, True])
def test_padding_is_not_there(name, kind, continued):
    """Left, right, interior padding and an all-padding row; garbage in padded inputs; exactly zero gradient there."""
    layer = make(name)
    rows = ["00011111111", "11111100000", "11001011101", "00000000000", "11111111111"]
    mask = torch.tensor([[c == "1" for c in r] for r in rows])
    x = inputs(5).requires_grad_()
    start = None
    if continued:
        _, start = layer(inputs(5, 4, seed=7))
        start = type(start)(start.convolution.detach(), type(start.memory)(*(s.detach() for s in start.memory)))
    garbage = x.masked_fill(~mask[..., None], torch.nan)
    y, state = layer(garbage, start, mask=mask.to(kind))
    assert not y[~mask].any()
    for i in range(5):
        row = (
            None
            if start is None
            else type(start)(start.convolution[i : i + 1], type(start.memory)(*(s[i : i + 1] for s in start.memory)))
        )
        alone, last = layer(x[i : i + 1, mask[i]], row)
        torch.testing.assert_close(y[i : i + 1, mask[i]], alone, rtol=0, atol=1e-12)
        for a, b in zip(flat(state), flat(last), strict=True):
            torch.testing.assert_close(a[i : i + 1], b, rtol=0, atol=1e-12)
    loss = y.square().sum() + sum(s.square().sum() for s in flat(state))
    leaves = [p for p in layer.parameters() if p.requires_grad]
    d, *d_parameters = gradients(loss, x, *leaves)
    assert not d[~mask].any()
    assert all(p.isfinite().all() for p in (d, *d_parameters))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed_equals_a_loop(name, kind):
    layer, x = make(name), inputs(1, 20).requires_grad_()
    offsets = [0, 0, 1, 3, 9, 9, 16]
    y, state = layer(x, cu_seqlens=torch.tensor(offsets, dtype=kind))
    loss, expected = y.square().sum() + sum(s.square().sum() for s in flat(state)), 0
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, last = layer(x[:, a:b])
        torch.testing.assert_close(y[:, a:b], alone, rtol=0, atol=1e-12)
        for s, t in zip(flat(state), flat(last), strict=True):
            torch.testing.assert_close(s[n : n + 1], t, rtol=0, atol=1e-12)
        expected = expected + alone.square().sum() + sum(s.square().sum() for s in flat(last))
    assert not y[:, 16:].any()
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    for a, b in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_continuing_packed_sequences(name):
    layer, x = make(name), inputs(1, 12)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 5, 12]))
    _, state = layer(torch.cat([x[:, :2], x[:, 5:9]], 1), cu_seqlens=torch.tensor([0, 2, 6]))
    rest, _ = layer(torch.cat([x[:, 2:5], x[:, 9:]], 1), state, cu_seqlens=torch.tensor([0, 3, 6]))
    torch.testing.assert_close(rest, torch.cat([y[:, 2:5], y[:, 9:]], 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_strictly_causal(name):
    layer, x = make(name).float(), inputs(2, 70).float()
    changed = x.clone()
    changed[:, 40] += 1
    a, b = layer(x)[0], layer(changed)[0]
    assert torch.equal(a[:, :40], b[:, :40])
    assert not torch.equal(a[:, 40:], b[:, 40:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(name, dtype):
    """A module in bf16 or fp16: output in that dtype, memory in float32, close to float64."""
    exact, x = make(name), inputs()
    layer = make(name).to(dtype)
    y, state = layer(x.to(dtype))
    assert y.dtype == dtype
    assert all(s.dtype == torch.float32 for s in state.memory)
    assert all(s.dtype == torch.float32 for s in layer.init_state(2).memory)
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}[dtype]
    reference = exact(x)[0]
    assert (y.double() - reference).abs().max() < tolerance * reference.abs().max()
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)
    assert layer(x.to(dtype), state)[0].dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    layer, x = make(name).float(), inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        again, _ = layer(x[:, :1], state)
    assert y.dtype == again.dtype == torch.bfloat16
    assert all(s.dtype == torch.float32 for s in state.memory)
    reference = layer(x)[0]
    assert (y.float() - reference).abs().max() < 0.1 * reference.abs().max()
    y.float().sum().backward()
    assert layer.A_log.grad.isfinite().all()


def test_the_ablation_is_the_limit_of_small_evidence():
    """Its weights load into Palimpsa-D; with b_scale far below 0 both compute the same, however it is trained on."""
    ablation, layer = make("palimpsa_d_additive"), make("palimpsa_d")
    report = layer.load_state_dict(ablation.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) == {"b_scale", "prior_log", "beta_down.weight", "beta_up.weight"}
    with torch.no_grad():
        layer.b_scale.fill_(-60)
    torch.testing.assert_close(layer(inputs())[0], ablation(inputs())[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gates_replay_the_memory(name):
    """gates(x) are the rule's inputs: scanning the rule over them gives the layer's own memory."""
    layer, x = make(name), inputs()
    gates = layer.gates(x)
    rule = rules.palimpsa if name == "palimpsa_d" else rules.additive
    start = rule.init_state(2, 4, 5, 3, dtype=torch.float64)
    _, _, state = rule.scan(*gates, start, layer.key_size**-0.5)
    for a, b in zip(state, layer(x)[1].memory, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_initialisation():
    torch.manual_seed(0)
    layer = layers.PalimpsaD(64, 200, 4, 4, beta_rank=8, beta_scale_range=(0.1, 1.0), prior=2.0)
    a = layer.A_log.exp().detach()
    assert a.min() > 0
    assert a.max() <= 16
    assert a.mean() == pytest.approx(8, abs=1)
    dt = F.softplus(layer.dt_bias).detach()
    assert dt.min() >= 0.001 * 0.999
    assert dt.max() <= 0.1 * 1.001
    assert dt.log().mean() == pytest.approx(torch.tensor([0.001, 0.1]).log().mean().item(), abs=0.3)
    assert 0.1 <= layer.b_scale.min() < layer.b_scale.max() <= 1
    assert layer.beta_up.weight.abs().max() <= 8**-0.5
    assert torch.equal(layer.D, torch.ones(200))
    torch.testing.assert_close(layer.prior_log.exp(), torch.full((200,), 2.0))
    assert not layer.prior_log.requires_grad
    assert set(layer.no_weight_decay) == {"A_log", "dt_bias", "D", "b_scale", "prior_log"}
    before = {n: p.clone() for n, p in layer.named_parameters()}
    torch.manual_seed(5)
    layer.reset_parameters()
    first = layer.A_log.clone()
    torch.manual_seed(5)
    layer.reset_parameters()
    assert torch.equal(layer.A_log, first)
    own = dict(layer.named_parameters(recurse=False))
    assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters() if n not in own)
    with torch.device("meta"):
        layers.PalimpsaD(8, 2, 4, 4).reset_parameters()


def test_zero_vectors_normalise_with_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    y = l2_normalize(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_one_graph(name):
    """A layer and a decode step, fullgraph, without recompiling for a new length."""
    torch._dynamo.reset()
    layer, x = make(name), inputs(2, 40)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 12, 40):
        y, state = compiled(x[:, :length])
        expected, expected_state = layer(x[:, :length])
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        step, _ = compiled(
            x[:, :1], type(state)(state.convolution.detach(), type(state.memory)(*(s.detach() for s in state.memory)))
        )
    torch.testing.assert_close(step, layer(x[:, :1], expected_state)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be an integer >= 1, got 0"),
        ({"key_size": 2.5}, "key_size must be an integer >= 1, got 2.5"),
        ({"num_key_heads": 3}, "num_key_heads must divide num_heads = 4, got 3"),
        ({"prior": 0.0}, "prior must be > 0, got 0"),
        ({"beta_rank": 0}, "beta_rank must be >= 1, got 0"),
        ({"decay_range": (2.0, 1.0)}, "decay_range must be"),
        ({"dt_range": (0.0, 1.0)}, "dt_range must be"),
        ({"beta_scale_range": (1.0, 0.0)}, "beta_scale_range must be"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        make("palimpsa_d", **change)


def test_bad_inputs():
    layer, x = make("palimpsa_d"), inputs()
    state = layer(x)[1]
    for call, error, message in (
        (lambda: layer(x[..., :5]), ValueError, r"x must be \[B, T, 12\], got \[2, 11, 5\]"),
        (lambda: layer(x, mask=torch.ones(2, 3, dtype=torch.bool)), ValueError, r"mask must be \[B, T\]"),
        (lambda: layer(x[:1], mask=torch.ones(1, 11).bool(), cu_seqlens=torch.tensor([0, 3])), ValueError, "not both"),
        (lambda: layer(x, state.memory), TypeError, "state must be a MixerState"),
        (
            lambda: layer(x, type(state)(state.convolution, rules.AdditiveState(state.memory[0]))),
            TypeError,
            "PalimpsaState",
        ),
        (lambda: layer(x, cu_seqlens=torch.tensor([0, 3])), ValueError, "batch size must be 1"),
        (lambda: layer(x[:1], state), ValueError, "state must be"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_the_prior_is_trained_only_on_request():
    assert "prior_log" not in dict(make("palimpsa_d").named_parameters())
    assert "prior_log" in make("palimpsa_d").state_dict()
    layer = make("palimpsa_d", train_prior=True)
    layer(inputs())[0].square().sum().backward()
    assert layer.prior_log.grad.abs().max() > 0


def test_masks_that_would_be_read_inverted_are_refused():
    layer, x = make("palimpsa_d"), inputs()
    with pytest.raises(ValueError, match="additive masks are not taken"):
        layer(x, mask=torch.zeros(2, 11).index_fill(1, torch.tensor([0]), -torch.inf))
    with pytest.raises(TypeError, match="mask must be a tensor"):
        layer(x, mask=[[1] * 11] * 2)
