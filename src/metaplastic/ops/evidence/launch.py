"""Tensors in, tensors out: what :mod:`.kernels` are given."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# (a function under triton.jit is launched: kernel[grid](...))

import torch
from torch import Tensor

from ..contract import written_dtype
from ..rows import blocks, rows, strides
from . import kernels


def _options(values: int) -> dict[str, int]:
    return {"VALUES": values, **blocks(values)}


def forward(u: Tensor, e: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    w, beta = (torch.empty(u.shape, dtype=written_dtype(u, s), device=u.device) for _ in range(2))
    u, e = rows(u), rows(e)
    (tokens, heads), options = u.shape[:2], _options(u.shape[2])
    if w.numel():
        with torch.accelerator.device_index(u.device.index):
            kernels.forward_kernel[(-(-tokens // options["BT"]) * heads,)](
                u, e, s.detach().contiguous(), c.detach().contiguous(), w, beta, tokens, heads, *strides(u, e),
                **options,
            )  # fmt: skip
    return w, beta


def backward(dw: Tensor, d_beta: Tensor, u: Tensor, e: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Gradients of u, e, s and c, each in the dtype of its input."""
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, e, s)]
    dw, d_beta, u, e = (rows(x) for x in (dw, d_beta, u, e))
    (tokens, heads), options = u.shape[:2], _options(u.shape[2])
    programs = -(-tokens // options["BT"])  # of a head
    sums = torch.empty((programs, heads), dtype=torch.float32, device=u.device)
    if sums.numel():
        with torch.accelerator.device_index(u.device.index):
            kernels.backward_kernel[(programs * heads,)](
                dw, d_beta, u, e, s.detach().contiguous(), c.detach().contiguous(), *found, sums, tokens, heads,
                *strides(dw, d_beta, u, e), **options,
            )  # fmt: skip
    return *found, sums.sum(0).to(c.dtype)
