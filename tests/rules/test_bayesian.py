"""The Bayesian Layer's filter: closed forms, a third party's Kalman filter, and every neighbour it contains."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from statsmodels.tsa.statespace.kalman_filter import KalmanFilter
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from metaplastic.evaluation.collision import place_keys, schedule, tokens
from metaplastic.rules import additive, bayesian, delta, gaussian, longhorn, mesa, palimpsa

KEYS, VALUES, LENGTH = 4, 6, 17


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(batch=2, heads=3, length=LENGTH):
    """q, k, v, g, process noise, observation noise: all varying with the token."""
    shape = (batch, length, heads)
    q, k, v = normal(*shape, KEYS, seed=1), normal(*shape, KEYS, seed=2), normal(*shape, VALUES, seed=3)
    g, process, observation = -normal(*shape, seed=4).abs(), normal(*shape, seed=5).square(), normal(*shape, seed=6)
    return q, k, v, g, process, observation.square() + 0.1


def start(batch=2, heads=3, variance=1.5, groups=None):
    shape = (heads,) if groups is None else (heads, groups)
    return bayesian.init_state(
        batch, heads, VALUES, KEYS, prior_variance=torch.full(shape, variance, dtype=torch.float64)
    )


def test_statsmodels_kalman_filter():
    """A time-varying system with per-key decay and noise: filtered means and covariances of every step."""
    q, k, v, g, process, observation = inputs(1, 1)
    per_key = -normal(1, LENGTH, 1, KEYS, seed=7).abs()
    noise = normal(1, LENGTH, 1, KEYS, seed=8).square()
    oracle = KalmanFilter(k_endog=1, k_states=KEYS)
    oracle.bind(v[0, :, 0, :1].numpy().copy())
    oracle["design"] = k[0, :, 0].numpy().T[None].copy()
    oracle["obs_cov"] = observation[0, :, 0].numpy()[None, None].copy()
    # Its transition and noise lead from this step to the next; ours into this step. The first is in the initial state.
    decay = per_key[0, :, 0].exp().numpy()
    oracle["transition"] = np.stack([np.diag(a) for a in [*decay[1:], decay[0]]], -1)
    oracle["selection"] = np.eye(KEYS)
    spread = noise[0, :, 0].numpy()
    oracle["state_cov"] = np.stack([np.diag(s) for s in [*spread[1:], spread[0]]], -1)
    oracle.initialize_known(np.zeros(KEYS), np.diag(decay[0] ** 2 * 1.5 + spread[0]))
    oracle.tolerance = 0  # no steady-state shortcut
    found = oracle.filter()
    state = start(1, 1)
    for t in range(LENGTH):
        state = bayesian.step(state, k[:, t], v[:, t], per_key[:, t], noise[:, t], observation[:, t])
        np.testing.assert_allclose(state.mean[0, 0, :, 0], found.filtered_state[:, t], rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.covariance[0, 0], found.filtered_state_cov[:, :, t], rtol=0, atol=1e-12)


def test_recursive_least_squares_is_ridge_regression_and_mesa():
    """Without process noise and decay: the weighted ridge solution, its posterior covariance, Mesa's read-out."""
    q, k, v, g, process, observation = inputs()
    y, variance, state = bayesian.scan(q, k, v, 0 * g, 0 * process, observation, start())
    keys, weights = k.permute(0, 2, 1, 3), (1 / observation).permute(0, 2, 1)[..., None]
    precision = torch.eye(KEYS, dtype=torch.float64) / 1.5 + keys.mT @ (weights * keys)
    mean = torch.linalg.solve(precision, keys.mT @ (weights * v.permute(0, 2, 1, 3)))
    torch.testing.assert_close(state.mean, mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(state.covariance, torch.linalg.inv(precision), rtol=0, atol=1e-10)
    ridge = torch.full((3, KEYS), 1 / 1.5, dtype=torch.float64)
    empty = mesa.init_state(2, 3, VALUES, KEYS, dtype=torch.float64)
    solved, spread, _ = mesa.scan(q, k, v, 1 / observation, 0 * g, ridge, empty)
    torch.testing.assert_close(y, solved, rtol=0, atol=1e-10)
    torch.testing.assert_close(variance, spread, rtol=0, atol=1e-10)


def test_mesa_with_decay_is_the_exact_model_behind_palimpsa():
    """One beta for all rows and an isotropic ridge: the full-precision Gaussian, prior restored as evidence decays."""
    q, k, v, g, _, observation = inputs()
    beta = 1 / observation
    ridge, prior = torch.full((3, KEYS), 0.7, dtype=torch.float64), torch.full((3,), 0.7, dtype=torch.float64)
    y, variance, _ = mesa.scan(q, k, v, beta, g, ridge, mesa.init_state(2, 3, VALUES, KEYS, dtype=torch.float64), 0.5)
    rows = beta[..., None].expand_as(v)
    expected, spread, _ = gaussian.scan(
        q, k, rows * v, rows, g, prior, gaussian.init_state(2, 3, VALUES, KEYS, dtype=torch.float64), 0.5
    )
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(variance[..., None].expand_as(v), spread, rtol=0, atol=1e-11)


@pytest.mark.parametrize("decay", ["DeltaNet", "Gated DeltaNet", "KDA"])
def test_resetting_the_covariance_is_the_delta_rule(decay):
    """Pb = lambda I before every token: A = I, alpha I or diag(alpha)."""
    q, k, v, g, _, observation = inputs()
    g = {"DeltaNet": 0 * g, "Gated DeltaNet": g, "KDA": -normal(2, LENGTH, 3, KEYS, seed=7).abs()}[decay]
    reset = normal(2, LENGTH, 3, seed=9).exp()
    beta = reset / (observation + reset * k.square().sum(-1))
    found, _, final = delta.scan(q, k, v, beta, g, delta.init_state(2, 3, VALUES, KEYS, dtype=torch.float64))
    mean, ys = start().mean, []
    for t in range(LENGTH):
        predicted = bayesian.predict(bayesian.GaussianState(mean, start().covariance), g[:, t], 0 * reset[:, t])
        lam = torch.eye(KEYS, dtype=torch.float64) * reset[:, t, :, None, None]
        mean = bayesian.update(bayesian.GaussianState(predicted.mean, lam), k[:, t], v[:, t], observation[:, t]).mean
        ys.append((mean * q[:, t, :, :, None]).sum(-2))
    torch.testing.assert_close(found, torch.stack(ys, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(final.mean, mean, rtol=0, atol=1e-12)


def test_gated_delta_rule_of_hugging_face():
    """Its recurrent form runs in float32 and divides q by sqrt(K)."""
    q, k, v, g, _, observation = inputs()
    k = k / k.norm(dim=-1, keepdim=True)
    beta = torch.sigmoid(observation)
    expected, final = torch_recurrent_gated_delta_rule(
        *(x.float() for x in (q, k, v, g, beta)), initial_state=None, output_final_state=True
    )
    state = delta.init_state(2, 3, VALUES, KEYS, dtype=torch.float64)
    y, _, state = delta.scan(q, k, v, beta, g, state, KEYS**-0.5)
    torch.testing.assert_close(y, expected.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(state.mean, final.double(), rtol=0, atol=1e-5)


def test_a_reset_with_a_noise_per_column_is_longhorn():
    """V noise groups, covariance reset to lambda I: the exact step; its elementwise form agrees on one-hot keys."""
    q, k, v, *_ = inputs()
    beta, lam = normal(2, LENGTH, 3, VALUES, seed=4).square(), 0.8
    found, _, _ = longhorn.scan(q, k, v, beta, longhorn.init_state(2, 3, VALUES, KEYS, dtype=torch.float64))
    covariance = start(variance=lam, groups=VALUES).covariance
    mean, ys = start().mean, []
    for t in range(LENGTH):
        state = bayesian.GaussianState(mean, covariance)
        mean = bayesian.update(state, k[:, t], v[:, t], lam / beta[:, t]).mean
        ys.append((mean * q[:, t, :, :, None]).sum(-2))
    torch.testing.assert_close(found, torch.stack(ys, 1), rtol=0, atol=1e-12)
    onehot = torch.nn.functional.one_hot(torch.arange(LENGTH) % KEYS, KEYS)[None, :, None].double().expand_as(k) * 0.7
    empty = longhorn.init_state(2, 3, VALUES, KEYS, dtype=torch.float64)
    exact, rough = (longhorn.scan(q, onehot, v, beta, empty, approximate=a)[0] for a in (False, True))
    torch.testing.assert_close(exact, rough, rtol=0, atol=1e-12)
    assert (longhorn.scan(q, k, v, beta, empty, approximate=True)[0] - found).abs().max() > 0.01


def test_the_additive_family_is_another_design_model():
    """A latent write coefficient of variance lambda observed with noise r2: omega v is its posterior mean."""
    q, k, v, g, _, observation = inputs()
    lam = normal(2, LENGTH, 3, seed=9).exp()
    omega = (lam / (lam + observation))[..., None]
    y, _, _ = additive.scan(q, k, omega * v, g, additive.init_state(2, 3, VALUES, KEYS, dtype=torch.float64))
    # Joint Gaussian of all coefficients and observations, conditioned: one column at a time they are independent.
    weights = torch.exp(torch.cumsum(g, 1)[:, :, None] - torch.cumsum(g, 1)[:, None])  # [B, t, s, H]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, :, :, None]
    scores = torch.einsum("bthk,bshk->btsh", q, k) * weights.masked_fill(~causal, 0)
    expected = torch.einsum("btsh,bshv->bthv", scores, lam[..., None] * v / (lam + observation)[..., None])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


def test_diagonal_filter_is_palimpsa_only_for_one_hot_keys():
    """With one-hot keys, no process noise and no decay both are K scalar filters per column; otherwise they differ."""
    q, k, v, g, _, observation = inputs()
    onehot = torch.nn.functional.one_hot(torch.arange(LENGTH) % KEYS, KEYS)[None, :, None].double().expand_as(k) * 0.7
    beta = (1 / observation)[..., None].expand_as(v)
    prior = torch.full((3,), 1 / 1.5, dtype=torch.float64)

    def both(keys):
        a = bayesian.scan(q, keys, v, 0 * g, 0 * g, observation, start(), project=bayesian.diagonal)[0]
        empty = palimpsa.init_state(2, 3, VALUES, KEYS, dtype=torch.float64)
        return a, palimpsa.scan(q, keys, beta * v, beta, 0 * g, prior, empty)[0]

    a, b = both(onehot)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    a, b = both(k)
    assert (a - b).abs().max() > 0.1


def test_noise_groups_are_separate_filters():
    q, k, v, g, process, _ = inputs()
    noise = normal(2, LENGTH, 3, 2, seed=6).square() + 0.1
    y, variance, state = bayesian.scan(q, k, v, g, process, noise, start(groups=2))
    for j in range(2):
        columns = slice(3 * j, 3 * j + 3)
        alone = bayesian.GaussianState(start().mean[..., columns], start().covariance)
        z, spread, last = bayesian.scan(q, k, v[..., columns], g, process, noise[..., j], alone)
        torch.testing.assert_close(y[..., columns], z, rtol=0, atol=1e-13)
        torch.testing.assert_close(variance[..., j], spread, rtol=0, atol=1e-13)
        torch.testing.assert_close(state.mean[..., columns], last.mean, rtol=0, atol=1e-13)
        torch.testing.assert_close(state.covariance[:, :, j], last.covariance, rtol=0, atol=1e-13)


@pytest.mark.parametrize("groups", [None, 2])
def test_rotations_are_a_matrix_in_the_dynamics(groups):
    """A = diag(a) Rot(theta) written out; one rotated pair is a complex number."""
    angle, g = normal(2, 3, KEYS // 2, seed=5), -normal(2, 3, seed=4).abs()
    turn = torch.zeros(2, 3, KEYS, KEYS, dtype=torch.float64)
    for j in range(KEYS // 2):
        c, s = angle[..., j].cos(), angle[..., j].sin()
        for row, column, value in ((0, 0, c), (0, 1, -s), (1, 0, s), (1, 1, c)):
            turn[..., 2 * j + row, 2 * j + column] = value
    dynamics = g.exp()[..., None, None] * turn
    state = start(groups=groups)
    state = bayesian.GaussianState(normal(2, 3, KEYS, VALUES, seed=1), state.covariance)
    noise = normal(2, 3, KEYS, seed=7).square()
    found = bayesian.predict(state, g, noise, angle)
    torch.testing.assert_close(found.mean, dynamics @ state.mean, rtol=0, atol=1e-13)
    lifted = dynamics if groups is None else dynamics[:, :, None]
    added = torch.diag_embed(noise) if groups is None else torch.diag_embed(noise)[:, :, None]
    expected = lifted @ state.covariance @ lifted.mT + added
    torch.testing.assert_close(found.covariance, expected, rtol=0, atol=1e-13)
    pair = torch.complex(state.mean[..., 0, 0], state.mean[..., 1, 0]) * torch.exp(torch.complex(g, angle[..., 0]))
    torch.testing.assert_close(found.mean[..., :2, 0], torch.view_as_real(pair), rtol=0, atol=1e-13)


def test_a_padded_token_is_an_identity_and_any_split_is_the_whole():
    q, k, v, g, process, observation = inputs()
    _, _, state = bayesian.scan(q, k, v, g, process, observation, start())
    zero = torch.zeros(2, 3, dtype=torch.float64)
    same = bayesian.step(state, 0 * k[:, 0], v[:, 0] * 1e9, zero, zero, observation[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))
    pieces = start()
    for a, b in ((0, 5), (5, 5), (5, LENGTH)):
        _, _, pieces = bayesian.scan(*(x[:, a:b] for x in (q, k, v, g, process, observation)), pieces)
    assert all(torch.equal(a, b) for a, b in zip(state, pieces, strict=True))


def test_gradients():
    q, k, v, g, process, observation = (x[:1, :3, :1].requires_grad_() for x in inputs())
    angle = normal(1, 3, 1, KEYS // 2).requires_grad_()
    variance = torch.tensor([1.3], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, g, process, observation, angle, variance):
        state = bayesian.init_state(1, 1, VALUES, KEYS, prior_variance=variance)
        y, spread, state = bayesian.scan(q, k, v, g, process, observation, state, 0.7, rotation=angle)
        return y, spread, *state

    assert torch.autograd.gradcheck(run, (q, k, v, g, process, observation, angle, variance))


# -- the collision of the paper (Sec. 2.5, App. E): closed forms, to the digits printed --------------------------


def collision(rho=0.92):
    """k_A and k_B overlap by rho; two rounds over six identities, then B 40 times, then A 60 times; k_B is asked."""
    keys, order = place_keys(rho), tokens(schedule())
    k, v = keys[order][None, :, None], torch.eye(6, dtype=torch.float64)[order][None, :, None]
    return keys[1].expand_as(k), k, v, torch.ones(1, len(order), 1, dtype=torch.float64)


def p_ab(y):
    return torch.softmax(y[0, :, 0, :2], -1)[:, 1]


def filtered(project=None, rho=0.92):
    q, k, v, one = collision(rho)
    state = bayesian.init_state(1, 1, 6, 16, prior_variance=torch.tensor([3.0], dtype=torch.float64))
    return bayesian.scan(q, k, v, 0 * one, 0.05 * one, 0.05 * one, state, project=project)


def test_collision_table():
    q, k, v, one = collision()
    p = p_ab(filtered()[0])
    assert p[51].item() == pytest.approx(0.73106, abs=5e-6)
    assert p[111].item() == pytest.approx(0.72309, abs=5e-6)
    assert (2 * p[111] - 1).item() == pytest.approx(0.44619, abs=5e-6)
    empty = delta.init_state(1, 1, 6, 16, dtype=torch.float64)
    p = p_ab(delta.scan(q, k, v, 0.5 * one, 0 * one, empty)[0])
    assert p[51].item() == pytest.approx(0.73106, abs=5e-6)
    assert p[111].item() == pytest.approx(0.35138, abs=5e-6)
    assert (2 * p[111] - 1).item() == pytest.approx(-0.29723, abs=5e-6)
    p = p_ab(additive.scan(q, k, 0.5 * v, 0 * one, additive.init_state(1, 1, 6, 16, dtype=torch.float64))[0])
    assert p[51].item() == pytest.approx(1, abs=1e-4)
    assert p[111].item() == pytest.approx(0.00054, abs=5e-6)
    assert (2 * p[111] - 1).item() == pytest.approx(-0.99892, abs=5e-6)


def test_collision_gains():
    """The gain when A starts, its floor after long repetition, and the variance that B regains per step."""
    _, k, v, one = collision()
    state = bayesian.init_state(1, 1, 6, 16, prior_variance=torch.tensor([3.0], dtype=torch.float64))
    b, gains, spread = k[0, 51, 0], [], []
    for t in range(k.shape[1]):
        ahead = bayesian.predict(state, 0 * one[:, t], 0.05 * one[:, t])
        x = (k[0, t, 0] @ ahead.covariance[0, 0] @ k[0, t, 0]).item()
        gains.append(x / (0.05 + x))
        state = bayesian.update(ahead, k[:, t], v[:, t], 0.05 * one[:, t])
        spread.append((b @ state.covariance[0, 0] @ b).item())
    assert gains[52] == pytest.approx(0.90708, abs=5e-6)
    floor = (0.05 + math.sqrt(0.05**2 + 4 * 0.05 * 0.05)) / 2
    assert gains[111] == pytest.approx(floor / (0.05 + floor), abs=1e-9)
    assert gains[111] == pytest.approx(0.61803, abs=5e-6)
    assert spread[111] - spread[110] == pytest.approx((1 - 0.92**2) * 0.05, abs=1e-9)


def test_collision_relatives():
    """Diagonal covariance keeps most only because these keys are axis-aligned; rank r needs no such luck."""
    assert p_ab(filtered(bayesian.diagonal)[0])[111].item() == pytest.approx(0.69037, abs=5e-6)
    for rank, expected in ((0, 0.405), (1, 0.729), (2, 0.728), (4, 0.728), (6, 0.723)):
        assert p_ab(filtered(partial(bayesian.low_rank, rank=rank))[0])[111].item() == pytest.approx(expected, abs=1e-3)
