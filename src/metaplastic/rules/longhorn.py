r"""Longhorn: an online regression step per value column (arXiv 2407.14207), exact and as published.

Every column ``i`` of the memory takes the implicit step ``argmin_s |s - s_{t-1}|^2 + beta_i (s^T k - v_i)^2``:

    exact        s_i += eta_i k (v_i - s_i^T k),          eta_i = beta_i / (1 + beta_i |k|^2)
    approximate  s_i  = (1 - eta_i k^2) s_i + eta_i v_i k      elementwise: k k^T replaced by its diagonal

The exact step is the Bayesian Layer's filter with its covariance reset to ``lambda I`` before every token and a noise
``r_i^2 = lambda / beta_i`` per column. The approximation is what runs as an elementwise scan; both agree on one-hot
keys. Neither forgets on its own.

Shapes: q, k [..., K]; v, beta [..., V], beta >= 0; the dots are batch and heads. Memory [..., K, V] as in ``delta``.
"""

import torch
from torch import Tensor

from .delta import DeltaState, init_state, readout

__all__ = ["State", "init_state", "readout", "scan", "step", "step_size"]

State = DeltaState


def step_size(k: Tensor, beta: Tensor) -> Tensor:
    """``eta [..., V]``."""
    return beta / (1 + beta * k.square().sum(-1, keepdim=True))


def step(state: DeltaState, k: Tensor, v: Tensor, beta: Tensor, *, approximate: bool = False) -> DeltaState:
    """One token; ``approximate`` is the published elementwise rule."""
    eta = step_size(k, beta)[..., None, :]
    if approximate:
        return DeltaState((1 - eta * k.square()[..., :, None]) * state.mean + eta * k[..., :, None] * v[..., None, :])
    residual = v - (state.mean * k[..., :, None]).sum(-2)
    return DeltaState(state.mean + eta * k[..., :, None] * residual[..., None, :])


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: DeltaState | None = None,
    scale: float = 1.0,
    *,
    approximate: bool = False,
) -> tuple[Tensor, Tensor, DeltaState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean ``[B, T, H, V]``, variance ``[B, T, H]``, final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], v.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(v[:, :0])], [torch.zeros_like(q[:, :0, :, 0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], v[:, t], beta[:, t], approximate=approximate)
        mean, variance = readout(state, q[:, t] * scale)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
