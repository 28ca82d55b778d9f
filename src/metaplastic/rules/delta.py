r"""The delta rule: write the residual, not the value.

    Mb  = diag(alpha_t) M_{t-1}                                         alpha_t = exp(g_t), g_t <= 0
    M_t = Mb + beta_t k_t (v_t - Mb^T k_t)^T
    y_t = M_t^T (scale q_t)

g = 0 is DeltaNet, a g_t per head Gated DeltaNet, a g_t per key KDA. It is the Bayesian Layer's filter with its
covariance reset to ``lambda I`` before every token, ``beta = lambda / (r^2 + lambda |k|^2)``: it corrects errors, but
does not remember which directions it has already learnt, so its read-out variance is that of a reset covariance.

Shapes: q, k [..., K]; v [..., V]; beta [...]; g [...] (per head) or [..., K] (per key); the dots are batch and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaState(NamedTuple):
    """The memory matrix ``[B, H, K, V]`` (batch, heads, key size, value size)."""

    mean: Tensor


State = DeltaState


def init_state(
    batch: int, heads: int, value_size: int, key_size: int, *, dtype: torch.dtype = torch.float32, device=None
) -> DeltaState:
    """An empty memory."""
    return DeltaState(torch.zeros(batch, heads, key_size, value_size, dtype=dtype, device=device))


def step(state: DeltaState, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> DeltaState:
    """Decay by ``exp(g)``, then correct the answer to k towards v by the share ``beta |k|^2``."""
    alpha = g.exp()[..., :, None] if g.dim() == k.dim() else g.exp()[..., None, None]
    mean = alpha * state.mean
    residual = v - (mean * k[..., :, None]).sum(-2)
    return DeltaState(mean + (beta[..., None] * k)[..., :, None] * residual[..., None, :])


def readout(state: DeltaState, q: Tensor) -> tuple[Tensor, Tensor]:
    """``M^T q [..., V]``, and ``|q|^2 [...]``: its variance under a covariance that is reset to the identity."""
    return (state.mean * q[..., :, None]).sum(-2), q.square().sum(-1)


def scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: DeltaState | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor, DeltaState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean ``[B, T, H, V]``, variance ``[B, T, H]``, final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], v.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(v[:, :0])], [torch.zeros_like(beta[:, :0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], v[:, t], beta[:, t], g[:, t])
        mean, variance = readout(state, q[:, t] * scale)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
