"""Tensors in, tensors out: what :mod:`.kernels` are given."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# (a function under triton.jit is launched: kernel[grid](...))

import torch
from torch import Tensor

from ..rows import blocks, rows, strides
from . import EPS, kernels


def _run(kernel, given: list[Tensor], like: Tensor) -> Tensor:
    found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    given = [rows(x) for x in given]
    tokens, heads, width = given[0].shape
    options = blocks(width)
    if found.numel():
        with torch.accelerator.device_index(like.device.index):
            kernel[(-(-tokens // options["BT"]) * heads,)](
                *given, found, tokens, heads, *strides(*given), EPS=EPS, WIDTH=width, **options
            )
    return found


def forward(x: Tensor) -> Tensor:
    return _run(kernels.forward_kernel, [x], x)


def backward(dy: Tensor, x: Tensor) -> Tensor:
    return _run(kernels.backward_kernel, [dy, x], x)
