r"""Design models: say how a memory drifts, what a token sees of it and what is asked; the filter follows.

A memory is V columns of N numbers. A *design model* of one column x is linear and Gaussian:

    state transition   x_t | x_{t-1} ~ N(A_t x_{t-1}, Q_t)
    write              z_t | x_t     ~ N(H_t x_t, R_t)          M numbers observed: what of the memory a token sees
    read-out           y_t = E[q_t . x_t],  var_t = Var[q_t . x_t]       never fed back

and its exact filter is the Kalman filter, whatever the pieces:

    predict    m = A m,  P = A P A^T + Q
    update     G = P H^T (H P H^T + R)^{-1},  m = m + G (z - H m),  P = P - G H P
    read-out   y = q.m,  var = q.P q

``H = k^T``, ``z = v`` is a regression of values on keys (:func:`regression`). A_t and Q_t may depend on P_{t-1}, hence
on earlier keys and noises, never on values: the belief stays Gaussian (:func:`temper`). An :class:`Approximation`
changes the belief once per token: :mod:`.approximations` names those that turn filters into known rules, one by one
declared in :mod:`.special_cases`.

Dense and token by token, for study: any dtype, differentiable. Shapes: m [B, H, V, N], P [B, H, V, N, N].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_axes, check_broadcast, check_inputs, check_tensors


class Belief(NamedTuple):
    """Mean ``[B, H, V, N]`` and covariance ``[B, H, V, N, N]`` of every column (batch, heads, columns, their size)."""

    mean: Tensor
    covariance: Tensor


State = Belief
Transition = Callable[[int, Tensor], tuple[Tensor, Tensor]]  # t, P [B, H, V, N, N] -> A_t, Q_t, each broadcastable to P


class DesignModel(NamedTuple):
    """One sequence of inputs; the fourth axis of every tensor is V, or 1 where the columns share it."""

    transition: Transition
    seen: Tensor  # H [B, T, H, V or 1, M, N]
    noise: Tensor  # R [B, T, H, V or 1, M, M]
    value: Tensor  # z [B, T, H, V or 1, M]
    query: Tensor  # q [B, T, H, V or 1, N]


def regression(transition: Transition, q: Tensor, k: Tensor, v: Tensor, noise: Tensor) -> DesignModel:
    """Every column sees its value under the key: q, k [B, T, H, N], v [B, T, H, V], noise [B, T, H] or [B, T, H, V]."""
    check_tensors(q=q, k=k, v=v, noise=noise)
    noise = noise if noise.dim() == v.dim() else noise[..., None]
    return DesignModel(transition, k[..., None, None, :], noise[..., None, None], v[..., None], q[..., None, :])


def drift(matrix: Tensor, noise: Tensor) -> Transition:
    """A_t and Q_t as given, ``[B, T, H, N, N]`` each, for all columns."""
    check_tensors(matrix=matrix, noise=noise)
    if matrix.dim() != 5 or matrix.shape != noise.shape:
        raise ValueError(f"matrix, noise: got {[*matrix.shape]}, {[*noise.shape]}, expected twice [B, T, H, N, N]")
    return lambda t, covariance: (matrix[:, t, :, None], noise[:, t, :, None])


def temper(g: Tensor, prior: Tensor) -> Transition:
    """Forgetting: belief^alpha prior^(1 - alpha), alpha = exp(g); g [B, T, H], prior the precisions [H, N].

    With W = (alpha I + (1 - alpha) P diag(prior))^{-1} this is the transition A = alpha W, Q = (1 - alpha) W (alpha P +
    P diag(prior) P) W^T: its A P A^T + Q is the inverse of alpha P^{-1} + (1 - alpha) diag(prior).
    """
    check_tensors(g=g, prior=prior)
    check_axes("g", g, "B, T, H")
    check_axes("prior", prior, "H, N")

    def transition(t: int, covariance: Tensor) -> tuple[Tensor, Tensor]:
        alpha = g[:, t, :, None, None, None].exp()
        known = covariance * prior[:, None, None, :]
        identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        shrunk = torch.linalg.inv(alpha * identity + (1 - alpha) * known)
        return alpha * shrunk, (1 - alpha) * shrunk @ (alpha * covariance + known @ covariance) @ shrunk.mT

    return transition


class Approximation(NamedTuple):
    """``before(t, predicted)`` an update and ``after(predicted, updated)`` it: what is kept of the belief."""

    name: str
    before: Callable[[int, Belief], Belief] = lambda t, predicted: predicted
    after: Callable[[Belief, Belief], Belief] = lambda predicted, updated: updated


EXACT = Approximation("exact")


def init_state(batch: int, heads: int, columns: int, size: int, *, prior_variance: Tensor) -> Belief:
    """Mean 0 and independent elements; prior_variance, a tensor, broadcastable to [H, V, N], gives the dtype."""
    check_tensors(prior_variance=prior_variance)
    check_broadcast("prior_variance", prior_variance, (heads, columns, size), "H, V, N")
    variance = prior_variance.expand(heads, columns, size).expand(batch, heads, columns, size)
    return Belief(torch.zeros_like(variance), torch.diag_embed(variance))


def predict(state: Belief, matrix: Tensor, noise: Tensor) -> Belief:
    """The state transition."""
    return Belief((matrix @ state.mean[..., None])[..., 0], matrix @ state.covariance @ matrix.mT + noise)


def update(state: Belief, seen: Tensor, noise: Tensor, value: Tensor) -> Belief:
    """Bayes' rule for what one token sees."""
    shared = seen @ state.covariance  # H P
    gain = torch.linalg.solve(shared @ seen.mT + noise, shared).mT
    surprise = value[..., None] - seen @ state.mean[..., None]
    return Belief(state.mean + (gain @ surprise)[..., 0], state.covariance - gain @ shared)


def step(state: Belief, model: DesignModel, t: int, approximation: Approximation = EXACT) -> Belief:
    """Token t of the model: transition, write, and what the approximation keeps."""
    matrix, added = model.transition(t, state.covariance)
    check_tensors(**{"state.covariance": state.covariance, "transition's A": matrix, "transition's Q": added})
    predicted = predict(state, matrix, added)
    if predicted.covariance.shape != state.covariance.shape:
        found, expected = [*predicted.covariance.shape], [*state.covariance.shape]
        raise ValueError(f"transition: got a covariance {found}, expected {expected} as in the state")
    predicted = approximation.before(t, predicted)
    updated = update(predicted, model.seen[:, t], model.noise[:, t], model.value[:, t])
    return approximation.after(predicted, updated)


def readout(state: Belief, q: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance ``[B, H, V]`` of ``q.x``; q [B, H, V or 1, N]."""
    return (state.mean * q).sum(-1), ((state.covariance @ q[..., None])[..., 0] * q).sum(-1)


def scan(model: DesignModel, state: Belief, approximation: Approximation = EXACT) -> tuple[Tensor, Tensor, Belief]:
    """Token by token over ``[B, T, H, ...]``: read-out mean and variance ``[B, T, H, V]`` and the final belief."""
    check_inputs({name: x for name, x in model._asdict().items() if name != "transition"}, *state)
    means, variances = [state.mean[:, None, ..., 0][:, :0]], [state.mean[:, None, ..., 0][:, :0]]
    for t in range(model.query.shape[1]):
        state = step(state, model, t, approximation)
        mean, variance = readout(state, model.query[:, t])
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
