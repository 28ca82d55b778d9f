"""Tensors in, tensors out: what :mod:`.kernels` are given. Blocks follow from K alone: nothing is tuned."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# (a function under triton.jit is launched: kernel[grid](...))

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels

PIECE = 1024  # tokens of a program of the sums


class Blocks(NamedTuple):
    """How many tokens and values a program has at a time, with all keys, and the warps that share them."""

    tokens: int
    values: int
    warps: int

    def options(self, keys: int) -> dict[str, int]:
        """Of a head of more than 128 keys fewer values: what a program adds up in stays in registers."""
        columns = max(16, 1 << (keys - 1).bit_length())  # a power of two
        rows = min(self.values, self.values * 128 // columns)
        return {"BT": self.tokens, "BV": max(16, rows), "BK": columns, "num_warps": self.warps}


SUMS = Blocks(tokens=32, values=64, warps=4)
GRADIENTS = Blocks(tokens=64, values=32, warps=4)


def _last_contiguous(x: Tensor) -> Tensor:
    """Other strides are as they come: k may be some columns of a wider matrix."""
    return x.detach() if x.stride(-1) == 1 or x.shape[-1] == 1 else x.detach().contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _flags(k: Tensor, left: Tensor, values: Sequence[Tensor]) -> dict[str, int]:
    sizes = {"KEYS": k.shape[-1], "VALUES": values[0].shape[-1]}
    return {"N": len(values), "EACH": left.shape[-1] > 1} | sizes


def sums(k: Tensor, left: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    k, left, *values = map(_last_contiguous, (k, left, *values))
    batch, length, heads, keys = k.shape
    size, pieces, options = values[0].shape[-1], max(1, -(-length // PIECE)), SUMS.options(keys)
    found = torch.empty((pieces, len(values), batch, heads, size, keys), dtype=left.dtype, device=left.device)
    if found.numel():
        with torch.accelerator.device_index(k.device.index):
            kernels.sums_kernel[(pieces, batch * heads, -(-size // options["BV"]))](
                k, left, values[0], values[-1], found, length, heads,
                *_strides(k, left, values[0], values[-1]), **_flags(k, left, values),
                PIECE=PIECE, **options,
            )  # fmt: skip
    return tuple(found.sum(0).unbind(0))


def gradients(of_sums: Sequence[Tensor], k: Tensor, left: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    k, left, *values = map(_last_contiguous, (k, left, *values))
    batch, length, heads, keys = k.shape
    options = GRADIENTS.options(keys)
    whole = torch.stack([*of_sums])
    high = whole.to(values[0].dtype)
    parts = torch.stack((high, (whole - high).to(high.dtype)))
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, left, *values)]
    if k.numel():
        with torch.accelerator.device_index(k.device.index):
            kernels.gradients_kernel[(-(-length // options["BT"]), batch * heads)](
                k, left, values[0], values[-1], parts, found[0], found[1], found[2], found[-1],
                length, heads,
                *_strides(k, left, values[0], values[-1]), **_flags(k, left, values),
                **options,
            )  # fmt: skip
    return tuple(found)
