"""Rung 0 and 1 of the numerics ladder for the exact model: closed forms, statsmodels, and what Palimpsa keeps of it."""

import numpy as np
import pytest
import torch

from metaplastic.rules import additive, gaussian, palimpsa

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def problem(batch=2, length=9, heads=3, key_size=4, value_size=5):
    shape = (batch, length, heads)
    q, k, w = draw(*shape, key_size), draw(*shape, key_size, seed=1), draw(*shape, value_size, seed=2)
    beta, g = draw(*shape, value_size, seed=3).exp(), -draw(*shape, seed=4).abs()
    prior = draw(heads, seed=5).exp()
    return q, k, w, beta, g, prior


def start(q, w, rule=gaussian):
    return rule.init_state(q.shape[0], q.shape[2], w.shape[3], q.shape[3], dtype=F64)


def weights(g, t):
    """What is left at t of tokens 0 .. t, from the log-decays of one sequence."""
    return torch.stack([g[s + 1 : t + 1].sum().exp() for s in range(t + 1)])


def test_the_batch_posterior_of_weighted_ridge_regression():
    """Every token, row, head and batch row: the recursion is one regression with geometric weights, solved at once."""
    q, k, w, beta, g, prior = problem()
    mean, variance, state = gaussian.scan(q, k, w, beta, g, prior, start(q, w), scale=0.5)
    for b, t, h, i in np.ndindex(2, 9, 3, 5):
        keys, kept = k[b, : t + 1, h], weights(g[b, :, h], t)
        precision = keys.T @ (keys * (kept * beta[b, : t + 1, h, i])[:, None]) + prior[h] * torch.eye(4, dtype=F64)
        inverse, question = torch.linalg.inv(precision), 0.5 * q[b, t, h]
        mu = inverse @ (keys * (kept * w[b, : t + 1, h, i])[:, None]).sum(0)
        assert abs(mean[b, t, h, i] - mu @ question) < 1e-10
        assert abs(variance[b, t, h, i] - question @ inverse @ question) < 1e-10
        if t == 8:
            torch.testing.assert_close(gaussian.precision(state, prior)[b, h, i], precision, rtol=1e-12, atol=1e-12)


def test_equation_9_in_the_papers_coordinates():
    """Precision and mean as printed, the prior restored at each step."""
    q, k, w, beta, g, prior = problem(1, 9, 1)
    mean, _, state = gaussian.scan(q, k, w, beta, g, prior, start(q, w))
    for i in range(5):
        floor = prior[0] * torch.eye(4, dtype=F64)
        precision, mu = floor, torch.zeros(4, dtype=F64)
        for t in range(9):
            alpha, key, strength = g[0, t, 0].exp(), k[0, t, 0], beta[0, t, 0, i]
            v = w[0, t, 0, i] / strength
            new = alpha * precision + (1 - alpha) * floor + strength * torch.outer(key, key)
            mu = torch.linalg.solve(new, alpha * precision @ mu + strength * v * key)
            precision = new
            assert abs(mean[0, t, 0, i] - mu @ q[0, t, 0]) < 1e-10
        torch.testing.assert_close(state.information[0, 0, i], precision @ mu)


def one_row(length=30, keys=4):
    """Keys, values and evidence of a single head and value row."""
    return draw(length, keys, seed=1), draw(length, seed=2), draw(length, seed=3).exp()


def scan_row(k, v, beta, g, prior):
    """Each key is asked for right after its token."""

    def lift(x):
        return x[None, :, None]

    state = gaussian.init_state(1, 1, 1, k.shape[-1], dtype=F64)
    columns = lift((beta * v)[:, None]), lift(beta[:, None])
    return gaussian.scan(lift(k), lift(k), *columns, lift(g), torch.tensor([prior], dtype=F64), state)


def test_statsmodels_weighted_least_squares():
    """The prior as K more observations of 0: mean and covariance of the last step against an independent solver."""
    regression = pytest.importorskip("statsmodels.regression.linear_model")
    k, v, beta = one_row()
    g = -0.2 * draw(30, seed=4).abs()
    mean, variance, state = scan_row(k, v, beta, g, 0.7)
    kept = np.concatenate([(weights(g, 29) * beta).numpy(), np.full(4, 0.7)])
    fit = regression.WLS(np.append(v.numpy(), np.zeros(4)), np.vstack([k.numpy(), np.eye(4)]), kept).fit()
    covariance = torch.from_numpy(fit.normalized_cov_params)
    torch.testing.assert_close(gaussian.precision(state, torch.tensor([0.7], dtype=F64))[0, 0, 0].inverse(), covariance)
    assert mean[0, -1, 0, 0].item() == pytest.approx(fit.params @ k[-1].numpy(), abs=1e-10)
    assert variance[0, -1, 0, 0].item() == pytest.approx((k[-1] @ covariance @ k[-1]).item(), abs=1e-10)


def test_statsmodels_kalman_filter_without_forgetting():
    """A constant state observed through the keys with noise 1 / beta: mean and variance at every step."""
    representation = pytest.importorskip("statsmodels.tsa.statespace.kalman_filter")
    k, v, beta = one_row()
    mean, variance, _ = scan_row(k, v, beta, torch.zeros(30, dtype=F64), 0.7)
    model = representation.KalmanFilter(1, 4, k_posdef=4, loglikelihood_burn=0)
    model.bind(v.numpy()[:, None].copy())
    model["design"] = np.ascontiguousarray(k.numpy().T[None])
    model["obs_cov"] = (1 / beta).numpy()[None, None]
    model["transition"], model["selection"], model["state_cov"] = np.eye(4), np.eye(4), np.zeros((4, 4))
    model.initialize_known(np.zeros(4), np.eye(4) / 0.7)
    found = model.filter()
    keys = k.numpy()
    expected = np.einsum("it,ti->t", found.filtered_state, keys)
    spread = np.einsum("ti,ijt,tj->t", keys, found.filtered_state_cov, keys)
    np.testing.assert_allclose(mean[0, :, 0, 0].numpy(), expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(variance[0, :, 0, 0].numpy(), spread, rtol=1e-9, atol=1e-10)


def test_recursive_least_squares():
    """Without forgetting: the textbook recursion on the covariance, gain times surprise, never inverting anything."""
    k, v, beta = one_row()
    mean, variance, _ = scan_row(k, v, beta, torch.zeros(30, dtype=F64), 0.7)
    covariance, mu = torch.eye(4, dtype=F64) / 0.7, torch.zeros(4, dtype=F64)
    for t in range(30):
        seen = covariance @ k[t]
        gain = seen / (1 / beta[t] + k[t] @ seen)
        mu, covariance = mu + gain * (v[t] - mu @ k[t]), covariance - torch.outer(gain, seen)
        assert abs(mean[0, t, 0, 0] - mu @ k[t]) < 1e-10
        assert abs(variance[0, t, 0, 0] - k[t] @ covariance @ k[t]) < 1e-10


def test_one_hot_keys_give_palimpsa():
    """Axis-aligned keys of any length: nothing is off-diagonal, the two rules can be swapped."""
    q, k, w, beta, g, prior = problem()
    k = k * torch.eye(4, dtype=F64)[torch.randint(4, (2, 9, 3), generator=torch.Generator().manual_seed(0))]
    exact = gaussian.scan(q, k, w, beta, g, prior, start(q, w), scale=0.5)
    kept = palimpsa.scan(q, k, w, beta, g, prior, start(q, w, palimpsa), scale=0.5)
    for ours, theirs in zip(exact[:2], kept[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_key_dimension_gives_palimpsa():
    inputs = problem(key_size=1)
    q, w = inputs[0], inputs[2]
    exact, kept = gaussian.scan(*inputs, start(q, w)), palimpsa.scan(*inputs, start(q, w, palimpsa))
    torch.testing.assert_close(exact[0], kept[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact[1], kept[1], rtol=1e-12, atol=1e-12)


def test_palimpsas_precision_is_the_diagonal_and_its_mean_is_not_the_mean():
    inputs = problem()
    q, w = inputs[0], inputs[2]
    mean, _, exact = gaussian.scan(*inputs, start(q, w))
    approximate, _, kept = palimpsa.scan(*inputs, start(q, w, palimpsa))
    diagonal = exact.excess_precision.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, kept.excess_precision, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(exact.information, kept.information, rtol=0, atol=0)
    assert (mean - approximate).abs().max() > 0.1


def test_without_evidence_it_is_the_additive_rule():
    """beta -> 0 with a finite write: the prior divides, at a rate proportional to beta."""
    q, k, w, beta, g, prior = problem()
    limit, spread, _ = additive.scan(q, k, w / prior[:, None], g, start(q, w, additive), scale=0.5)
    errors = []
    for size in (0.0, 1e-6, 1e-4):
        mean, variance, _ = gaussian.scan(q, k, w, size * beta, g, prior, start(q, w), scale=0.5)
        errors.append((mean - limit).abs().max().item())
    assert errors[0] < 1e-12
    assert errors[1] < 1e-3
    assert errors[2] / errors[1] == pytest.approx(100, rel=0.05)
    _, variance, _ = gaussian.scan(q, k, w, 0 * beta, g, prior, start(q, w), scale=0.5)
    torch.testing.assert_close(variance, spread / prior[:, None], rtol=1e-12, atol=0)


def test_a_closed_gate_forgets_everything():
    q, k, w, beta, g, prior = problem()
    g[:, 4] = -torch.inf
    mean, variance, _ = gaussian.scan(q, k, w, beta, g, prior, start(q, w))
    later = [x[:, 4:] for x in (q, k, w, beta, g)]
    fresh = gaussian.scan(*later, prior, start(q, w))
    assert torch.equal(mean[:, 4:], fresh[0]) and torch.equal(variance[:, 4:], fresh[1])


def test_a_padded_token_is_the_identity():
    _, k, w, beta, g, _ = problem()
    root = draw(2, 3, 5, 4, 4, seed=9)
    state = gaussian.State(draw(2, 3, 5, 4), root @ root.mT)
    same = gaussian.step(state, k[:, 0], 0 * w[:, 0], 0 * beta[:, 0], 0 * g[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))


def test_scan_in_two_pieces_and_of_nothing():
    q, k, w, beta, g, prior = problem()
    whole = gaussian.scan(q, k, w, beta, g, prior, start(q, w))
    first = gaussian.scan(*(x[:, :4] for x in (q, k, w, beta, g)), prior, start(q, w))
    second = gaussian.scan(*(x[:, 4:] for x in (q, k, w, beta, g)), prior, first[2])
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0])
    assert torch.equal(torch.cat([first[1], second[1]], 1), whole[1])
    assert all(torch.equal(a, b) for a, b in zip(second[2], whole[2], strict=True))
    nothing = gaussian.scan(*(x[:, :0] for x in (q, k, w, beta, g)), prior, first[2])
    assert nothing[0].shape == nothing[1].shape == (2, 0, 3, 5) and nothing[2] is first[2]


def test_the_variance_stays_positive_in_float32():
    """Ten thousand copies of one key, no forgetting: as sure as can be about it, unsure beside it."""
    k = torch.tensor([1.0, 1.0, 0.0]).div(2**0.5)
    state = gaussian.init_state(1, 1, 1, 3)
    one = torch.ones(1, 1, 1)
    for _ in range(10_000):
        state = gaussian.step(state, k[None, None], one, 100 * one, torch.zeros(1, 1))
    questions = torch.stack([k, torch.tensor([1.0, -1.0, 0.0]).div(2**0.5), torch.tensor([0.0, 0.0, 1.0])])
    spread = torch.stack([gaussian.readout(state, q[None, None], torch.ones(1))[1].squeeze() for q in questions])
    assert spread[0] > 0
    torch.testing.assert_close(spread, torch.tensor([1e-6, 1.0, 1.0]), rtol=0.1, atol=0)


def test_gradcheck():
    q, k, w, beta, g, prior = problem(1, 3, 2, 2, 2)
    m, root = draw(1, 2, 2, 2, seed=7), draw(1, 2, 2, 2, 2, seed=8)

    def run(q, k, w, beta, g, prior, m, root):
        state = gaussian.State(m, root @ root.mT)  # stays symmetric while gradcheck moves one number at a time
        mean, variance, state = gaussian.scan(q, k, w, beta, g, prior, state, 0.7)
        return mean, variance, *state

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, w, beta, g, prior, m, root)])
