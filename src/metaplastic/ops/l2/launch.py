"""Tensors in, tensors out: what :mod:`.kernels` are given. Blocks follow from K alone: nothing is tuned."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# (a function under triton.jit is launched: kernel[grid](...))

import torch
from torch import Tensor

from ..rows import rows, strides
from . import EPS, kernels

BLOCK, WARPS = 4096, 8


def _run(kernel, given: list[Tensor], like: Tensor) -> Tensor:
    found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    given = [rows(x) for x in given]
    tokens, heads, width = given[0].shape
    columns = 1 << max(0, width - 1).bit_length()
    block = max(1, BLOCK // columns)
    if found.numel():
        with torch.accelerator.device_index(like.device.index):
            kernel[(-(-tokens // block) * heads,)](
                *given, found, tokens, heads, *strides(*given),
                EPS=EPS, WIDTH=width, BT=block, BK=columns, num_warps=WARPS,
            )  # fmt: skip
    return found


def forward(x: Tensor) -> Tensor:
    return _run(kernels.forward_kernel, [x], x)


def backward(dy: Tensor, x: Tensor) -> Tensor:
    return _run(kernels.backward_kernel, [dy, x], x)
