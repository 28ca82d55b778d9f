r"""Mean-field: the best belief with independent elements, re-fitted after every token (arXiv 2602.09075, App. A.5).

The model is that of :mod:`.gaussian`. Yesterday's belief about a row is ``N(mu, 1 / I)`` with a diagonal ``I``; after
forgetting its precision is ``D = alpha I + (1 - alpha) prior``, and today's exact posterior has the precision
``D + beta k k^T``. Among all Gaussians with a diagonal covariance the closest one, in ``KL(belief || posterior)``, has

    I_t  = D_t + beta_t k_t^2                                            the diagonal of that precision
    mu_t = (D_t + beta_t k_t k_t^T)^{-1} (alpha_t I_{t-1} mu_{t-1} + w_t k_t)        its mean, exactly

and Sherman-Morrison solves the coupled line in K operations per row:

    m_t  = alpha_t (I_{t-1} / D_t) mu_{t-1}
    mu_t = m_t + (k_t / D_t) (w_t - beta_t m_t.k_t) / (1 + beta_t sum(k_t^2 / D_t))

a delta rule whose learning rate is each element's own variance. Palimpsa has the same ``I_t``, but drops the coupling
before it solves for the mean: ``mu_t = (alpha_t I_{t-1} mu_{t-1} + w_t k_t) / I_t`` subtracts nothing that was already
known about k from the write. So the two share the read-out variance and differ in the mean alone. The price of the
coupling is that mu_t is no longer an elementwise scan.

Shapes: q, k [..., K]; w, beta [..., V]; g [...]; prior broadcastable to [...]; the dots are batch and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class MeanFieldState(NamedTuple):
    """The belief, ``[B, H, V, K]`` each (batch, heads, value size, key size)."""

    mean: Tensor
    excess_precision: Tensor  # I - prior, >= 0


State = MeanFieldState


def init_state(
    batch: int, heads: int, value_size: int, key_size: int, *, dtype: torch.dtype = torch.float32, device=None
) -> MeanFieldState:
    """The prior belief: mean 0, precision equal to the prior."""
    zeros = torch.zeros(batch, heads, value_size, key_size, dtype=dtype, device=device)
    return MeanFieldState(zeros, zeros.clone())


def step(state: MeanFieldState, k: Tensor, w: Tensor, beta: Tensor, g: Tensor, prior: Tensor) -> MeanFieldState:
    """Decay the evidence by ``exp(g)``, then write one token; unlike Palimpsa's, this step needs the prior."""
    alpha, key = g.exp()[..., None, None], k[..., None, :]
    floor = prior[..., None, None]
    decayed = alpha * state.excess_precision + floor
    mean = state.mean * (alpha * (state.excess_precision + floor) / decayed)
    gain = key / decayed
    surprise = w - beta * (mean * key).sum(-1)
    rate = surprise / (1 + beta * (gain * key).sum(-1))
    return MeanFieldState(
        mean + gain * rate[..., None], alpha * state.excess_precision + beta[..., :, None] * key.square()
    )


def readout(state: MeanFieldState, q: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance ``[..., V]`` of ``S q``; q [..., K], prior broadcastable to [...]."""
    mean = (state.mean * q[..., None, :]).sum(-1)
    variance = (q.square()[..., None, :] / (state.excess_precision + prior[..., None, None])).sum(-1)
    return mean, variance


def scan(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor,
    prior: Tensor,
    state: MeanFieldState | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, MeanFieldState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean and variance ``[B, T, H, V]`` and the final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], w.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(w[:, :0])], [torch.zeros_like(w[:, :0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], w[:, t], beta[:, t], g[:, t], prior)
        mean, variance = readout(state, q[:, t] * scale, prior)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
