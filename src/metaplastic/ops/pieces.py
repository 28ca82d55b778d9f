"""All chunks of all sequences as one batch: what an accelerator computes at once instead of one chunk after another.

A *piece* is one chunk of one sequence. Sequences are ordered by length, longest first, and pieces by their place in
their sequence: first piece 0 of every sequence, then piece 1 of those that have one, and so on. So the pieces at place
c + 1 continue the first of those at place c, in the same order: whatever the lengths, a recurrence from piece to piece
is one operation on slices for every place, and everything else is one batch.

Places are taken in groups whose pieces fit into memory together; one state of every sequence goes from group to group.
"""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class Pieces:
    """The pieces of ``[B, T, H, ...]``, or of packed sequences, of ``size`` tokens; at most ``most`` in a group
    (at least one place of all its sequences)."""

    def __init__(self, batch: int, length: int, offsets: Tensor | None, size: int, most: int, device: torch.device):
        self.size, self.device = size, device
        # First token and length of every sequence, and their order, on the CPU: nothing makes the host wait.
        self.packed: tuple[Tensor, Tensor, Tensor] | None = None
        if offsets is None:
            self.counts = [batch] * (-(-length // size) if batch else 0)
        else:
            lengths, order = (offsets[1:] - offsets[:-1]).sort(descending=True, stable=True)
            self.packed = offsets[:-1][order], lengths, order
            ends = torch.bincount(-(-lengths // size), minlength=1)  # how many sequences have this many pieces
            self.counts = ends.flip(0).cumsum(0).flip(0)[1:].tolist()
        self.most = most

    def groups(self) -> Iterator["Group"]:
        first = 0
        while first < len(self.counts):
            sums = itertools.accumulate(self.counts[first:])
            last = first + max(1, sum(1 for _ in itertools.takewhile(lambda n: n <= self.most, sums)))
            yield Group(self, first, last)
            first = last

    def ordered(self, state: Tensor) -> Tensor:
        """States ``[sequences, ...]`` in the order of the pieces; a copy."""
        if self.packed is None:
            return state.clone(memory_format=torch.contiguous_format)
        return state[self.packed[2].to(self.device, non_blocking=True)]

    def restored(self, state: Tensor) -> Tensor:
        """The inverse of :meth:`ordered`."""
        if self.packed is None:
            return state
        return torch.empty_like(state).index_copy_(0, self.packed[2].to(self.device, non_blocking=True), state)


class Group:
    """The pieces at the places from ``first`` up to ``last``."""

    def __init__(self, pieces: Pieces, first: int, last: int):
        self.size, self.first, self.last = pieces.size, first, last
        self.counts = pieces.counts[first:last]
        # How many sequences have a piece at this place and one at the next place of the group.
        self.going_on = [*self.counts[1:], 0]
        self.index = self.there = self.valid = None
        if pieces.packed is None:
            return
        starts, lengths, _ = pieces.packed
        counts = torch.tensor(self.counts)
        row = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        place = torch.arange(first, last).repeat_interleave(counts)
        position = (place * self.size)[:, None] + torch.arange(self.size)
        valid = position < lengths[row, None]
        index = (starts[row, None] + position).where(valid, 0)
        there = valid.flatten().nonzero()[:, 0]  # the slots that hold a token, and below which token
        move = (index, valid, there, index.flatten()[there])
        self.index, self.valid, self.there, self.tokens = (x.to(pieces.device, non_blocking=True) for x in move)

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The pieces of ``x [B, T, H, ...]``: ``[pieces, H, size, ...]``, laid out anew, zero beyond the end of a
        sequence."""
        if self.index is not None and self.valid is not None:
            valid = self.valid.view(*self.valid.shape, *[1] * (x.dim() - 2))
            cut = x[0][self.index].where(valid, 0).transpose(1, 2)
        else:
            places = self.last - self.first
            x = x[:, self.first * self.size : self.last * self.size]
            if missing := places * self.size - x.shape[1]:
                x = F.pad(x, (*[0] * (2 * x.dim() - 4), 0, missing))
            cut = x.unflatten(1, (places, self.size)).movedim(1, 0).transpose(2, 3)
        out = torch.empty(cut.shape, dtype=dtype, device=x.device).copy_(cut)
        return out if self.index is not None else out.flatten(0, 1)

    def put(self, out: Tensor, value: Tensor) -> None:
        """Writes ``value`` (as :meth:`take` gives it) to its place in ``out [B, T, H, ...]``."""
        value = value.transpose(1, 2)  # [pieces, size, H, ...]
        if self.there is not None:
            out[0].index_copy_(0, self.tokens, value.flatten(0, 1)[self.there].to(out.dtype))
            return
        value = value.unflatten(0, (self.last - self.first, len(out)))
        window = out[:, self.first * self.size : self.last * self.size]
        whole, rest = divmod(window.shape[1], self.size)
        window[:, : whole * self.size].unflatten(1, (whole, self.size)).copy_(value[:whole].movedim(0, 1))
        if rest:
            window[:, whole * self.size :] = value[whole, :, :rest]

    def scan(self, written: Tensor, kept: Tensor, state: Tensor) -> Tensor:
        """What ``state <- kept x state + written`` gives every piece to enter with, ``[pieces, ...]``.

        ``state`` (of every sequence, in the order of the pieces) becomes the state after the group.
        """
        entries = torch.empty_like(written)
        parts = [x.split(self.counts) for x in (written, kept, entries)]
        parts[2][0].copy_(state[: self.counts[0]])
        for place, (count, on) in enumerate(zip(self.counts, self.going_on, strict=True)):
            now = [x[place] for x in parts]
            if on:
                torch.addcmul(*(x[:on] for x in now), out=parts[2][place + 1])
            if on < count:
                torch.addcmul(*(x[on:] for x in now), out=state[on:count])
        return entries

    def scan_back(self, read: Tensor, kept: Tensor, d_state: Tensor) -> Tensor:
        """The adjoint of :meth:`scan`: the gradient of the state after every piece, ``[pieces, ...]``.

        ``read``: the gradient that the piece itself gives its entry state. ``d_state``, the gradient of the states
        after the group, becomes that of the states before it.
        """
        after = torch.empty_like(read)
        parts = [x.split(self.counts) for x in (read, kept, after)]
        for place, (count, on) in reversed(list(enumerate(zip(self.counts, self.going_on, strict=True)))):
            if on < count:
                parts[2][place][on:].copy_(d_state[on:count])
            if on:
                torch.addcmul(*(x[place + 1] for x in parts), out=parts[2][place][:on])
        torch.addcmul(*(x[0] for x in parts), out=d_state[: self.counts[0]])
        return after
