"""Cutting sequences into chunks: one view of padded batches and packed sequences for every chunked backend.

A dense batch ``[B, T, ...]`` is cut along T. Packed sequences (``B = 1`` and offsets) are cut each from its own start:
chunk c holds the c-th piece of every sequence that is long enough, padded with zero tokens, which every rule treats
as the identity. The work is proportional to the number of tokens plus one chunk per sequence, whatever their lengths.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class Chunks:
    """``count`` chunks of at most ``size`` tokens; ``rows(c)`` are the sequences present in chunk c."""

    def __init__(self, batch: int, length: int, offsets: Tensor | None, size: int, device: torch.device):
        self.size, self.device = size, device
        # First token and length of every sequence, on the CPU: what is found there never makes the host wait.
        self.packed: tuple[Tensor, Tensor] | None = None
        if offsets is not None:
            lengths = offsets[1:] - offsets[:-1]
            self.packed = offsets[:-1], lengths
            length = int(lengths.max()) if lengths.numel() else 0
        elif batch == 0:
            length = 0
        self.count = -(-length // size)

    def rows(self, c: int) -> slice | Tensor:
        """Which rows of the state take part in chunk c."""
        if self.packed is None:
            return slice(None)
        return self._here((self.packed[1] > c * self.size).nonzero()[:, 0])

    def _here(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def _index(self, starts: Tensor, lengths: Tensor, c: int) -> tuple[Tensor, Tensor]:
        rows = (lengths > c * self.size).nonzero()[:, 0]
        position = c * self.size + torch.arange(self.size)
        valid = position < lengths[rows, None]
        return (starts[rows, None] + position).where(valid, 0), valid

    def take(self, x: Tensor, c: int) -> Tensor:
        """Chunk c of ``x [B, T, H, ...]``: ``[rows, size, H, ...]``, zero beyond the end of a packed sequence."""
        if self.packed is None:
            return x[:, c * self.size : (c + 1) * self.size]
        index, valid = map(self._here, self._index(*self.packed, c))
        return x[0][index].where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)

    def put(self, out: Tensor, c: int, value: Tensor) -> None:
        """Writes ``value`` (as :meth:`take` gives it) to its place in ``out [B, T, H, ...]``."""
        if self.packed is None:
            out[:, c * self.size : (c + 1) * self.size] = value
        else:
            index, valid = self._index(*self.packed, c)
            there = valid.flatten().nonzero()[:, 0]
            taken = value.flatten(0, 1)[self._here(there)]
            out[0][self._here(index.flatten()[there])] = taken.to(out.dtype)

    def walk_back(
        self, state: list[Tensor], advance: Callable[[int, list[Tensor]], list[Tensor]]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields every chunk, last first, with the state its rows enter it with.

        ``advance(c, entry)`` gives the state after chunk c. States are recomputed from about sqrt(count) checkpoints
        of ``state``, which is overwritten.
        """

        def run(first: int, last: int) -> list[list[Tensor]]:
            entries = []
            for c in range(first, last):
                rows = self.rows(c)
                entries.append([s[rows].clone() for s in state])
                for s, new in zip(state, advance(c, entries[-1]), strict=True):
                    s[rows] = new
            return entries

        span = max(16, math.isqrt(self.count))
        checkpoints = []
        for first in range(0, self.count, span):
            checkpoints.append((first, [s.clone() for s in state]))
            if first + span < self.count:
                run(first, first + span)
        for first, checkpoint in reversed(checkpoints):
            for s, saved in zip(state, checkpoint, strict=True):
                s.copy_(saved)
            entries = run(first, min(first + span, self.count))
            while entries:
                yield first + len(entries) - 1, entries.pop()


def budget(device: torch.device) -> int:
    """Elements of one array of what is computed at once: 2^21 on a CPU, where it should stay in the last cache, 2^26 on
    an accelerator (256 MB in float32)."""
    return 1 << (21 if device.type == "cpu" else 26)


def chunk_size(elements_per_token: int, device: torch.device, largest: int = 64) -> int:
    """Tokens per chunk such that one array of this many elements per token stays within :func:`budget`; at least 1, at
    most ``largest``."""
    return max(1, min(largest, budget(device) // max(1, elements_per_token)))


def segment_sums(g: Tensor) -> Tensor:
    """``g [..., C]`` -> ``[..., C, C]``: entry (t, s) is ``g_{s+1} + ... + g_t`` for s <= t, else -inf.

    A masked cumulative sum, never a difference of two sums: exact beside g = -1000, and -inf is allowed.
    """
    length = g.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=g.device).tril(-1)
    sums = g[..., :, None].expand(*g.shape, length).where(lower, 0).cumsum(-2)
    return sums.where(lower | torch.eye(length, dtype=torch.bool, device=g.device), -torch.inf)


def crossing_sums(terms: Tensor) -> Tensor:
    """``terms [..., t, s]`` -> ``[..., u]``: the sum over s < u <= t, what the decay of token u acts on.

    Products with triangles of ones: only sums, several times as fast as cumulative ones.
    """
    lower = torch.ones(terms.shape[-2:], dtype=terms.dtype, device=terms.device).tril()
    return (terms @ lower.mT.triu(1) * lower).sum(-2)
