"""Rung 0 and 1 of the numerics ladder: the rule against closed forms and the paper's own coordinates."""

import pytest
import torch

from metaplastic.rules import additive, palimpsa

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def problem(batch=2, length=9, heads=3, key_size=4, value_size=5):
    shape = (batch, length, heads)
    q, k, w = draw(*shape, key_size), draw(*shape, key_size, seed=1), draw(*shape, value_size, seed=2)
    beta, g = draw(*shape, value_size, seed=3).exp(), -draw(*shape, seed=4).abs()
    prior = draw(heads, seed=5).exp()
    return q, k, w, beta, g, prior


def start(q, w):
    return palimpsa.init_state(q.shape[0], q.shape[2], w.shape[3], q.shape[3], dtype=F64)


def test_equation_5_in_the_papers_coordinates():
    """I and mu as printed, with v = w / beta, give the natural parameters' read-out."""
    q, k, w, beta, g, prior = problem()
    mean, variance, state = palimpsa.scan(q, k, w, beta, g, prior, start(q, w), scale=0.5)
    p = prior[:, None, None]
    precision, mu = p.expand(2, 3, 5, 4), torch.zeros(2, 3, 5, 4, dtype=F64)
    for t in range(q.shape[1]):
        alpha = g[:, t].exp()[..., None, None]
        new = alpha * precision + (1 - alpha) * p + beta[:, t, ..., None] * k[:, t, :, None].square()
        v = w[:, t] / beta[:, t]
        mu = alpha * precision / new * mu + (beta[:, t] * v)[..., None] * k[:, t, :, None] / new
        precision = new
        torch.testing.assert_close(mean[:, t], torch.einsum("bhvk,bhk->bhv", mu, q[:, t] * 0.5))
        expected = torch.einsum("bhvk,bhk->bhv", 1 / precision, (q[:, t] * 0.5).square())
        torch.testing.assert_close(variance[:, t], expected)
    torch.testing.assert_close(state.information, precision * mu)
    torch.testing.assert_close(state.excess_precision, precision - p)


@pytest.mark.parametrize(("importance", "expected"), [(1.0, 0.45), (9.0, 8.1 / 9.2)])
def test_the_papers_worked_example(importance, expected):
    """An old mean of 1 meets a target of 0: important memory moves less (seeds: alpha 0.9, prior, k and beta 1)."""
    state = palimpsa.State(
        torch.full((1, 1, 1, 1), importance, dtype=F64), torch.full((1, 1, 1, 1), importance - 1, dtype=F64)
    )
    one = torch.ones(1, 1, 1, dtype=F64)
    state = palimpsa.step(state, one, 0 * one, one, torch.tensor([[0.9]], dtype=F64).log())
    mean, _ = palimpsa.readout(state, one, torch.ones(1, dtype=F64))
    assert mean.item() == pytest.approx(expected, abs=1e-12)


def test_one_hot_keys_give_the_exact_gaussian_posterior():
    """With axis-aligned keys nothing is off-diagonal: per-row weighted ridge regression, solved in one go."""
    keys, values, length = 3, 2, 12
    k = torch.eye(keys, dtype=F64)[torch.randint(keys, (length,), generator=torch.Generator().manual_seed(0))]
    k = k * draw(length, 1, seed=1)
    v, beta = draw(length, values, seed=2), draw(length, values, seed=3).exp()
    g = -draw(length, seed=4).abs() * 0.3
    prior, q = torch.tensor([0.7], dtype=F64), draw(length, keys, seed=5)

    def lift(x):
        return x[None, :, None]

    mean, variance, _ = palimpsa.scan(
        lift(q), lift(k), lift(beta * v), lift(beta), g[None, :, None], prior,
        palimpsa.init_state(1, 1, values, keys, dtype=F64),
    )  # fmt: skip
    for t in range(length):
        discount = torch.stack([g[s + 1 : t + 1].sum().exp() for s in range(t + 1)])
        for i in range(values):
            weight = discount * beta[: t + 1, i]
            precision = (k[: t + 1].T * weight) @ k[: t + 1] + prior * torch.eye(keys, dtype=F64)
            posterior = torch.linalg.solve(precision, k[: t + 1].T @ (weight * v[: t + 1, i]))
            assert mean[0, t, 0, i].item() == pytest.approx((posterior @ q[t]).item(), abs=1e-10)
            spread = q[t] @ torch.linalg.solve(precision, q[t])
            assert variance[0, t, 0, i].item() == pytest.approx(spread.item(), abs=1e-10)


def test_without_evidence_it_is_the_additive_rule():
    """beta -> 0 with a finite write: the additive rule on w / prior, at a rate proportional to beta."""
    q, k, w, beta, g, prior = problem()
    limit, spread, _ = additive.scan(q, k, w / prior[:, None], g, additive.init_state(2, 3, 5, 4, dtype=F64), scale=0.5)
    errors = []
    for size in (0.0, 1e-6, 1e-4):
        mean, variance, _ = palimpsa.scan(q, k, w, size * beta, g, prior, start(q, w), scale=0.5)
        errors.append((mean - limit).abs().max().item())
    assert errors[0] < 1e-12
    assert errors[1] < 1e-3
    assert errors[2] / errors[1] == pytest.approx(100, rel=0.05)
    torch.testing.assert_close(
        palimpsa.scan(q, k, w, 0 * beta, g, prior, start(q, w), scale=0.5)[1],
        spread / prior[:, None],
        rtol=1e-12,
        atol=0,
    )


def test_small_decay_alone_is_not_the_limit():
    """Strong forgetting without small evidence does not give the additive rule: beta k^2 stays in the precision."""
    q, k, w, beta, _, prior = problem()
    g = torch.full_like(q[..., 0], -20.0)
    mean, _, _ = palimpsa.scan(q, k, w, beta, g, prior, start(q, w))
    limit, _, _ = additive.scan(q, k, w / prior[:, None], g, additive.init_state(2, 3, 5, 4, dtype=F64))
    assert (mean - limit).abs().max() > 0.1


def test_a_padded_token_is_the_identity():
    q, k, w, beta, g, prior = problem()
    state = palimpsa.State(draw(2, 3, 5, 4), draw(2, 3, 5, 4, seed=9).abs())
    same = palimpsa.step(state, k[:, 0], 0 * w[:, 0], 0 * beta[:, 0], 0 * g[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))


def test_scan_in_two_pieces():
    q, k, w, beta, g, prior = problem()
    whole = palimpsa.scan(q, k, w, beta, g, prior, start(q, w))
    first = palimpsa.scan(*(x[:, :4] for x in (q, k, w, beta, g)), prior, start(q, w))
    second = palimpsa.scan(*(x[:, 4:] for x in (q, k, w, beta, g)), prior, first[2])
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0])
    assert torch.equal(torch.cat([first[1], second[1]], 1), whole[1])
    assert all(torch.equal(a, b) for a, b in zip(second[2], whole[2], strict=True))


def test_gradcheck():
    q, k, w, beta, g, prior = problem(1, 3, 2, 2, 2)
    m, j = draw(1, 2, 2, 2, seed=7), draw(1, 2, 2, 2, seed=8).abs()

    def run(q, k, w, beta, g, prior, m, j):
        mean, variance, state = palimpsa.scan(q, k, w, beta, g, prior, palimpsa.State(m, j), 0.7)
        return mean, variance, *state

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, w, beta, g, prior, m, j)])
