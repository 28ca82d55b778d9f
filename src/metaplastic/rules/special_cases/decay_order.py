"""Where Gated DeltaNet's decay stands in the residual: two orders, two design models.

    before it   S_t = alpha S_{t-1} + beta k (v - alpha S_{t-1} k)^T     drift, then observe (``rules.delta``)
    after it    S_t = alpha S_{t-1} + beta k (v - S_{t-1} k)^T           observe, then drift, with the gain beta / alpha

Both are filters whose covariance is reset before every observation, so both are special cases, of two design models.
"""

import torch
from torch import Tensor

from ..approximations import reset, restore
from ..design import Approximation, Belief, DesignModel, drift, regression
from .case import Answer, Inputs, scaled, start


def fixed(x: Inputs, keep: str) -> Approximation:
    """Precisions back to one prior per head after every token."""
    return restore(x.prior[:, None].expand_as(x.ridge), keep)


def strength(x: Inputs) -> Tensor:
    """The gain along k of one observation with precision ``weight`` on a memory at its prior."""
    return x.weight / (x.prior + x.weight * x.k.square().sum(-1))


def decay_last(x: Inputs) -> tuple[DesignModel, Belief, Approximation]:
    """Every token is seen before its decay: the transition carries the last token's, the query this token's."""
    before = scaled(torch.cat([0 * x.g[:, :1], x.g[:, :-1]], 1), x.k)
    process = torch.diag_embed(x.process[..., None].expand_as(x.k))
    model = regression(drift(before, process), x.g.exp()[..., None] * x.q, x.k, x.v, 1 / x.weight)
    return model, start(x, x.prior[:, None, None]), reset((1 / x.prior).expand_as(x.g))


def undecayed_residual(x: Inputs) -> Answer:
    """The second line above with beta = alpha strength, token by token; the final memory is that before its decay."""
    alpha, ys = x.g.exp(), []
    beta = alpha * strength(x)
    memory = torch.zeros_like(x.v[:, 0, :, :, None] * x.k[:, 0, :, None, :])
    for t in range(x.k.shape[1]):
        residual = x.v[:, t] - (memory * x.k[:, t, :, None]).sum(-1)
        written = (beta[:, t, :, None] * residual)[..., None] * x.k[:, t, :, None]
        memory = alpha[:, t, :, None, None] * memory + written
        ys.append((memory * x.q[:, t, :, None]).sum(-1))
    return Answer(torch.stack(ys, 1), memory / alpha[:, -1, :, None, None])
