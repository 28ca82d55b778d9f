r"""Mesa: decaying statistics of a regression, solved when it is read (MesaNet, arXiv 2506.05233).

    G_t = alpha_t G_{t-1} + beta_t k_t v_t^T            [K, V]
    H_t = alpha_t H_{t-1} + beta_t k_t k_t^T            [K, K]         alpha_t = exp(g_t), one per head
    y_t = G_t^T (H_t + diag(ridge))^{-1} (scale q_t)

The read-out is the ridge regression over all tokens with weights ``beta_s exp(g_{s+1} + ... + g_t)``. Without decay it
is recursive least squares: the Bayesian Layer with ``A = I``, no process noise, ``r^2 = 1 / beta`` and prior variance
``1 / ridge``. With decay it is the exact model behind Palimpsa, where one beta serves all rows.

Shapes: q, k [..., K]; v [..., V]; beta, g [...]; ridge broadcastable to [..., K], > 0; the dots are batch and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class MesaState(NamedTuple):
    """Cross statistics ``[B, H, K, V]`` and key statistics ``[B, H, K, K]`` (batch, heads, key size, value size)."""

    cross: Tensor  # G
    keys: Tensor  # H, symmetric positive semi-definite


State = MesaState


def init_state(
    batch: int, heads: int, value_size: int, key_size: int, *, dtype: torch.dtype = torch.float32, device=None
) -> MesaState:
    """No evidence."""
    shape = (batch, heads, key_size)
    return MesaState(*(torch.zeros(*shape, n, dtype=dtype, device=device) for n in (value_size, key_size)))


def step(state: MesaState, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> MesaState:
    """Decay the statistics by ``exp(g)``, then add one token."""
    alpha = g.exp()[..., None, None]
    weighted = (beta[..., None] * k)[..., :, None]
    return MesaState(alpha * state.cross + weighted * v[..., None, :], alpha * state.keys + weighted * k[..., None, :])


def readout(state: MesaState, q: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """``G^T x [..., V]`` and ``q^T x [...]``, the posterior variance, with ``x = (H + diag(ridge))^{-1} q``."""
    factor = torch.linalg.cholesky(state.keys + torch.diag_embed(ridge.expand(q.shape)))
    solved = torch.cholesky_solve(q[..., None], factor)
    return (state.cross * solved).sum(-2), (solved[..., 0] * q).sum(-1)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    ridge: Tensor,
    state: MesaState | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, MesaState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean ``[B, T, H, V]``, variance ``[B, T, H]``, final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], v.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(v[:, :0])], [torch.zeros_like(beta[:, :0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], v[:, t], beta[:, t], g[:, t])
        mean, variance = readout(state, q[:, t] * scale, ridge)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
