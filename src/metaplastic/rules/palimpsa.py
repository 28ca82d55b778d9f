r"""Palimpsa: every memory element carries its own precision (arXiv 2602.09075, Eq. 5).

One head holds a matrix ``S [V, K]`` of independent Gaussian elements with mean ``mu`` and precision ``I``.
The paper's recurrence

    I_t  = alpha_t I_{t-1} + (1 - alpha_t) prior + beta_t (x) k_t^2
    mu_t = (alpha_t I_{t-1} mu_{t-1} + (beta_t v_t) (x) k_t) / I_t

is kept in natural parameters, where both lines are affine with the same scalar decay:

    information       M = I mu          M_t = alpha_t M_{t-1} + w_t k_t^T            w_t = beta_t v_t
    excess precision  J = I - prior     J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T
    read-out                            y_t   = (M_t / (J_t + prior)) (scale q_t)
                                        var_t = (1   / (J_t + prior)) (scale q_t)^2

The write ``w`` is an input of its own, so that ``beta -> 0`` leaves a finite write: the memory is then the
additive rule with write ``w / prior`` (Mamba2's recurrence). ``alpha = exp(g)`` with ``g <= 0``; a padded
token is ``w = 0, beta = 0, g = 0``, an exact identity.

Shapes: q, k [..., K]; w, beta [..., V]; g [...]; prior broadcastable to [...]; the dots are batch and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PalimpsaState(NamedTuple):
    """Natural parameters of the memory, ``[B, H, V, K]`` each (batch, heads, value size, key size)."""

    information: Tensor  # M = precision * mean
    excess_precision: Tensor  # J = precision - prior, >= 0


State = PalimpsaState


def init_state(
    batch: int, heads: int, value_size: int, key_size: int, *, dtype: torch.dtype = torch.float32, device=None
) -> PalimpsaState:
    """The prior belief: mean 0, precision equal to the prior."""
    zeros = torch.zeros(batch, heads, value_size, key_size, dtype=dtype, device=device)
    return PalimpsaState(zeros, zeros.clone())


def step(state: PalimpsaState, k: Tensor, w: Tensor, beta: Tensor, g: Tensor) -> PalimpsaState:
    """Decay the evidence by ``exp(g)``, then write one token: k [..., K], w and beta [..., V], g [...]."""
    alpha = g.exp()[..., None, None]
    return PalimpsaState(
        alpha * state.information + w[..., :, None] * k[..., None, :],
        alpha * state.excess_precision + beta[..., :, None] * k.square()[..., None, :],
    )


def readout(state: PalimpsaState, q: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance ``[..., V]`` of ``S q``; q [..., K], prior broadcastable to [...]."""
    precision = state.excess_precision + prior[..., None, None]
    mean = ((state.information / precision) * q[..., None, :]).sum(-1)
    variance = (q.square()[..., None, :] / precision).sum(-1)
    return mean, variance


def scan(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor,
    prior: Tensor,
    state: PalimpsaState | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, PalimpsaState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean and variance ``[B, T, H, V]`` and the final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], w.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(w[:, :0])], [torch.zeros_like(w[:, :0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], w[:, t], beta[:, t], g[:, t])
        mean, variance = readout(state, q[:, t] * scale, prior)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
