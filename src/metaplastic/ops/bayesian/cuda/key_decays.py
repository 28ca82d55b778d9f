"""Decays per key within a chunk of 64 tokens as kernels: what :mod:`metaplastic.ops.bayesian.key_decay` does in halves
of halves. There a number for every pair and key would be too much memory; here none leaves the registers."""

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ... import nvrtc
from ..key_decay import Halves, KeyDecay
from .problem import CHUNK

FOLDER = Path(__file__).parent
LARGEST = 256  # keys
SCAN_THREADS = 128  # key_scan.cu
DEVICES = ("cuda",)


def _launch(name: str, blocks: int, like: Tensor, *arguments, **definitions: int) -> None:
    if blocks:
        nvrtc.kernel(FOLDER, name, like.device.index or 0, **definitions)(blocks, *arguments)


def _scan(g: Tensor, x: Tensor | None, kind: int) -> tuple[Tensor, Tensor | None]:
    items, keys = g.shape[:-2].numel(), g.shape[-1]
    first, second = torch.empty_like(g), torch.empty_like(g) if kind == 0 else None
    blocks = -(-items * keys // SCAN_THREADS)
    columns = 1 if x is None else x.shape[-1]
    _launch("key_scan", blocks, g, g, x, first, second, items, keys, columns, GATHERED=kind)
    return first, second


def ends(g: Tensor) -> tuple[Tensor, Tensor]:
    """Decays from the chunk's start to each token, and from there to its end."""
    entry, tail = _scan(g, None, 0)
    assert tail is not None
    return entry, tail


def gathered(g: Tensor, noise: Tensor) -> Tensor:
    return _scan(g, noise.contiguous(), 1)[0]


def pairs(both: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """``R[t, s] <x_t, y_s>`` at ``[..., s, t]`` of two times 64 tokens x; noise groups share g."""
    keys, items = y.shape[-1], y.shape[:-2].numel()
    found = y.new_empty(*y.shape[:-1], 2 * CHUNK)
    groups = items // max(1, g.shape[:-2].numel())
    _launch("key_pairs", items, y, both.contiguous(), y.contiguous(), g, found, keys, groups, KEYS=_padded(keys))
    return found


def _padded(keys: int) -> int:
    return 64 if keys <= 64 else 128 if keys <= 128 else LARGEST


class KernelDecay(KeyDecay):
    """g ``[..., C, K]``. Products that have no kernel here are done in halves."""

    missing = 0  # CHUNK is a power of two

    @classmethod
    def takes(cls, g: Tensor) -> bool:
        return g.dtype == torch.float32 and g.shape[-2] == CHUNK and g.shape[-1] <= LARGEST and g.device.type in DEVICES

    def __init__(self, g: Tensor):
        self.g, self.length = g.contiguous(), g.shape[-2]
        self.entry, self.tail = ends(self.g)
        self.last = self.entry[..., -1:, :]

    @cached_property
    def levels(self) -> list[Halves]:
        return KeyDecay(self.g).levels

    def crossed(self, y: Tensor, x: Tensor) -> Tensor:
        return pairs(x, y, self.g)

    def crossed_gradients(self, d: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        d, y, x = d.contiguous(), y.contiguous(), x.contiguous()
        keys, items = y.shape[-1], y.shape[:-2].numel()
        groups = items // max(1, self.g.shape[:-2].numel())
        d_y, d_x = torch.empty_like(y), torch.empty_like(x)
        _launch("key_pairs_back", items, y, d, x, y, self.g, d_x, d_y, keys, groups, KEYS=_padded(keys))
        return d_y, d_x

    def gathered(self, noise: Tensor) -> Tensor:
        return gathered(self.g, noise)

    def scattered(self, d_gathered: Tensor) -> Tensor:
        return _scan(self.g, d_gathered.contiguous(), 2)[0]

    def of_pairs(self) -> "KernelDecay":
        return KernelDecay(self.g[..., ::2])
