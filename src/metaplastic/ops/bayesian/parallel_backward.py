r"""The adjoint of the chunk form with everything but two short recursions done for all chunks at once.

A chunk's closed loop Psi = last - U^T G, G = L^-1 Kg (``chunk.py``), sends entry states to final states as the filter
does, so that the gradients dM0, dP0 of a chunk's entry states follow from those of its final states, dM and dP, by

    dM0 = Psi^T dM + F^T dY,         F = Qg - Z G
    dP0 = Psi^T dP Psi + sym(G^T R), R = dZ^T Qg + last e dM^T - sym(tril(H)) G / 2,
          dZ = tril(dY e^T),  H = e (U dM)^T + (U dM + Z^T dY) e^T + dZ^T Z

without a factorisation or a solve. So there are five steps, of which the second and the fourth go chunk after chunk:
what the recursions need (:class:`Reads`), dM, R, dP, and with both every chunk's gradients (:class:`.adjoint.Adjoint`).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...rules.bayesian import rotate
from ..chunks import budget
from .adjoint import Adjoint
from .call import Call
from .chunk import Chunk, symmetric
from .frame import Frame

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
        position = self.number[:, None] * size + torch.arange(size)
        self.valid = position < lengths[self.sequence, None]
        self.token = (starts[self.sequence, None] + position).where(self.valid, 0)
        self.whole = bool(self.valid.all())

    @property
    def count(self) -> int:
        return len(self.sequence)

    def here(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def take(self, x: Tensor, chunks: slice | Tensor) -> Tensor:
        taken = x.flatten(0, 1)[self.here(self.token[chunks])]
        if self.whole:
            return taken
        valid = self.here(self.valid[chunks])
        return taken.where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)

    def put(self, out: Tensor, chunks: slice | Tensor, value: Tensor) -> None:
        there = self.valid[chunks].flatten().nonzero()[:, 0]
        taken = value.flatten(0, 1) if self.whole else value.flatten(0, 1)[self.here(there)]
        out.flatten(0, 1)[self.here(self.token[chunks].flatten()[there])] = taken.to(out.dtype)

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

    def angles(self, rotation: Tensor) -> Tensor:
        """By how much keys have turned before each chunk, since the start of its sequence: ``[chunks, H, K / 2]``."""
        of_chunks = self.take(rotation.double(), slice(0, self.count)).sum(1)
        before = of_chunks.cumsum(0) - of_chunks
        before = before - before[self.here(self.first[self.sequence])]
        return before.remainder(2 * math.pi).to(rotation.dtype)

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

    def of(self, chunks: slice | Tensor, angle: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        at = chunks if self.place is None else self.place[chunks]
        mean, covariance, whitening = (x[at].to(dtype) for x in (self.means, self.covariances, self.whitenings))
        if angle is not None:
            angle = angle[chunks, :, None]
            mean, covariance = rotate(mean, angle), rotate(rotate(covariance, angle).mT, angle)
        return [mean, covariance, whitening]


class Some(NamedTuple):
    """Chunks done at once, and in which dtype."""

    chunks: slice | Tensor
    dtype: torch.dtype


class _Tile:
    """Some chunks, in their frames, as the forward pass left them."""

    def __init__(
        self, plan: Call, saved: Saved, angle: Tensor | None, some: Some, d_output: Tensor, d_variance: Tensor | None
    ):
        table, chunks, dtype = plan.chunks, some.chunks, some.dtype
        inputs = plan.take(chunks, dtype)
        noise = inputs.observation_noise
        self.frame = Frame(inputs._replace(observation_noise=noise.where(noise > 0, 1)))  # beyond the end: 0
        refine = saved.whitenings.dtype != dtype
        self.chunk: Chunk = self.frame.enter(*saved.of(chunks, angle, dtype), refine=refine)
        self.d_output = table.take(d_output, chunks).to(dtype).permute(0, 2, 3, 1, 4)
        self.d_variance = None
        if d_variance is not None:
            self.d_variance = table.take(d_variance, chunks).to(dtype).permute(0, 2, 3, 1)

    def read(self) -> "Reads":
        chunk, frame = self.chunk, self.frame
        angle = None if frame.angle is None else frame.angle[..., -1:, :]
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
    angle: Tensor | None  # [..., 1, K / 2], over the whole chunk

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
    careful: bool = False,
) -> tuple[list[Tensor | None], Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, process noise, observation noise and rotation, of the initial mean and covariance.

    ``mean`` and ``covariance`` are the initial ones (only their shapes are read); ``careful``: chunks for which float32
    is too little, and with any of them the recursions, are done in float64; the rest is as in ``chunked.py``.
    """
    q, k, v, g, process_noise, observation_noise, rotation = inputs
    plan = Call(q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale)
    size = saved.whitenings.shape[-1]
    plan.chunks = table = Table(q.shape[0], q.shape[1], plan.offsets, size, q.device)
    hard = torch.zeros(table.count, dtype=torch.bool)
    if careful and table.count and plan.dtype != torch.float64:
        hard = _hard(plan, saved).cpu()  # the host waits: what it starts depends on it
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
    before = table.angles(plan.rotation) if saved.turning and plan.rotation is not None else None

    def tile(some: Some) -> _Tile:
        return _Tile(plan, saved, before, some, d_output, d_variance)

    def room(*shape: int) -> Tensor:
        return q.new_empty((table.count, plan.heads, *shape), dtype=wide)

    keys, values, groups = plan.keys, plan.values // plan.groups, plan.groups
    d_means, reads = room(groups, keys, values), None
    tiles = _tiles(plan, hard, 2)
    for some in tiles:
        part = tile(some)
        found = part.read()
        d_means[some.chunks] = found.of_mean(part.d_output).to(wide)
        if reads is None:
            reads = Reads(*(None if x is None else room(*x.shape[2:]) for x in found))  # type: ignore[arg-type]
        for whole, x in zip(reads, found, strict=True):
            if whole is not None and x is not None:
                whole[some.chunks] = x.to(wide)
        del part, found
    d_covariances = room(groups, keys, keys)
    if reads is not None:
        walk = _Walk(table, reads.gain, reads.closed, reads.last[..., 0, :], reads.angle)
        walk.means(state[0], d_means)
        for chunks, _ in tiles:
            dy = table.take(d_output, chunks).to(wide).permute(0, 2, 3, 1, 4)
            dv = None if d_variance is None else table.take(d_variance, chunks).to(wide).permute(0, 2, 3, 1)
            d_covariances[chunks] = reads.at(chunks).of_covariance(dy, dv, d_means[chunks])
        walk.covariances(state[1], d_covariances)
        del walk, reads
    grads: list[Tensor | None] = [None if x is None else x.new_zeros(x.shape) for x in inputs]
    for some in _tiles(plan, hard, 1):
        part = tile(some)
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


def _tiles(plan: Call, hard: Tensor, times: int) -> list[Some]:
    """All chunks, as many at once as the memory is for, or so many times as many."""
    table, square = plan.chunks, plan.keys**2
    wide = table.size * max(plan.keys, plan.values)
    # About forty arrays [C, K] and ten [K, K], or, with a decay per head, half as many of the former.
    per_chunk = plan.heads * max(1, plan.groups * (square + (2 * wide if plan.inputs[3].shape[-1] > 1 else wide)) // 2)
    room = times * budget(table.device) // (1 if table.device.type == "cpu" else 16)

    def cut(chunks: Tensor | None, count: int, dtype: torch.dtype) -> list[Some]:
        step = max(1, room * 4 // dtype.itemsize // per_chunk)
        parts = [slice(at, min(at + step, count)) for at in range(0, count, step)]
        return [Some(part if chunks is None else chunks[part], dtype) for part in parts]

    if not hard.any():
        return cut(None, table.count, plan.dtype)
    kinds = ((~hard, plan.dtype), (hard, torch.float64))
    return [some for where, dtype in kinds for some in cut(where.nonzero()[:, 0], int(where.sum()), dtype)]


def _hard(plan: Call, saved: Saved) -> Tensor:
    """Where a token may be far less certain than its noise, ``[chunks]``: then A is 1 + something large, and L^-1 takes
    large numbers from each other."""
    _, k, _, g, process, noise = (plan.chunks.take(x, slice(0, plan.chunks.count)) for x in plan.inputs)
    at = slice(0, plan.chunks.count) if saved.place is None else saved.place  # there may be room for more
    most = saved.covariances.diagonal(dim1=-2, dim2=-1).amax(-1)[at]  # [chunks, H, G]
    if plan.rotation is not None and process.shape[-1] > 1:  # a pair's noises meet both of its keys
        process = process.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)
    gathered, kept, step = process.expand(torch.broadcast_shapes(g.shape, process.shape)), (2 * g).exp(), 1
    while step < g.shape[1]:  # N_t = exp(2 g_t) N_{t-1} + noise_t, by doubling
        gathered = torch.cat([gathered[:, :step], gathered[:, step:] + kept[:, step:] * gathered[:, :-step]], 1)
        kept, step = torch.cat([torch.zeros_like(kept[:, :step]), kept[:, step:] * kept[:, :-step]], 1), 2 * step
    squares = k.float().square()
    before, since = (squares * (2 * g.cumsum(1)).exp()).sum(-1), (squares * gathered).sum(-1)
    least = noise.where(noise > 0, torch.inf)
    ratio = (before[..., None] * most[:, None] + since[..., None]) / least  # [chunks, C, H, G]
    return (ratio > HARD).flatten(1).any(1)


class _Walk(NamedTuple):
    """The two recursions, from the last chunk of every sequence to its first."""

    table: Table
    gain: Tensor  # U [chunks, H, G, C, K]
    closed: Tensor  # G
    last: Tensor  # [chunks, H, 1, K]
    angle: Tensor | None  # [chunks, H, 1, 1, K / 2]

    def means(self, state: Tensor, sources: Tensor) -> None:
        """``state``: gradient of the final means -> of the initial ones. ``sources``: F^T dY -> dM."""
        for rows, at in self.table.rounds():
            d, source = self._turned(state[rows], at), sources[at].clone()
            sources[at] = d
            state[rows] = self.last[at][..., None] * d - self.closed[at].mT @ (self.gain[at] @ d) + source

    def covariances(self, state: Tensor, sources: Tensor) -> None:
        """The same of the covariances; ``sources``: sym(G^T R) -> dP."""
        for rows, at in self.table.rounds():
            d, source = self._turned(self._turned(state[rows], at).mT, at), sources[at].clone()
            sources[at] = d
            last, gain, closed = self.last[at], self.gain[at], self.closed[at]
            d = d * last[..., None, :] - (d @ gain.mT) @ closed
            state[rows] = symmetric(last[..., None] * d - closed.mT @ (gain @ d) + source)

    def _turned(self, d: Tensor, at: slice | Tensor) -> Tensor:
        return d if self.angle is None else rotate(d, -self.angle[at][..., 0, :])
