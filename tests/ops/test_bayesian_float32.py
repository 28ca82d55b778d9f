"""float32 against float64 over 20,000 tokens (100,000 with -m slow) of ops.bayesian, every kind of key and noise."""

import pytest
import torch

from metaplastic import ops

KEYS = 16


def keys(kind, length, source):
    raw = torch.randn(1, length, 1, KEYS, dtype=torch.float64, generator=source)
    if kind == "repeated":
        raw = raw[:, :1].expand_as(raw)
    elif kind == "collinear":
        raw = raw[:, :1] + 1e-3 * raw
    elif kind == "few":
        raw = raw[:, torch.randint(0, KEYS // 4, (length,), generator=source)]
    unit = torch.nn.functional.normalize(raw, dim=-1)
    return unit * (torch.rand(1, length, 1, 1, generator=source) > 0.3) if kind == "zero" else unit


@pytest.mark.parametrize("kind", ["unit", "repeated", "collinear", "few", "zero"])
@pytest.mark.parametrize("noise", ["coupled", "coupled, strong decays", "free, no decay"])
@pytest.mark.parametrize("observation", [1e-2, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_tokens(kind, noise, observation, length):
    """Within 1e-4 of the largest; the final mean within 2e-4.

    Hardest are keys seen again and again while the rest drifts undecayed: its variance grows without end (to 3 and 11),
    and whatever rounding writes into it is never corrected.
    """
    source = torch.Generator().manual_seed(0)
    k = keys(kind, length, source)
    q = torch.nn.functional.normalize(torch.randn(k.shape, dtype=torch.float64, generator=source), dim=-1)
    q[:, ::2] = k[:, ::2]
    v = torch.randn(1, length, 1, 16, dtype=torch.float64, generator=source)
    g = -0.1 * torch.rand(1, length, 1, dtype=torch.float64, generator=source)
    if noise == "coupled, strong decays":
        choices = torch.tensor([0.0] * 20 + [-50.0, -1000.0], dtype=torch.float64)
        g = choices[torch.randint(len(choices), g.shape, generator=source)]
    elif noise == "free, no decay":
        g = torch.zeros_like(g)
    process = torch.full_like(g, 1e-4) if noise == "free, no decay" else -torch.expm1(2 * g)
    inputs = (q, k, v, g, process, torch.full_like(g, observation))
    prior = torch.ones(1, dtype=torch.float64)
    with torch.no_grad():
        exact = ops.bayesian(*inputs, prior_variance=prior, output_variance=True)
        found = ops.bayesian(*(x.float() for x in inputs), prior_variance=prior.float(), output_variance=True)
    for name, a, b, bound in (
        ("output", found.output, exact.output, 1e-4),
        ("variance", found.variance, exact.variance, 1e-4),
        ("mean", found.state.mean, exact.state.mean, 2e-4),
        ("covariance", found.state.covariance, exact.state.covariance, 1e-4),
    ):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error <= bound, f"{name}: {error:.1e}"
    covariance = found.state.covariance
    assert torch.equal(covariance, covariance.mT)
    assert torch.linalg.eigvalsh(covariance.double()).min() > 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_small_noise(packed):
    """One key throughout at a noise of 1e-3 of the prior variance: outputs, states and gradients within 1e-3."""
    source = torch.Generator().manual_seed(0)
    q, k = (keys(kind, 150, source) for kind in ("unit", "repeated"))
    v, dy = torch.randn(2, 1, 150, 1, 16, dtype=torch.float64, generator=source)
    gates = [torch.full((1, 150, 1), x, dtype=torch.float64) for x in (0.0, 0.0, 1e-3)]
    offsets = torch.tensor([0, 3, 70, 70, 148]) if packed else None

    def run(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v, *gates)]
        read = ops.bayesian(*inputs, prior_variance=torch.ones(1, dtype=dtype), cu_seqlens=offsets)
        loss = (read.output * dy).sum() + read.state.mean.sum()
        return [read.output, *read.state, *torch.autograd.grad(loss, inputs)]

    for found, exact in zip(run(torch.float32), run(torch.float64), strict=True):
        assert (found.double() - exact).norm() <= 1e-3 * exact.norm()


def test_a_later_token_decides_no_rounding():
    """Not of earlier ones, and none of another row, however much less its noise is: bit for bit."""
    source = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 40, 1, 8, generator=source)
    gates = [torch.full((2, 40, 1), x) for x in (-0.1, 0.1, 1.0)]
    before = ops.bayesian(q, k, v, *gates, prior_variance=torch.ones(1)).output
    gates[2][1, -1] = 1e-3
    after = ops.bayesian(q, k, v, *gates, prior_variance=torch.ones(1)).output
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, :-1], before[1, :-1])
    assert not torch.equal(after[1, -1], before[1, -1])


@pytest.mark.parametrize("noise", [1e-2, 1e-3, 1e-4])
def test_a_state_may_be_handed_back(noise):
    """Token by token with nothing forgotten: every state is symmetric to the last bit, and taken as the next one's."""
    source = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(2, 1, 60, 4, 4, generator=source), dim=-1)
    v = torch.randn(1, 60, 4, 4, generator=source)
    gates, state = [torch.full((1, 1, 4), x) for x in (0.0, 0.0, noise)], None
    with torch.no_grad():
        for t in range(60):
            at = slice(t, t + 1)
            prior = torch.ones(4) if state is None else None
            read = ops.bayesian(*unit[:, :, at], v[:, at], *gates, prior_variance=prior, initial_state=state)
            state = read.state
            assert torch.equal(state.covariance, state.covariance.mT)
