"""Mamba2 against Hugging Face's own mixer, Palimpsa-M against Mamba2, and both against their equations."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from metaplastic import layers, rules
from metaplastic.layers.mamba2 import GatedRMSNorm

WIDTH, HEADS, KEYS, VALUES = 32, 8, 16, 8


def pair(cls=layers.Mamba2, groups=1, *, bias=False, conv_bias=True, dt_limit=(0.0, float("inf")), **options):
    """Hugging Face's mixer with odd weights, and ours with the same."""
    config = Mamba2Config(
        hidden_size=WIDTH, num_heads=HEADS, head_dim=VALUES, state_size=KEYS, n_groups=groups, expand=2, chunk_size=8,
        num_hidden_layers=1, use_bias=bias, use_conv_bias=conv_bias, time_step_limit=dt_limit,
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = Mamba2Mixer(config, layer_idx=0)
    with torch.no_grad():
        for p in (theirs.norm.weight, theirs.D, theirs.A_log, theirs.dt_bias):
            p.add_(0.5 * torch.randn_like(p))
    ours = cls(
        WIDTH, HEADS, KEYS, VALUES, num_groups=groups, bias=bias, conv_bias=conv_bias, dt_limit=dt_limit, **options
    )
    weights = {n.replace("conv1d.", "conv."): p for n, p in theirs.state_dict().items()}
    weights["conv.weight"] = weights["conv.weight"].squeeze(1)
    report = ours.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) <= {"b_scale", "prior_log", "beta_down.weight", "beta_up.weight"}
    return theirs.eval(), ours, config


OPTIONS = [
    {"groups": 1}, {"groups": 2}, {"groups": HEADS}, {"groups": 4, "bias": True}, {"conv_bias": False},
    {"groups": 2, "dt_limit": (0.02, 0.5)},
]  # fmt: skip


def silent(layer):
    """Palimpsa-M with beta = 0 exactly."""
    if isinstance(layer, layers.PalimpsaM):
        with torch.no_grad():
            layer.b_scale.fill_(-torch.inf)
    return layer


@pytest.mark.parametrize("cls", [layers.Mamba2, layers.PalimpsaM])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_hugging_face(cls, options):
    """Outputs and every gradient, at lengths around their chunk of 8."""
    theirs, ours, _ = pair(cls, **options)
    silent(ours)
    for length in (1, 7, 8, 9, 41):
        x = torch.randn(3, length, WIDTH, requires_grad=True)
        weights = torch.randn(3, length, WIDTH)
        expected, (y, _) = theirs(x), ours(x)
        assert (y - expected).abs().max() < 1e-5
        leaves = dict(theirs.named_parameters())
        wanted = torch.autograd.grad((expected * weights).sum(), [x, *leaves.values()])
        mine = dict(ours.named_parameters())
        found = torch.autograd.grad(
            (y * weights).sum(), [x, *(mine[n.replace("conv1d", "conv")] for n in leaves)], allow_unused=False
        )
        for name, a, b in zip(["x", *leaves], found, wanted, strict=True):
            assert (a - b.reshape(a.shape)).abs().max() < 1e-4 * max(1.0, b.abs().max().item()), name


@pytest.mark.parametrize("cls", [layers.Mamba2, layers.PalimpsaM])
@pytest.mark.parametrize("groups", [1, 4])
def test_prefill_and_decode_equal_hugging_face(cls, groups):
    """With their cache and our state: outputs of prefill and each step, and the states themselves."""
    theirs, ours, config = pair(cls, groups)
    silent(ours)
    x, cache, state = torch.randn(2, 14, WIDTH), DynamicCache(config=config), None
    with torch.no_grad():
        for piece in x.split([9, 1, 1, 1, 1, 1], 1):
            expected = theirs(piece, cache=cache)
            y, state = ours(piece, state)
            assert (y - expected).abs().max() < 1e-5
    torch.testing.assert_close(state.memory[0], cache.get_recurrent_state(0), rtol=0, atol=1e-5)
    convolution = cache.get_conv_state(0).transpose(1, 2)
    torch.testing.assert_close(state.convolution, convolution[:, -3:], rtol=0, atol=1e-6)


def test_left_padding_equals_hugging_face():
    """Their padding is exact on the left (without a convolution bias), and there we agree."""
    theirs, ours, _ = pair(conv_bias=False)
    x, mask = torch.randn(2, 12, WIDTH), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    y, expected = ours(x, mask=mask)[0], theirs(x, attention_mask=mask)
    assert (y - expected)[mask.bool()].abs().max() < 1e-5


def test_bfloat16_is_as_close_to_float64_as_theirs():
    theirs, ours, _ = pair(groups=2)
    x = torch.randn(2, 64, WIDTH)
    exact = ours.double()(x.double())[0]
    wanted = theirs.bfloat16()(x.bfloat16()).double()
    found = ours.bfloat16()(x.bfloat16())[0].double()
    assert (found - exact).norm() < 1.5 * (wanted - exact).norm()


@pytest.mark.parametrize("cls", [layers.Mamba2, layers.PalimpsaM])
@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
def test_float16_does_not_overflow_before_the_norm(cls, scale):
    """The read-out of unnormalised keys and queries may exceed 65,504; the norm brings it back."""
    theirs, ours, _ = pair(cls, groups=2)
    silent(ours)
    x = scale * torch.randn(2, 20, WIDTH)
    exact = theirs.double()(x.double())
    y = ours.half()(x.half())[0]
    assert y.dtype == torch.float16
    assert (y.double() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("norm_groups", [1, 2, 8])
def test_norm_variants(norm_groups):
    """Groups of the norm are blocks of the width, each normalised after the gate."""
    norm = GatedRMSNorm(16, norm_groups, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(3, 16), torch.randn(3, 16)
    gated = x * F.silu(gate)
    parts = [F.rms_norm(part, part.shape[-1:], eps=1e-3) for part in gated.split(16 // norm_groups, -1)]
    torch.testing.assert_close(norm(x, gate), torch.cat(parts, -1) * norm.weight)
    layer = layers.Mamba2(8, 4, 3, 4, num_groups=2, norm_groups=norm_groups)
    assert layer.norm.groups == norm_groups
    assert layers.Mamba2(8, 4, 3, 4, num_groups=2).norm.groups == 2


def test_palimpsa_m_written_out():
    """The published equations, token by token."""
    torch.manual_seed(0)
    layer = layers.PalimpsaM(12, 4, 3, 5, num_groups=2, norm_groups=1, beta_rank=2, prior=0.7).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    z, mixed, dt = layer.in_proj(x).split([20, 32, 4], -1)
    mixed = F.conv1d(F.pad(mixed.mT, (3, 0)), layer.conv.weight[:, None], layer.conv.bias, groups=32).mT
    u, k, q = F.silu(mixed).split([20, 6, 6], -1)
    q, k = (a.view(2, 6, 2, 3).repeat_interleave(2, 2) for a in (q, k))
    u, dt = u.view(2, 6, 4, 5), F.softplus(dt + layer.dt_bias)
    evidence = torch.sigmoid(layer.beta_up(layer.beta_down(x))).view(2, 6, 4, 5)
    beta = evidence * F.softplus(layer.b_scale)[:, None] * dt[..., None]
    state = rules.palimpsa.init_state(2, 4, 5, 3, dtype=torch.float64)
    prior = torch.full((4,), 0.7, dtype=torch.float64)
    o, _, state = rules.palimpsa.scan(q, k, u * dt[..., None], beta, -layer.A_log.exp() * dt, prior, state)
    o = (o + layer.D[:, None] * u).flatten(2) * F.silu(z)
    expected = layer.out_proj(F.rms_norm(o, (20,), layer.norm.weight, 1e-5))
    y, final = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)  # prior_log is drawn in float32
    for a, b in zip(final.memory, state, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_mamba2_is_the_limit_of_small_evidence_only():
    """Evidence of 0 is Mamba2; the deviation is proportional to small evidence; strong forgetting alone is not it."""
    mamba = layers.Mamba2(12, 4, 3, 5).double()
    layer = layers.PalimpsaM(12, 4, 3, 5).double()
    layer.load_state_dict(mamba.state_dict(), strict=False)
    x = torch.randn(1, 30, 12, dtype=torch.float64)

    def deviation(b_scale):
        with torch.no_grad():
            layer.b_scale.fill_(b_scale)
            return (layer(x)[0] - mamba(x)[0]).abs().max().item()

    assert deviation(-torch.inf) < 1e-13
    deviations = [deviation(b) for b in (-8, -10, -12)]  # softplus(b) = exp(b) nearly
    for a, b in itertools.pairwise(deviations):
        assert a / b == pytest.approx(torch.tensor(2.0).exp().item(), rel=0.02)
    with torch.no_grad():
        for m in (mamba, layer):
            m.dt_bias.fill_(3.0)
            m.A_log.fill_(5.0)  # alpha below exp(-100)
    assert layer.gates(x).g.max() < -100
    assert deviation(1.0) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "num_groups must divide num_heads = 4, got 3"),
        ({"num_groups": 0}, "num_groups must be an integer >= 1, got 0"),
        ({"norm_groups": 3}, "norm_groups must divide num_heads \\* value_size = 20, got 3"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit must be"),
        ({"backend": "cdu"}, "backend must be one of .*got 'cdu'"),
        ({"dt_limit": "auto"}, "dt_limit must be \\(low, high\\) .*got 'auto'"),
        ({"conv_size": 2.5}, "conv_size must be an integer >= 1, got 2.5"),
        ({"conv_bias": "no"}, "conv_bias must be True or False, got 'no'"),
        ({"train_prior": "no"}, "train_prior must be True or False, got 'no'"),
        ({"prior": float("inf")}, "prior must be > 0 and finite, got inf"),
        ({"norm_eps": -1.0}, "norm_eps must be > 0 and finite, got -1"),
        ({"prior": -1.0}, "prior must be > 0 and finite, got -1"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        layers.PalimpsaM(12, 4, 3, 5, **change)
