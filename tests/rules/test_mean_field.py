"""The online mean-field rule: the variational optimum, a dense solve, and its neighbours."""

import pytest
import torch

from metaplastic.rules import additive, gaussian, mean_field, palimpsa

from .test_gaussian import F64, draw, problem, start


def test_a_dense_solve_of_the_coupled_system():
    """Eq. (26)-(31) before anything is dropped: the posterior of one token given a diagonal belief."""
    q, k, w, beta, g, prior = problem()
    mean, variance, state = mean_field.scan(q, k, w, beta, g, prior, start(q, w, mean_field), scale=0.5)
    floor = prior[:, None, None]
    mu, importance = torch.zeros(2, 3, 5, 4, dtype=F64), floor.expand(2, 3, 5, 4)
    for t in range(9):
        alpha, key = g[:, t].exp()[..., None, None], k[:, t, :, None]
        precision = (alpha * importance + (1 - alpha) * floor).diag_embed()
        precision = precision + beta[:, t, ..., None, None] * (key[..., :, None] * key[..., None, :])
        mu = torch.linalg.solve(precision, alpha * importance * mu + w[:, t, ..., None] * key)
        importance = precision.diagonal(dim1=-2, dim2=-1)
        question = 0.5 * q[:, t, :, None]
        torch.testing.assert_close(mean[:, t], (mu * question).sum(-1), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(variance[:, t], (question.square() / importance).sum(-1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state.mean, mu, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state.excess_precision, importance - floor, rtol=1e-11, atol=1e-11)


def test_it_is_the_variational_optimum():
    """The slope of KL(belief || posterior of one more token) is zero at the new belief and not at Palimpsa's."""
    q, k, w, beta, g, prior = problem(1, 2, 1, 4, 1)
    _, _, state = mean_field.scan(q[:, :1], k[:, :1], w[:, :1], beta[:, :1], g[:, :1], prior, start(q, w, mean_field))
    belief = (state.excess_precision + prior).flatten()
    alpha, key = g[0, 1, 0].exp(), k[0, 1, 0]
    target = torch.diag(alpha * belief + (1 - alpha) * prior) + beta[0, 1, 0, 0] * torch.outer(key, key)
    centre = torch.linalg.solve(target, alpha * belief * state.mean.flatten() + w[0, 1, 0, 0] * key)

    def divergence(mu, precision):
        away = mu - centre
        return 0.5 * ((target.diagonal() / precision).sum() + away @ target @ away + precision.log().sum())

    def slope(mu, precision):
        mu, precision = mu.detach().requires_grad_(), precision.detach().requires_grad_()
        return torch.cat(torch.autograd.grad(divergence(mu, precision), (mu, precision))).abs().max()

    new = mean_field.step(state, k[:, 1], w[:, 1], beta[:, 1], g[:, 1], prior)
    precision = (new.excess_precision + prior).flatten()
    assert slope(new.mean.flatten(), precision) < 1e-12
    natural = palimpsa.State(state.mean * (state.excess_precision + prior), state.excess_precision)
    kept = palimpsa.step(natural, k[:, 1], w[:, 1], beta[:, 1], g[:, 1])
    torch.testing.assert_close(kept.excess_precision, new.excess_precision)
    assert slope((kept.information / (kept.excess_precision + prior)).flatten(), precision) > 0.01


def test_one_hot_keys_give_the_exact_model():
    q, k, w, beta, g, prior = problem()
    k = k * torch.eye(4, dtype=F64)[torch.randint(4, (2, 9, 3), generator=torch.Generator().manual_seed(0))]
    exact = gaussian.scan(q, k, w, beta, g, prior, start(q, w))
    found = mean_field.scan(q, k, w, beta, g, prior, start(q, w, mean_field))
    torch.testing.assert_close(found[0], exact[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], exact[1], rtol=1e-12, atol=1e-12)


def test_the_first_token_is_exact_whatever_its_key():
    q, k, w, beta, g, prior = problem(length=1)
    exact = gaussian.scan(q, k, w, beta, g, prior, start(q, w))
    found = mean_field.scan(q, k, w, beta, g, prior, start(q, w, mean_field))
    torch.testing.assert_close(found[0], exact[0], rtol=1e-12, atol=1e-12)
    assert (palimpsa.scan(q, k, w, beta, g, prior, start(q, w, palimpsa))[0] - exact[0]).abs().max() > 0.01


def test_without_evidence_it_is_the_additive_rule():
    q, k, w, beta, g, prior = problem()
    limit, spread, _ = additive.scan(q, k, w / prior[:, None], g, start(q, w, additive))
    mean, variance, _ = mean_field.scan(q, k, w, 0 * beta, g, prior, start(q, w, mean_field))
    torch.testing.assert_close(mean, limit, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance, spread / prior[:, None], rtol=1e-12, atol=0)


def test_a_padded_token_is_the_identity_and_a_scan_can_be_cut():
    q, k, w, beta, g, prior = problem()
    state = mean_field.State(draw(2, 3, 5, 4), draw(2, 3, 5, 4, seed=9).abs())
    same = mean_field.step(state, k[:, 0], 0 * w[:, 0], 0 * beta[:, 0], 0 * g[:, 0], prior)
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))
    whole = mean_field.scan(q, k, w, beta, g, prior, state)
    first = mean_field.scan(*(x[:, :4] for x in (q, k, w, beta, g)), prior, state)
    second = mean_field.scan(*(x[:, 4:] for x in (q, k, w, beta, g)), prior, first[2])
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0])
    assert all(torch.equal(a, b) for a, b in zip(second[2], whole[2], strict=True))


@pytest.mark.parametrize("closed", [False, True])
def test_gradcheck(closed):
    q, k, w, beta, g, prior = problem(1, 3, 2, 2, 2)
    if closed:
        g = g - 40.0  # alpha of 4e-18: the mean before it is gone, and so is its gradient
    mu, j = draw(1, 2, 2, 2, seed=7), draw(1, 2, 2, 2, seed=8).abs()

    def run(q, k, w, beta, g, prior, mu, j):
        mean, variance, state = mean_field.scan(q, k, w, beta, g, prior, mean_field.State(mu, j), 0.7)
        return mean, variance, *state

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, w, beta, g, prior, mu, j)])
