"""Palimpsa-D against its published equations, its ablation, its initialisation."""

import pytest
import torch
import torch.nn.functional as F

from metaplastic import layers, rules
from metaplastic.layers.norms import l2_normalize

from .mixers import inputs, make


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


def test_the_ablation_is_the_limit_of_small_evidence():
    """Its weights load into Palimpsa-D; with b_scale far below 0 both compute the same, however it is trained on."""
    ablation, layer = make("palimpsa_d_additive"), make("palimpsa_d")
    report = layer.load_state_dict(ablation.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) == {"b_scale", "prior_log", "beta_down.weight", "beta_up.weight"}
    with torch.no_grad():
        layer.b_scale.fill_(-60)
    torch.testing.assert_close(layer(inputs())[0], ablation(inputs())[0], rtol=0, atol=1e-12)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be an integer >= 1, got 0"),
        ({"key_size": 2.5}, "key_size must be an integer >= 1, got 2.5"),
        ({"num_key_heads": 3}, "num_key_heads must divide num_heads = 4, got 3"),
        ({"prior": 0.0}, "prior must be > 0 and finite, got 0"),
        ({"beta_rank": 0}, "beta_rank must be an integer >= 1, got 0"),
        ({"decay_range": (2.0, 1.0)}, "decay_range must be"),
        ({"dt_range": (0.0, 1.0)}, "dt_range must be"),
        ({"backend": "cdu"}, "backend must be one of .*got 'cdu'"),
        ({"beta_scale_range": (1.0, 0.0)}, "beta_scale_range must be"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        make("palimpsa_d", **change)


def test_the_prior_is_trained_only_on_request():
    assert "prior_log" not in dict(make("palimpsa_d").named_parameters())
    assert "prior_log" in make("palimpsa_d").state_dict()
    layer = make("palimpsa_d", train_prior=True)
    layer(inputs())[0].square().sum().backward()
    assert layer.prior_log.grad.abs().max() > 0
