"""All chunks of all sequences as one batch: what an accelerator computes at once instead of one chunk after another.

A *piece* is one chunk of one sequence. Sequences are ordered by length, longest first, and pieces by their place in
their sequence: first piece 0 of every sequence, then piece 1 of those that have one, and so on. So the pieces at place
c + 1 continue the first of those at place c, in the same order: whatever the lengths, a recurrence from piece to piece
is one operation on slices for every place (an elementwise one takes fewer: blocks of places run side by side), and
everything else is one batch.

Places are taken in groups whose pieces fit into memory together; one state of every sequence goes from group to group.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST = 12  # places that are cut into blocks: of fewer, one after another takes no more operations


class Pieces:
    """The pieces of ``[B, T, H, ...]``, or of packed sequences, of ``size`` tokens (fewer if no sequence is so long);
    at most ``most`` in a group, but at least one place."""

    def __init__(self, batch: int, length: int, offsets: Tensor | None, size: int, most: int, device: torch.device):
        self.device, self.most = device, most
        # First token and length of every sequence, and their order, on the CPU: nothing makes the host wait.
        self.packed: tuple[Tensor, Tensor, Tensor] | None = None
        if offsets is None:
            self.size = max(1, min(size, length))
            self.counts = [batch] * (-(-length // self.size) if batch else 0)
        else:
            lengths, order = (offsets[1:] - offsets[:-1]).sort(descending=True, stable=True)
            self.packed = offsets[:-1][order], lengths, order
            self.size = max(1, min(size, int(lengths[0]) if len(lengths) else 0))
            ends = torch.bincount(-(-lengths // self.size), minlength=1)  # how many sequences have this many pieces
            self.counts = ends.flip(0).cumsum(0).flip(0)[1:].tolist()

    def groups(self) -> list["Group"]:
        groups, first = [], 0
        while first < len(self.counts):
            last, pieces = first + 1, self.counts[first]
            while last < len(self.counts) and pieces + self.counts[last] <= self.most:
                pieces += self.counts[last]
                last += 1
            groups.append(Group(self, first, last))
            first = last
        return groups

    def walk_back(
        self, state: Tensor, advance: Callable[["Group", Tensor], object]
    ) -> Iterator[tuple["Group", Tensor]]:
        """Yields every group, last first, with the state before it (in the order of the pieces).

        ``advance(group, state)`` turns the state before the group into that after it, in place. Of more than 16 groups
        states are recomputed from about the square root of their number.
        """
        groups = self.groups()
        span = max(16, math.isqrt(len(groups)))
        spans, checkpoints = [groups[first : first + span] for first in range(0, len(groups), span)], []
        for members in spans:
            checkpoints.append(state)
            if members is not spans[-1]:
                state = state.clone()
                for group in members:
                    advance(group, state)
        for members in reversed(spans):
            before = [checkpoints.pop()]
            for group in members[:-1]:
                before.append(before[-1].clone())
                advance(group, before[-1])
            for group in reversed(members):
                yield group, before.pop()

    def ordered(self, state: Tensor) -> Tensor:
        """States ``[sequences, ...]`` in the order of the pieces; a copy."""
        if self.packed is None:
            return state.clone(memory_format=torch.contiguous_format)
        return state.index_select(0, self.packed[2].to(self.device, non_blocking=True))

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
        # Where every place has a piece of the same sequences, blocks of places can run side by side.
        self.in_blocks = len(self.counts) >= FEWEST and self.counts[0] == self.counts[-1]
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

    def scan(self, written: Tensor, kept: Tensor, state: Tensor, advance: Callable = torch.addcmul) -> Tensor:
        """What ``state <- advance(written, kept, state)`` gives every piece to enter with, ``[pieces, ...]``.

        ``advance`` as in ``addcmul``: ``written + kept x state``. ``state`` (of every sequence, in the order of the
        pieces) becomes the state after the group.
        """
        if advance is torch.addcmul and self.in_blocks:
            written, kept = (x.unflatten(0, (len(self.counts), -1)) for x in (written, kept))
            return _scan_blocks(written, kept, state[: self.counts[0]]).flatten(0, 1)
        entries = torch.empty_like(written)
        parts = [x.split(self.counts) for x in (written, kept, entries)]
        parts[2][0].copy_(state[: self.counts[0]])
        for place, (count, on) in enumerate(zip(self.counts, self.going_on, strict=True)):
            now = [x[place] for x in parts]
            if on:
                advance(*(x[:on] for x in now), out=parts[2][place + 1])
            if on < count:
                advance(*(x[on:] for x in now), out=state[on:count])
        return entries

    def scan_back(self, read: Tensor, kept: Tensor, d_state: Tensor, advance: Callable = torch.addcmul) -> Tensor:
        """The adjoint of :meth:`scan`: the gradient of the state after every piece, ``[pieces, ...]``.

        ``read``: the gradient that the piece itself gives its entry state. ``d_state``, the gradient of the states
        after the group, becomes that of the states before it.
        """
        if advance is torch.addcmul and self.in_blocks:
            read, kept = (x.unflatten(0, (len(self.counts), -1)).flip(0) for x in (read, kept))
            return _scan_blocks(read, kept, d_state[: self.counts[0]]).flip(0).flatten(0, 1)
        after = torch.empty_like(read)
        parts = [x.split(self.counts) for x in (read, kept, after)]
        for place, (count, on) in reversed(list(enumerate(zip(self.counts, self.going_on, strict=True)))):
            if on < count:
                parts[2][place][on:].copy_(d_state[on:count])
            if on:
                advance(*(x[place + 1] for x in parts), out=parts[2][place][:on])
        advance(*(x[0] for x in parts), out=d_state[: self.counts[0]])
        return after


def _scan_blocks(written: Tensor, kept: Tensor, state: Tensor) -> Tensor:
    """:meth:`Group.scan` of ``[places, sequences, ...]`` in about 2 sqrt(places) operations: blocks of places side by
    side, each as if nothing came before it, then from block to block, then what came before is added."""
    places = len(written)
    sizes = range(1, 2 * math.isqrt(places) + 1)
    inner = min(sizes, key=lambda size: size + places // size + 2 * (places % size))
    blocks = places // inner
    entries = torch.empty_like(written)
    added, factor, entry = (x[: blocks * inner].unflatten(0, (blocks, inner)) for x in (written, kept, entries))
    entry[:, 0].zero_()
    for i in range(inner - 1):
        torch.addcmul(added[:, i], factor[:, i], entry[:, i], out=entry[:, i + 1])
    ends = torch.addcmul(added[:, -1], factor[:, -1], entry[:, -1])
    held = factor.cumprod(1)
    entry[0, 0].copy_(state)
    for j in range(blocks):
        out = entry[j + 1, 0] if j + 1 < blocks else state
        torch.addcmul(ends[j], held[j, -1], entry[j, 0], out=out)
    entry[:, 1:].addcmul_(held[:, :-1], entry[:, :1])
    for place in range(blocks * inner, places):
        entries[place].copy_(state)
        torch.addcmul(written[place], kept[place], entries[place], out=state)
    return entries
