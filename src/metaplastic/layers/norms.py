"""Normalisation over the last axis."""

import torch
from torch import Tensor

from ..ops import l2
from ..ops.contract import compute_dtype, full_precision
from ..ops.transforms import transformed


def l2_normalize(x: Tensor, backend: str = "auto") -> Tensor:
    """``x / |x|`` over the last axis in float32; a zero vector stays zero and has a finite gradient.

    ``backend``: "auto", or "torch" for PyTorch's operations alone.
    """
    if x.dtype in l2.HALVES and not torch.compiler.is_compiling() and not transformed():
        return _HalfL2.apply(x, backend == "auto" and l2.runs(x))  # pyright: ignore[reportReturnType]
    return _step_by_step(x)


def _step_by_step(x: Tensor) -> Tensor:
    y = x.to(compute_dtype(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + l2.EPS)).to(x.dtype)


class _HalfL2(torch.autograd.Function):
    """The same without its steps in memory: float32 is within kernels, whose results are rounded as they are written.

    With s = 1 / |x|:   y = s x,   dx = s dy - s^3 (x . dy) x.   What is kept is x and, but for
    kernels (:mod:`metaplastic.ops.l2`), s, a number per vector.
    """

    @staticmethod
    def forward(ctx, x: Tensor, kernels: bool) -> Tensor:
        if kernels:
            ctx.save_for_backward(x, None)
            return l2.forward(x)
        with full_precision(x.device):
            size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            inverse = size.square_().add_(l2.EPS).rsqrt_()
            ctx.save_for_backward(x, inverse)
            return torch.mul(x, inverse, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in turn
            return torch.autograd.grad(_step_by_step(x), x, dy, create_graph=True)[0], None
        if inverse is None:
            return l2.backward(dy, x), None
        with full_precision(x.device):
            wide = x.float()
            along = (wide * dy).sum(-1, keepdim=True).mul_(inverse).mul_(inverse).mul_(inverse)
            return torch.addcmul(dy * inverse, wide, along, value=-1).to(x.dtype), None
