r"""The additive rule: a decaying sum of outer products, with no notion of certainty.

    S_t = diag(alpha_t) S_{t-1} + v_t k_t^T        alpha_t = exp(g_t), g_t <= 0, one per head or one per key
    y_t = S_t (scale q_t)

g = 0 is linear attention, a constant g per head RetNet, a scalar g_t per head the core of Mamba2 and Simple GLA,
a g_t per key GLA. It is Palimpsa's limit ``beta -> 0`` with unit prior (for another prior, ``v = w / prior``): writes
change the mean while the precision stays at the prior, so the read-out variance is ``|scale q|^2`` whatever was
written. That is the rule's defect in one line: it never gets surer of what it holds.

Shapes: q, k [..., K]; v [..., V]; g [...] (per head) or [..., K] (per key); the dots are batch and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AdditiveState(NamedTuple):
    """The memory matrix ``[B, H, V, K]`` (batch, heads, value size, key size)."""

    mean: Tensor


State = AdditiveState


def init_state(
    batch: int, heads: int, value_size: int, key_size: int, *, dtype: torch.dtype = torch.float32, device=None
) -> AdditiveState:
    """An empty memory."""
    return AdditiveState(torch.zeros(batch, heads, value_size, key_size, dtype=dtype, device=device))


def step(state: AdditiveState, k: Tensor, v: Tensor, g: Tensor) -> AdditiveState:
    """Decay by ``exp(g)`` (per head, or per key when g has k's shape), then add ``v k^T``."""
    alpha = g.exp()[..., None, :] if g.dim() == k.dim() else g.exp()[..., None, None]
    return AdditiveState(alpha * state.mean + v[..., :, None] * k[..., None, :])


def readout(state: AdditiveState, q: Tensor) -> tuple[Tensor, Tensor]:
    """``S q`` and its variance under the unit prior, which no write reduces. Both ``[..., V]``."""
    mean = (state.mean * q[..., None, :]).sum(-1)
    return mean, q.square().sum(-1, keepdim=True).expand_as(mean)


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: AdditiveState | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor, AdditiveState]:
    """Token by token over ``[B, T, H, ...]``: read-out mean and variance ``[B, T, H, V]`` and the final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], v.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(v[:, :0])], [torch.zeros_like(v[:, :0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], v[:, t], g[:, t])
        mean, variance = readout(state, q[:, t] * scale)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
