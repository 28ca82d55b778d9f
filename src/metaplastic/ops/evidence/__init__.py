r"""What a metaplastic memory is given of a token's values, of one strength s per head: the write and its evidence.

    w = u s,   beta = sigmoid(e) c s

u, e    [B, T, H, V]    values, and the evidence before its sigmoid
s       [B, T, H, 1]    strength
c       [H]             scale of the evidence

with the gradients

    du = dw s                           de = dbeta c s sigmoid(e) (1 - sigmoid(e))
    ds = sum_v dw u + c dbeta sigmoid(e)            dc = sum_{b,t,v} dbeta s sigmoid(e)

``triton``, for u and e in 16 bits on a GPU, is one kernel each way: nothing between is written to memory or rounded.
``torch``, for all else, are PyTorch's operations, which torch.compile fuses, and which torch.func and derivatives of
derivatives see through.
"""

import torch
from torch import Tensor

from .. import fused
from ..contract import full_precision
from ..rows import BLOCK
from ..transforms import transformed
from . import plain

HALVES = (torch.bfloat16, torch.float16)


def choose(u: Tensor, e: Tensor, s: Tensor, c: Tensor) -> str:
    """The backend of these inputs, "triton" or "torch"."""
    fit = u.dtype == e.dtype and u.dtype in HALVES and 0 < u.shape[-1] <= BLOCK
    fit = fit and u.shape == e.shape and s.shape == (*u.shape[:-1], 1) and c.shape == u.shape[2:3]
    if torch.compiler.is_compiling() or not fit or transformed():
        return "torch"
    return "triton" if fused.reason_against("evidence", u.device.type) is None else "torch"


def write_and_evidence(u: Tensor, e: Tensor, s: Tensor, c: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """w ``[B, T, H, V]`` and beta, in bfloat16 where u and e are, else in the wider dtype of u and s, and e and s."""
    if (choose(u, e, s, c) if backend == "auto" else backend) == "torch":
        return plain.write_and_evidence(u, e, s, c)
    return _Fused.apply(u, e, s, c)  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(ctx, u: Tensor, e: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        from .launch import forward  # Triton is imported when a kernel first runs

        ctx.save_for_backward(u, e, s, c)
        with full_precision(u.device):
            return forward(u, e, s, c)

    @staticmethod
    def backward(ctx, dw: Tensor, d_beta: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated in turn
            pairs = zip(plain.write_and_evidence(*inputs), (dw, d_beta), strict=True)
            found, given = zip(*((y, d) for y, d in pairs if y.requires_grad), strict=True)
            wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=True) if needed]
            each = iter(torch.autograd.grad(found, wanted, given, create_graph=True, allow_unused=True))
            return tuple(next(each) if needed else None for needed in ctx.needs_input_grad)
        from .launch import backward

        with full_precision(dw.device):
            return backward(dw, d_beta, *inputs)
