r"""Vectors of length 1 over the last axis of ``[B, T, H, K]``, in 16 bits:

    y = s x,  s = 1 / sqrt(|x|^2 + EPS)         dx = s dy - s^3 (x . dy) x

One kernel each way, float32 inside; nothing but x is kept.
"""

import torch
from torch import Tensor

from .. import fused
from ..contract import full_precision
from ..rows import BLOCK

EPS = 1e-6
HALVES = (torch.bfloat16, torch.float16)


def runs(x: Tensor) -> bool:
    """Whether the kernels take x."""
    fit = x.dim() == 4 and x.dtype in HALVES and 0 < x.shape[-1] <= BLOCK
    return fit and fused.reason_against("l2", x.device.type) is None


def forward(x: Tensor) -> Tensor:
    from . import launch

    with full_precision(x.device):
        return launch.forward(x)


def backward(dy: Tensor, x: Tensor) -> Tensor:
    from . import launch

    with full_precision(x.device):
        return launch.backward(dy, x)
