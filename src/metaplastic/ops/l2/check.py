"""What vectors of length 1 are measured on (:mod:`..fused_accuracy`)."""

import torch
from torch import Tensor

from ..fused_accuracy import relative_errors
from . import EPS, HALVES, backward, forward

DTYPES = HALVES
CASES = (1, 5, 48, 96, 128, 200, 300)  # keys of a head


def example(width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Some columns of a wider matrix, with zero vectors, and the gradient of the output, with heads outside."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 37, 3, width + 2, generator=draw)
    wide[0, 3] = 0.0
    d = torch.randn(2, 3, 37, width, generator=draw)
    return wide.to(device, dtype)[..., :width], d.to(device, dtype).transpose(1, 2)


def exact(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """By PyTorch's operations in float64."""
    x = x.detach().double().requires_grad_()
    y = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    return {"output": y.detach(), "gradient of x": torch.autograd.grad(y, x, dy.double())[0]}


def measure(width: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Name -> error of the kernels."""
    x, dy = example(width, dtype, device)
    return relative_errors({"output": forward(x), "gradient of x": backward(dy, x)}, exact(*example(width, dtype)))
