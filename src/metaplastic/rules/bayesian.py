r"""The Bayesian Layer's filter: a dense key covariance steers each write to what is still uncertain (arXiv 2605.31163).

The design model of one head: a memory ``S [K, V]`` that drifts, of which every token observes one direction,

    S_t | S_{t-1} ~ N(A_t S_{t-1}, diag(l_t^2))  per column,        v_t | S_t ~ N(S_t^T k_t, r_t^2 I)

and whose columns share one covariance P [K, K]. Its exact filter (Eqs. 9-13), from ``M = 0, P = prior_variance I``:

    predict    Mb = A M,  Pb = A P A^T + diag(l^2)
    gain       u = Pb k,  b = 1 / (r^2 + k^T u)                 k^T u b in [0, 1): how much of the residual is written
    update     M = Mb + b u (v - Mb^T k)^T,  P = Pb - b u u^T
    read-out   y = M^T (scale q),  var = (scale q)^T P (scale q)

``A = diag(exp(g)) Rot(theta)``: a decay per head (g [...]) or per key (g [..., K]), and with ``rotation`` a turn of the
key pairs (2j, 2j + 1), the real and imaginary part of a complex diagonal (then g may be [..., K / 2]). Groups of value
columns may have a noise of their own (observation_noise [..., G]): they share k, q and A and carry G covariances.
A padded token is g = 0, k = 0, process noise 0, rotation 0: an exact identity.

Noises are variances. Shapes: q, k [..., K]; v [..., V]; g and process_noise [...] or [..., K]; observation_noise [...]
or [..., G]; rotation [..., K / 2] radians; the dots are batch and heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class GaussianState(NamedTuple):
    """Mean ``[B, H, K, V]`` and key covariance ``[B, H, K, K]`` (``[B, H, G, K, K]`` with noise groups)."""

    mean: Tensor
    covariance: Tensor  # symmetric positive definite


State = GaussianState


def init_state(batch: int, heads: int, value_size: int, key_size: int, *, prior_variance: Tensor) -> GaussianState:
    """Mean 0 and covariance ``prior_variance I``; prior_variance ``[H]``, or ``[H, G]`` for G noise groups."""
    mean = prior_variance.new_zeros(batch, heads, key_size, value_size)
    identity = torch.eye(key_size, dtype=prior_variance.dtype, device=prior_variance.device)
    covariance = prior_variance[..., None, None] * identity
    return GaussianState(mean, covariance.expand(batch, *covariance.shape))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turns the pairs (2j, 2j + 1) of x's rows ``[..., K, n]`` by angle ``[..., K / 2]``."""
    real, imaginary = x.unflatten(-2, (-1, 2)).unbind(-2)
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    return torch.stack([cos * real - sin * imaginary, sin * real + cos * imaginary], -2).flatten(-3, -2)


def predict(state: GaussianState, g: Tensor, process_noise: Tensor, rotation: Tensor | None = None) -> GaussianState:
    """One step of the dynamics, before the token is observed."""
    mean, covariance = state
    key_size, groups = mean.shape[-2], covariance.dim() - mean.dim()  # groups: 1 if there is a group axis
    batch_dims = mean.dim() - 2
    if rotation is not None and g.dim() > batch_dims and g.shape[-1] != key_size:
        g = g.repeat_interleave(2, -1)
    decay = (g if g.dim() > batch_dims else g[..., None]).exp()
    noise = process_noise if process_noise.dim() > batch_dims else process_noise[..., None].expand_as(mean[..., 0])
    if rotation is not None:
        mean = rotate(mean, rotation)
        turn = rotation[..., None, :] if groups else rotation
        covariance = rotate(rotate(covariance, turn).mT, turn).mT
    spread = decay[..., :, None] * decay[..., None, :]
    added = torch.diag_embed(noise)
    if groups:
        spread, added = spread[..., None, :, :], added[..., None, :, :]
    return GaussianState(decay[..., :, None] * mean, spread * covariance + added)


def update(state: GaussianState, k: Tensor, v: Tensor, observation_noise: Tensor) -> GaussianState:
    """Bayes' rule for one observed token."""
    mean, covariance = state
    if covariance.dim() == mean.dim():  # one group
        mean, covariance = update(GaussianState(mean, covariance[..., None, :, :]), k, v, observation_noise[..., None])
        return GaussianState(mean, covariance[..., 0, :, :])
    direction = (covariance @ k[..., None, :, None])[..., 0]  # u [..., G, K]
    precision = 1 / (observation_noise + (direction * k[..., None, :]).sum(-1))  # b [..., G]
    gain = precision[..., None] * direction
    residual = v - (mean * k[..., :, None]).sum(-2)
    columns = residual.unflatten(-1, (precision.shape[-1], -1))  # [..., G, V / G]
    written = gain[..., :, None] * columns[..., None, :]  # [..., G, K, V / G]
    mean = mean + written.transpose(-3, -2).flatten(-2)
    return GaussianState(mean, covariance - gain[..., :, None] * direction[..., None, :])


def step(
    state: GaussianState,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    process_noise: Tensor,
    observation_noise: Tensor,
    rotation: Tensor | None = None,
) -> GaussianState:
    """Predict, then update with one token."""
    return update(predict(state, g, process_noise, rotation), k, v, observation_noise)


def readout(state: GaussianState, q: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean ``[..., V]`` and variance ``[...]`` (``[..., G]`` with groups) of ``S^T q``."""
    mean, covariance = state
    question = q[..., None, :] if covariance.dim() > mean.dim() else q
    variance = ((covariance @ question[..., None])[..., 0] * question).sum(-1)
    return (mean * q[..., :, None]).sum(-2), variance


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    process_noise: Tensor,
    observation_noise: Tensor,
    state: GaussianState,
    scale: float = 1.0,
    *,
    rotation: Tensor | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, GaussianState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean ``[B, T, H, V]``, variance, and the final state.

    ``project`` maps the covariance after every token: :func:`diagonal` and :func:`low_rank` are cheaper relatives.
    """
    means, variances = [torch.zeros_like(v[:, :0])], [torch.zeros_like(observation_noise[:, :0])]
    for t in range(q.shape[1]):
        turn = None if rotation is None else rotation[:, t]
        state = step(state, k[:, t], v[:, t], g[:, t], process_noise[:, t], observation_noise[:, t], turn)
        if project is not None:
            state = GaussianState(state.mean, project(state.covariance))
        mean, variance = readout(state, q[:, t] * scale)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state


def diagonal(covariance: Tensor) -> Tensor:
    """Forgets the correlations between keys. Depends on the basis of the keys."""
    return torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))


def low_rank(covariance: Tensor, rank: int) -> Tensor:
    """Keeps the ``rank`` best-known directions; all others get their average variance. Free of the keys' basis."""
    variances, directions = torch.linalg.eigh(covariance)  # ascending
    average = variances[..., rank:].mean(-1, keepdim=True).expand_as(variances[..., rank:])
    return (directions * torch.cat([variances[..., :rank], average], -1)[..., None, :]) @ directions.mT
