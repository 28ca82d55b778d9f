r"""The adjoint of the chunk form with everything but two short recursions done for all chunks at once.

A chunk's closed loop Psi = last - U^T G, G = L^-1 Kg (``chunk.py``), sends entry states to final states as the filter
does, so that the gradients dM0, dP0 of a chunk's entry states follow from those of its final states, dM and dP, by

    dM0 = Psi^T dM + F^T dY,         F = Qg - Z G
    dP0 = Psi^T dP Psi + sym(G^T R), R = dZ^T Qg + last e dM^T - sym(tril(H)) G / 2,
          dZ = tril(dY e^T),  H = e (U dM)^T + (U dM + Z^T dY) e^T + dZ^T Z

without a factorisation or a solve. So there are five steps, of which the second and the fourth go chunk after chunk:
what the recursions need (:class:`Reads`), dM, R, dP, and with both every chunk's gradients (:class:`.adjoint.Adjoint`).
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules.bayesian import rotate
from ..chunks import budget
from .adjoint import Adjoint
from .call import Call
from .chunk import Chunk, symmetric
from .frame import Frame, turned_before
from .head_decay import HeadDecay
from .key_decay import KeyDecay

HARD = 32.0  # variance over noise above which a chunk is done in float64, as the kernels have it


class Table:
    """Every chunk of every sequence, sequence after sequence, and the tokens in it.

    Tokens are counted along B and T together; ``take`` and ``put`` are those of :class:`metaplastic.ops.chunks.Chunks`
    for a slice of chunks.
    """

    def __init__(self, batch: int, length: int, offsets: Tensor | None, size: int, device: torch.device):
        starts = torch.arange(batch) * length if offsets is None else offsets[:-1]
        lengths = torch.full((batch,), length) if offsets is None else offsets[1:] - offsets[:-1]
        self.size, self.device, self.dense = size, device, offsets is None
        self.counts = -(-lengths // size)
        self.first = self.counts.cumsum(0) - self.counts
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths)), self.counts)
        self.number = torch.arange(len(self.sequence)) - self.first[self.sequence]  # of a chunk in its sequence
        self.starts, self.lengths = starts, lengths
        self.even = self.dense and length % size == 0  # chunks are views

    @property
    def count(self) -> int:
        return len(self.sequence)

    @cached_property
    def valid(self) -> Tensor:
        return self._position() < self.lengths[self.sequence, None]

    @cached_property
    def token(self) -> Tensor:
        return (self.starts[self.sequence, None] + self._position()).where(self.valid, 0)

    def _position(self) -> Tensor:
        return self.number[:, None] * self.size + torch.arange(self.size)

    @cached_property
    def _there(self) -> tuple[Tensor, Tensor]:
        """The same where the inputs are."""
        return self.here(self.token), self.here(self.valid)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all tokens in chunks, where there and where in the inputs; how many there are before each chunk."""
        flat, before = self.valid.flatten(), F.pad(self.valid.sum(1), (1, 0)).cumsum(0)
        return self.here(flat.nonzero()[:, 0]), self.here(self.token.flatten()[flat]), before

    def here(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def _views(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unflatten(0, (self.count, self.size))

    def take(self, x: Tensor, chunks: slice | Tensor) -> Tensor:
        if self.even:
            return self._views(x)[chunks]
        token, valid = (y[chunks] for y in self._there)
        return x.flatten(0, 1)[token].where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)

    def put(self, out: Tensor, chunks: slice | Tensor, value: Tensor) -> None:
        if self.even:
            self._views(out)[chunks] = value.to(out.dtype)
            return
        if isinstance(chunks, slice):
            place, token, before = self._places
            first, end, _ = chunks.indices(self.count)
            some = slice(int(before[first]), int(before[end]))
            place, token = place[some] - first * self.size, token[some]
        else:
            valid = self.valid[chunks].flatten()
            place, token = (self.here(x) for x in (valid.nonzero()[:, 0], self.token[chunks].flatten()[valid]))
        out.flatten(0, 1).index_copy_(0, token, value.flatten(0, 1)[place].to(out.dtype))

    @cached_property
    def rounds(self) -> list[tuple[slice | Tensor, slice | Tensor]]:
        """The last chunks first: which sequences have a chunk of this number, and where these chunks are."""
        most = int(self.counts.max()) if len(self.counts) else 0
        if self.dense:
            return [(slice(None), slice(c, None, most)) for c in reversed(range(most))]
        found = []
        for c in reversed(range(most)):
            rows = (self.counts > c).nonzero()[:, 0]
            found.append((self.here(rows), self.here(self.first[rows] + c)))
        return found

    def angles(self, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """By how much keys have turned since the start of their sequence: before each chunk ``[chunks, H, K / 2]``, and
        at the end of every sequence ``[N, H, K / 2]``."""
        first = self.here(F.pad(self.first, (0, 1), value=self.count))
        return turned_before(self.take(rotation.double(), slice(0, self.count)).sum(1), first, self.here(self.sequence))

    def by_number(self) -> Tensor:
        """Where each chunk is in a list that has the first chunks of all sequences, then the second ones, and so on."""
        order = torch.argsort(self.number, stable=True)
        return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


class Saved(NamedTuple):
    """Of every chunk: entry mean ``[chunks, H, G, K, V / G]``, entry covariance ``[chunks, H, G, K, K]`` and L^-1
    ``[chunks, H, G, C, C]``."""

    means: Tensor
    covariances: Tensor
    whitenings: Tensor
    place: Tensor | None = None  # where each chunk is in them, if not in the order of :class:`Table`
    turning: bool = False  # the states are in a frame that turns with the keys since the sequence's start

    def of(self, chunks: slice | Tensor, dtype: torch.dtype) -> list[Tensor]:
        at = chunks if self.place is None else self.place[chunks]
        return [x[at].to(dtype) for x in (self.means, self.covariances, self.whitenings)]


class Some(NamedTuple):
    """Chunks done at once, and in which dtype."""

    chunks: slice | Tensor
    dtype: torch.dtype


class _Tile:
    """Some chunks, in their frames, as the forward pass left them."""

    def __init__(
        self, plan: Call, saved: Saved, before: Tensor | None, some: Some, d_output: Tensor, d_variance: Tensor | None,
        kernels: "Kernels",
    ):  # fmt: skip
        table, chunks, dtype = plan.chunks, some.chunks, some.dtype
        inputs = plan.take(chunks, dtype)
        self.turning = before is not None
        self.frame = Frame(inputs, kernels.decay_of(inputs.g), None if before is None else before[chunks])
        refine = saved.whitenings.dtype != dtype
        self.chunk: Chunk = self.frame.enter(*saved.of(chunks, dtype), refine=refine)
        self.d_output = table.take(d_output, chunks).to(dtype).permute(0, 2, 3, 1, 4)
        self.d_variance = None
        if d_variance is not None:
            self.d_variance = table.take(d_variance, chunks).to(dtype).permute(0, 2, 3, 1)

    def read(self) -> "Reads":
        chunk, frame = self.chunk, self.frame
        angle = None if frame.angle is None or self.turning else frame.angle[..., -1:, :]
        closed, weights = chunk.whitening @ chunk.entered, chunk.weights.mT
        return Reads(chunk.gain, closed, chunk.entered_q, weights, chunk.innovation, frame.decay.last, angle)


class Reads(NamedTuple):
    """Of chunks, what the recursions and their sources need, ``[chunks, H, G or 1, ...]``."""

    gain: Tensor  # U
    closed: Tensor  # G
    entered: Tensor  # Qg
    weights: Tensor  # Z
    innovation: Tensor  # e
    last: Tensor  # [..., 1, 1 or K]
    angle: Tensor | None  # [..., 1, K / 2], over the whole chunk, unless its frame is that of the next one

    def at(self, chunks: slice | Tensor) -> "Reads":
        return Reads(*(None if x is None else x[chunks] for x in self))  # type: ignore[arg-type]

    def of_mean(self, d_output: Tensor) -> Tensor:
        """F^T dY."""
        return (self.entered - self.weights @ self.closed).mT @ d_output

    def of_covariance(self, d_output: Tensor, d_variance: Tensor | None, d_mean: Tensor) -> Tensor:
        """What the reads and the gradient of the final mean add to the gradient of the entry covariance."""
        lower = self.weights.new_ones(self.weights.shape[-2:]).tril()
        d_gain = self.innovation @ d_mean.mT
        d_innovation = self.gain @ d_mean + self.weights.mT @ d_output
        d_weights = (d_output @ self.innovation.mT) * lower
        added = 0
        if d_variance is not None:
            d_weights = d_weights - 2 * d_variance[..., None] * self.weights
            added = self.entered.mT @ (d_variance[..., None] * self.entered)
        products = d_gain @ self.gain.mT + d_innovation @ self.innovation.mT + d_weights.mT @ self.weights
        products = products * lower + (products * lower.tril(-1)).mT
        sent = d_weights.mT @ self.entered + self.last * d_gain - 0.5 * products @ self.closed
        return symmetric(self.closed.mT @ sent + added)


def adjoint(
    d_output: Tensor, d_variance: Tensor | None, d_mean: Tensor | None, d_covariance: Tensor | None,
    inputs: tuple[Any, ...], mean: Tensor, covariance: Tensor, saved: Saved, cu_seqlens: Tensor | None, scale: float,
    careful: bool = False, kernels: "Kernels | None" = None,
) -> tuple[list[Tensor | None], Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, process noise, observation noise and rotation, of the initial mean and covariance.

    ``mean`` and ``covariance`` are the initial ones (only their shapes are read); ``careful``: chunks for which float32
    is too little, and with any of them the recursions, are done in float64; ``kernels``: what does better than batched
    products where it can; the rest is as in ``chunked.py``.
    """
    kernels = Kernels() if kernels is None else kernels
    q, k, v, g, process_noise, observation_noise, rotation = inputs
    plan = Call(q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale)
    size = saved.whitenings.shape[-1]
    plan.chunks = table = Table(q.shape[0], q.shape[1], plan.offsets, size, q.device)
    hard = torch.zeros(table.count, dtype=torch.bool)
    if careful and table.count and plan.dtype != torch.float64:
        hard = _hard(plan, saved, kernels).cpu()  # the host waits: what it starts depends on it
    wide = torch.float64 if hard.any() else plan.dtype
    states = [
        x.new_zeros(x.shape) if d is None else d.to(x.dtype)
        for x, d in zip((mean, covariance), (d_mean, d_covariance), strict=True)
    ]
    state = [x.to(wide) for x in plan.split(*states)]
    state[1] = symmetric(state[1])
    if d_variance is not None and not plan.grouped:
        d_variance = d_variance[..., None]
    d_output = d_output.unflatten(-1, (plan.groups, -1))
    before = None
    if saved.turning and plan.rotation is not None:
        before, ends = table.angles(plan.rotation)
        turn = -ends[:, :, None].to(wide)
        state = [rotate(state[0], turn), symmetric(rotate(rotate(state[1], turn).mT, turn))]

    def tile(some: Some) -> _Tile:
        return _Tile(plan, saved, before, some, d_output, d_variance, kernels)

    def room(*shape: int) -> Tensor:
        return q.new_empty((table.count, plan.heads, *shape), dtype=wide)

    keys, values, groups = plan.keys, plan.values // plan.groups, plan.groups
    d_means, reads, part, found = room(groups, values, keys).mT, None, None, None
    tiles = _tiles(plan, hard)
    for some in tiles:
        del part
        part = tile(some)
        found = part.read()
        d_means[some.chunks] = found.of_mean(part.d_output).to(wide)
        if len(tiles) == 1:
            reads = found
            break
        if reads is None:
            reads = Reads(*(None if x is None else room(*x.shape[2:]) for x in found))  # type: ignore[arg-type]
        for whole, x in zip(reads, found, strict=True):
            if whole is not None and x is not None:
                whole[some.chunks] = x.to(wide)
    kept = part if len(tiles) == 1 else None
    del part
    d_covariances = room(groups, keys, keys)
    if reads is not None:
        kind = kernels.walk if kernels.walk.takes(reads.gain, values, reads.angle) else Walk
        walk = kind(table, reads.gain, reads.closed, reads.last[..., 0, :], reads.angle)
        walk.means(state[0], d_means)
        for chunks, _ in tiles:
            dy = table.take(d_output, chunks).to(wide).permute(0, 2, 3, 1, 4)
            dv = None if d_variance is None else table.take(d_variance, chunks).to(wide).permute(0, 2, 3, 1)
            d_covariances[chunks] = reads.at(chunks).of_covariance(dy, dv, d_means[chunks])
        walk.covariances(state[1], d_covariances)
        del walk, reads, found
    grads: list[Tensor | None] = [None if x is None else x.new_zeros(x.shape) for x in inputs]
    for some in tiles:
        part = tile(some) if kept is None else kept
        kept = None
        final = d_means[some.chunks].to(some.dtype), d_covariances[some.chunks].to(some.dtype)
        inside = Adjoint(part.chunk, part.d_output, part.d_variance)
        inside.enter(*final)
        found = part.frame.gradients(inside)
        del part, inside, final
        found[0] = found[0] * scale
        if plan.paired:
            found[3] = found[3].unflatten(-1, (-1, 2)).sum(-1)
        for out, value in zip(grads, found, strict=True):
            if out is not None:
                plan.put(out, some.chunks, value)
    d_mean, d_covariance = plan.join(state[0], state[1])
    return grads, d_mean.to(mean.dtype), d_covariance.to(mean.dtype)


def _tiles(plan: Call, hard: Tensor) -> list[Some]:
    """All chunks, as many at once as the memory is for. If that is all, nothing is computed twice."""
    table, square = plan.chunks, plan.keys**2
    wide = table.size * max(plan.keys, plan.values)
    # About forty arrays [C, K] and ten [K, K], or, with a decay per head, half as many of the former.
    per_chunk = plan.heads * max(1, plan.groups * (square + (2 * wide if plan.inputs[3].shape[-1] > 1 else wide)) // 2)
    room = budget(table.device) // (1 if table.device.type == "cpu" else 2)

    def cut(chunks: Tensor | None, count: int, dtype: torch.dtype) -> list[Some]:
        step = max(1, room * 4 // dtype.itemsize // per_chunk)
        step = -(-count // -(-count // step)) if count else 1  # all as large
        parts = [slice(at, min(at + step, count)) for at in range(0, count, step)]
        return [Some(part if chunks is None else chunks[part], dtype) for part in parts]

    if not hard.any():
        return cut(None, table.count, plan.dtype)
    kinds = ((~hard, plan.dtype), (hard, torch.float64))
    return [some for where, dtype in kinds for some in cut(where.nonzero()[:, 0], int(where.sum()), dtype)]


def _hard(plan: Call, saved: Saved, kernels: "Kernels") -> Tensor:
    """Where a token may be far less certain than its noise, ``[chunks]``: then A is 1 + something large, and L^-1 takes
    large numbers from each other."""
    count = plan.chunks.count
    _, k, _, g, process, noise = plan.inputs
    k, g, process, noise = (
        plan.tokens(x, slice(0, count)).float().transpose(1, 2).contiguous() for x in (k, g, process, noise)
    )
    at = slice(0, count) if saved.place is None else saved.place  # there may be room for more
    most = saved.covariances.diagonal(dim1=-2, dim2=-1).amax(-1)[at]  # [chunks, H, G]
    if plan.rotation is not None and process.shape[-1] > 1:  # a pair's noises meet both of its keys
        process = process.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)
    decay = kernels.decay_of(g)(g) if g.shape[-1] > 1 else HeadDecay(g)
    squares = k.square()
    before = (squares * decay.entry.square()).sum(-1, keepdim=True)
    since = (squares * decay.gathered(process)).sum(-1, keepdim=True)
    ratio = (before * most[:, :, None] + since) / noise.where(noise > 0, torch.inf)  # [chunks, H, C, G]
    return (ratio > HARD).flatten(1).any(1)


class Walk:
    """The two recursions, from the last chunk of every sequence to its first.

    U and G ``[chunks, H, G, C, K]``; decays ``[chunks, H, 1, 1 or K]`` and angles ``[chunks, H, 1, 1, K / 2]`` of a
    whole chunk.
    """

    def __init__(self, table: Table, gain: Tensor, closed: Tensor, last: Tensor, angle: Tensor | None):
        self.table, self.gain, self.closed, self.last, self.angle = table, gain, closed, last, angle

    @classmethod
    def takes(cls, gain: Tensor, values: int, angle: Tensor | None) -> bool:
        """Whether these inputs can be walked."""
        return True

    def means(self, state: Tensor, sources: Tensor) -> None:
        """``state``: gradient of the final means -> of the initial ones. ``sources``: F^T dY -> dM."""
        for rows, at in self.table.rounds:
            d, source = self._turned(state[rows], at), sources[at].clone()
            sources[at] = d
            state[rows] = self.last[at][..., None] * d - self.closed[at].mT @ (self.gain[at] @ d) + source

    def covariances(self, state: Tensor, sources: Tensor) -> None:
        """The same of the covariances; ``sources``: sym(G^T R) -> dP."""
        for rows, at in self.table.rounds:
            d, source = self._turned(self._turned(state[rows], at).mT, at), sources[at].clone()
            sources[at] = d
            last, gain, closed = self.last[at], self.gain[at], self.closed[at]
            d = d * last[..., None, :] - (d @ gain.mT) @ closed
            state[rows] = symmetric(last[..., None] * d - closed.mT @ (gain @ d) + source)

    def _turned(self, d: Tensor, at: slice | Tensor) -> Tensor:
        return d if self.angle is None else rotate(d, -self.angle[at][..., 0, :])


class Kernels(NamedTuple):
    """What stands in for batched products where it can: decays per key within chunks, and the two recursions."""

    key_decay: type[KeyDecay] = KeyDecay
    walk: type[Walk] = Walk

    def decay_of(self, g: Tensor) -> type[KeyDecay]:
        return self.key_decay if self.key_decay.takes(g) else KeyDecay
