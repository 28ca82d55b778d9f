r"""The adjoint of the chunk form with everything but two short recursions done for all chunks at once.

A chunk's closed loop Psi = last - U^T G, G = L^-1 Kg (``chunk.py``), sends entry states to final states as the filter
does, so that the gradients dM0, dP0 of a chunk's entry states follow from those of its final states, dM and dP, by

    dM0 = Psi^T dM + F^T dY,         F = Qg - Z G
    dP0 = Psi^T dP Psi + sym(G^T R), R = dZ^T Qg + last e dM^T - sym(tril(H)) G / 2,
          dZ = tril(dY e^T),  H = e (U dM)^T + (U dM + Z^T dY) e^T + dZ^T Z

without a factorisation or a solve. So there are five steps, of which the second and the fourth go chunk after chunk:
what the recursions need, dM, R, dP, and with both the gradients of every chunk (:meth:`Chunk.backward`).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...rules.bayesian import rotate
from ..chunks import budget
from .call import Call
from .chunk import Chunk, symmetric
from .frame import Frame


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

    def take(self, x: Tensor, chunks: slice) -> Tensor:
        taken = x.flatten(0, 1)[self.here(self.token[chunks])]
        if self.whole:
            return taken
        valid = self.here(self.valid[chunks])
        return taken.where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)

    def put(self, out: Tensor, chunks: slice, value: Tensor) -> None:
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

    def of(self, chunks: slice, angle: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        at = chunks if self.place is None else self.place[chunks]
        mean, covariance, whitening = (x[at].to(dtype) for x in (self.means, self.covariances, self.whitenings))
        if angle is not None:
            angle = angle[chunks, :, None]
            mean, covariance = rotate(mean, angle), rotate(rotate(covariance, angle).mT, angle)
        return [mean, covariance, whitening]


class _Tile:
    """Some chunks, in their frames, as the forward pass left them."""

    def __init__(
        self, plan: Call, table: Table, saved: list[Tensor], chunks: slice, d_output: Tensor, d_variance, refine: bool
    ):
        inputs = plan.take(chunks)  # type: ignore[arg-type]
        noise = inputs.observation_noise
        self.frame = Frame(inputs._replace(observation_noise=noise.where(noise > 0, 1)))  # beyond the end: 0
        self.chunk: Chunk = self.frame.enter(*saved, refine=refine)
        self.d_output = table.take(d_output, chunks).permute(0, 2, 3, 1, 4)
        self.d_variance = None if d_variance is None else table.take(d_variance, chunks).permute(0, 2, 3, 1)
        self.chunks = chunks

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """G, Qg and Z."""
        entered = self.frame.decay.entry * self.frame.q
        return self.chunk.whitening @ self.chunk.entered, entered, self.chunk._weights(entered, self.frame.q)

    def source(self, d_mean: Tensor) -> Tensor:
        """What the reads and the gradient of the final mean add to the gradient of the entry covariance."""
        chunk, (closed, entered, weights) = self.chunk, self.read()
        d_gain = chunk.innovation @ d_mean.mT
        d_innovation = chunk.gain @ d_mean + weights.mT @ self.d_output
        d_weights = (self.d_output @ chunk.innovation.mT) * chunk.lower
        added = 0
        if self.d_variance is not None:
            d_weights = d_weights - 2 * self.d_variance[..., None] * weights
            added = entered.mT @ (self.d_variance[..., None] * entered)
        products = chunk._mirrored(d_gain @ chunk.gain.mT + d_innovation @ chunk.innovation.mT + d_weights.mT @ weights)
        sent = d_weights.mT @ entered + self.frame.decay.last * d_gain - 0.5 * products @ closed
        return symmetric(closed.mT @ sent + added)


def adjoint(
    d_output: Tensor, d_variance: Tensor | None, d_mean: Tensor | None, d_covariance: Tensor | None,
    inputs: tuple[Any, ...], mean: Tensor, covariance: Tensor, saved: Saved, cu_seqlens: Tensor | None, scale: float,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor | None], Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, process noise, observation noise and rotation, of the initial mean and covariance.

    ``mean`` and ``covariance`` are the initial ones (only their shapes are read); ``dtype`` is that of products, if
    not the compute dtype; the rest is as in ``chunked.py``.
    """
    q, k, v, g, process_noise, observation_noise, rotation = inputs
    plan = Call(q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale, dtype)
    size = saved.whitenings.shape[-1]
    table = Table(q.shape[0], q.shape[1], plan.offsets, size, q.device)
    plan.chunks = table
    states = [
        x.new_zeros(x.shape) if d is None else d.to(x.dtype)
        for x, d in zip((mean, covariance), (d_mean, d_covariance), strict=True)
    ]
    state = [x.to(plan.dtype) for x in plan.split(*states)]
    state[1] = symmetric(state[1])
    if d_variance is not None:
        d_variance = (d_variance if plan.grouped else d_variance[..., None]).to(plan.dtype)
    d_output = d_output.to(plan.dtype).unflatten(-1, (plan.groups, -1))
    per_chunk = plan.heads * plan.groups * size * max(plan.keys, plan.values, 1)
    if g.dim() == 4:
        per_chunk *= size  # the pairwise decays of every key
    step = max(1, budget(q.device) // (1 if q.device.type == "cpu" else 16) // per_chunk)
    tiles = [slice(at, min(at + step, table.count)) for at in range(0, table.count, step)]

    before = table.angles(plan.rotation) if saved.turning and plan.rotation is not None else None

    refine = saved.whitenings.dtype != plan.dtype

    def tile(chunks: slice) -> _Tile:
        return _Tile(plan, table, saved.of(chunks, before, plan.dtype), chunks, d_output, d_variance, refine)

    def room(*shape: int) -> Tensor:
        return q.new_empty((table.count, plan.heads, plan.groups, *shape), dtype=plan.dtype)

    loop = [room(size, plan.keys), room(size, plan.keys)]  # U and G
    last = q.new_empty((table.count, plan.heads, 1, plan.keys), dtype=plan.dtype)
    angle = (
        None if plan.rotation is None else q.new_empty((table.count, plan.heads, 1, plan.keys // 2), dtype=plan.dtype)
    )
    d_means = room(plan.keys, plan.values // plan.groups)
    for chunks in tiles:
        part = tile(chunks)
        closed, entered, weights = part.read()
        loop[0][chunks], loop[1][chunks] = part.chunk.gain, closed
        last[chunks] = part.frame.decay.last[..., 0, :]
        if angle is not None and part.frame.angle is not None:
            angle[chunks] = part.frame.angle[..., -1, :]
        d_means[chunks] = (entered - weights @ closed).mT @ part.d_output
    walk = _Walk(table, loop[0], loop[1], last, angle)
    walk.means(state[0], d_means)
    d_covariances = room(plan.keys, plan.keys)
    for chunks in tiles:
        d_covariances[chunks] = tile(chunks).source(d_means[chunks])
    walk.covariances(state[1], d_covariances)
    del walk, loop
    grads: list[Tensor | None] = [None if x is None else x.new_zeros(x.shape) for x in inputs]
    for chunks in tiles:
        part = tile(chunks)
        final = d_means[chunks], d_covariances[chunks]
        d = part.chunk.backward(part.frame.q, part.d_output, part.d_variance, *final)
        found = part.frame.gradients(part.chunk, d, *final)
        found[0] = found[0] * scale
        if plan.paired:
            found[3] = found[3].unflatten(-1, (-1, 2)).sum(-1)
        for out, value in zip(grads, found, strict=True):
            if out is not None:
                plan.put(out, chunks, value)  # type: ignore[arg-type]
    d_mean, d_covariance = plan.join(state[0], state[1])
    return grads, d_mean.to(mean.dtype), d_covariance.to(mean.dtype)


class _Walk(NamedTuple):
    """The two recursions, from the last chunk of every sequence to its first."""

    table: Table
    gain: Tensor  # U [chunks, H, G, C, K]
    closed: Tensor  # G
    last: Tensor  # [chunks, H, 1, K]
    angle: Tensor | None

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
        return d if self.angle is None else rotate(d, -self.angle[at])
