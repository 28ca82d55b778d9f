"""The CUDA backward pass: which of two ways an operator's backward goes, and the first of them.

bf16 inputs with one decay per head, one noise group and no gradient of the variance have kernels of their own, the five
steps of :mod:`metaplastic.ops.bayesian.parallel_backward`: ``backward_open.cu``; ``backward_mean.cu``, the recursion of
the means; ``backward_reads.cu`` and ``backward_source.cu``; ``backward_covariance.cu``, that of the covariances, or, of
more than 128 keys, ``backward_reach.cu`` and ``backward_step.cu`` in turn; ``backward_known.cu`` and
``backward_inputs.cu``. The kernel behind a recursion runs beside it, on the chunks that it has left.
``backward_careful.cu`` does in float64 what single chunks are before, between and after the recursions. Everything else
goes that module's way, in batched products of float32, with kernels for its recursions (``walk.py``) and for decays per
key (``key_decays.py``), and in float64 for chunks in which a token may be far less certain than its noise.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import nvrtc
from ..parallel_backward import Kernels, Saved, adjoint
from .key_decays import KernelDecay
from .problem import CHUNK, HELD, Rests, aligned, cut
from .walk import KernelWalk

FOLDER = Path(__file__).parent
LARGEST = 256  # keys and values that the kernels take
IN_ONE_BLOCK = HELD  # keys of which a block walks all of a covariance's gradient
CAREFUL_BLOCKS = 132  # of backward_careful.cu, each with a room of its own
SCALES = 20  # backward.cuh

Optional = Tensor | None


def backward(
    d_output: Tensor, d_variance: Optional, d_mean: Optional, d_covariance: Optional,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, process_noise: Tensor, observation_noise: Tensor, rotation: Optional,
    mean: Tensor, covariance: Tensor, means: Tensor, covariances: Tensor, whitenings: Tensor,
    offsets: Optional, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, g, both noises, rotation (empty without one), initial mean and covariance.

    ``means`` (transposed), ``covariances`` and ``whitenings`` are what :func:`.forward.forward` keeps.
    """
    inputs = (q, k, v, g, process_noise, observation_noise, rotation)
    if d_variance is None and has_kernels(*inputs):
        *found, d_mean, d_covariance = _Backward(*inputs[:6], means, covariances, whitenings, offsets, scale).run(
            d_output, d_mean, d_covariance, mean, covariance
        )
        return *found, q.new_empty(0), d_mean, d_covariance
    keys, values = mean.shape[-2], mean.shape[-1] // means.shape[2]
    saved = Saved(means.mT[..., :keys, :values], covariances[..., :keys, :keys], whitenings, turning=True)
    finals = d_output, d_variance, d_mean, d_covariance
    kernels = Kernels(KernelDecay, KernelWalk)
    found, *states = adjoint(*finals, inputs, mean, covariance, saved, offsets, scale, careful=True, kernels=kernels)
    return *(q.new_empty(0) if x is None else x for x in found), *states


def has_kernels(q, k, v, g, process_noise, observation_noise, rotation) -> bool:
    half = all(x.dtype == torch.bfloat16 for x in (q, k, v))
    alone = observation_noise.dim() == 3 or observation_noise.shape[3] == 1
    per_head = g.dim() == process_noise.dim() == 3 and rotation is None and alone
    return half and per_head and 0 < q.shape[3] <= LARGEST and 0 < v.shape[3] <= LARGEST


def _padded(size: int) -> int:
    return -(-size // 64) * 64 if size <= HELD else LARGEST


def _fit(x: Tensor, dtype: torch.dtype, *padding: int) -> Tensor:
    """As the kernels take it: of this type, padded with zeros, contiguous, aligned."""
    x = x.detach().to(dtype)
    return aligned(F.pad(x, padding) if any(padding) else x)


class _Backward:
    """One backward pass. Split matrices (backward.cuh) are two planes of 16 bits, as many words as numbers."""

    def __init__(self, q, k, v, g, process, observation, means, covariances, whitenings, offsets, scale):
        self.heads, keys, values = q.shape[2], q.shape[3], v.shape[3]
        self.keys, self.values = _padded(keys), _padded(values)
        self.given, self.scale, self.device = (q, k, v, g, process, observation), float(scale), q.device
        self.columns = 128 if self.keys <= HELD and self.values % 128 == 0 else 64  # MEAN_COLUMNS
        more, extra = self.keys - keys, self.values - values
        self.q, self.k = (_fit(x, torch.bfloat16, 0, more) for x in (q, k))
        self.v = _fit(v, torch.bfloat16, 0, extra)
        self.g, self.process, self.observation = (_fit(x, torch.float32) for x in (g, process, observation))
        length = q.shape[1]
        cuts = tuple(range(0, q.shape[0] * length + 1, length)) if length else (0,) * (q.shape[0] + 1)
        cuts = cuts if offsets is None else tuple(offsets.tolist())
        self.cut = cut(cuts, q.device)
        self.steps = max((-(-(end - start) // CHUNK) for start, end in itertools.pairwise(cuts)), default=0)
        chunks, more = means.shape[0], self.keys - covariances.shape[-1]
        self.rests = Rests.of(covariances, chunks) if covariances.shape[0] > chunks else (None, None)
        if more and self.rests[0] is not None:
            self.rests = _fit(self.rests[0], torch.int8, 0, more, 0, more), self.rests[1]
        covariances = covariances[:chunks]
        saved = (self.values, self.keys), (self.keys, self.keys), (CHUNK, CHUNK)
        self.means, self.covariances, self.whitenings = (
            _fit(x, torch.float32, 0, size[1] - x.shape[-1], 0, size[0] - x.shape[-2])
            for x, size in zip((means, covariances, whitenings), saved, strict=True)
        )

    def _kernel(self, name: str) -> Callable:
        return nvrtc.kernel(FOLDER, f"backward_{name}", self.device.index or 0, KEYS=self.keys, VALUES=self.values)

    def _launch(self, name: str, blocks: int, *arguments: Any, early: bool = False) -> None:
        if blocks:
            self._kernel(name)(blocks, *arguments, early=early)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.g.new_empty(shape, dtype=dtype)

    def _room(self, *words: int) -> tuple[Tensor, list[int]]:
        """Matrices of so many words, of every chunk and head: their addresses in one tensor, which takes the host less
        time than one for each."""
        slots = self.cut.chunks * self.heads
        room = self._new(slots * sum(words))
        return room, list(itertools.accumulate((4 * slots * n for n in words[:-1]), initial=room.data_ptr()))

    def _final(self, d: Tensor | None, *padding: int) -> Tensor | None:
        return None if d is None else _fit(d, torch.float32, *padding)

    def _careful(self, phase: int, d_output: Tensor, known: list, places: list, scales: int) -> None:
        """Chunks that 22 bits are too few for: before the recursions, between them, and after them."""
        most, per_key, per_value, per_token = (96, 3, 2, 3) if phase == 1 else (CAREFUL_BLOCKS, 8, 3, 5)
        rooms = min(self.cut.chunks * self.heads, most)
        size = CHUNK * (per_key * self.keys + per_value * self.values + per_token * CHUNK)
        self._launch(
            "careful", rooms, self.q, self.k, self.v, d_output, self.g, self.process, self.observation, self.means,
            self.covariances, *self.rests, self.whitenings, self.cut.table, *known, *places, scales,
            self._new(rooms, size, dtype=torch.float64), self.cut.chunks, self.heads, phase, self.scale,
        )  # fmt: skip

    def _walk(self, gain, closed, source, vectors, d_final, between, scales, d_initial) -> None:
        """The recursion of the covariances: in one kernel, or, of more keys than a block can hold, a chunk a launch."""
        keys, items, first, heads = self.keys, self.cut.sequences * self.heads, self.cut.first, self.heads
        if keys <= IN_ONE_BLOCK:
            self._launch(
                "covariance", items, gain, closed, source, self.covariances, vectors, d_final, first, between, scales,
                d_initial, heads,
            )  # fmt: skip
            return
        parts = keys // CHUNK
        reached, sources = self._new(2, items, CHUNK, keys)
        sums = self._new(items, 2, parts)
        if self.steps and (blocks := items * parts):
            reach, step = self._kernel("reach"), self._kernel("step")
            for n in range(self.steps):
                reach(
                    blocks, gain, source, self.covariances, scales, d_initial, first, reached, sources, sums, heads, n
                )
                step(
                    blocks, gain, closed, source, vectors, scales, reached, sources, sums, first, between, d_initial,
                    heads, n,
                )  # fmt: skip

    def run(self, d_output, d_mean, d_covariance, mean, covariance) -> tuple[Tensor, ...]:
        keys, values, heads, table = self.keys, self.values, self.heads, self.cut.table
        first, backwards = self.cut.first, self.cut.backwards
        wide, blocks, scale = max(keys, values), self.cut.chunks * heads, self.scale
        of_sequences, sizes = self.cut.sequences * heads, mean.shape[-2:]
        more, extra = keys - sizes[0], values - sizes[1]
        d_output = _fit(d_output, torch.bfloat16, 0, values - d_output.shape[-1])
        if d_covariance is not None:
            d_covariance = (d_covariance + d_covariance.mT).reshape(*mean.shape[:2], *covariance.shape[-2:]) / 2
        d_mean, d_covariance = self._final(d_mean, 0, extra, 0, more), self._final(d_covariance, 0, more, 0, more)
        in_one = keys <= IN_ONE_BLOCK
        d_first = self._new(*mean.shape[:2], keys, values)
        d_initial = self._new(*mean.shape[:2], keys, keys)
        if not in_one:
            d_initial.zero_() if d_covariance is None else d_initial.copy_(d_covariance)
        # What packed sequences leave out is zero; padding of K and V is cut off.
        outside = self.cut.tokens < self.q.shape[0] * self.q.shape[1]
        new = torch.zeros_like if outside else torch.empty_like
        rows, square = CHUNK * wide, CHUNK * CHUNK
        loops, (gain, closed) = self._room(CHUNK * keys, CHUNK * keys)
        kept, (read, innovation, weights, vectors, scales) = self._room(CHUNK * keys, rows, square, 5 * CHUNK, SCALES)
        self._launch(
            "open", blocks, self.q, self.k, self.v, self.g, self.process, self.observation, self.means,
            self.covariances, self.whitenings, table, gain, closed, read, innovation, weights, vectors, scales, heads,
            scale,
        )  # fmt: skip
        self._careful(0, d_output, [None] * 3, [gain, closed, read, innovation, weights, *[None] * 6], scales)
        states, (d_means,) = self._room(values * keys)
        gradients, (d_innovation, d_weights, products) = self._room(rows, square, square)
        dv = new(self.v)
        # A recursion leaves many multiprocessors to what follows it chunk by chunk, which is launched early: nothing
        # else may be launched between the two, and nothing be freed there that the recursion reads.
        self._launch(
            "mean", of_sequences * values // self.columns, gain, closed, read, d_output, vectors, scales, d_mean, table,
            first, d_means, d_innovation, d_first, heads,
        )  # fmt: skip
        self._launch(
            "reads", blocks, d_output, innovation, weights, self.whitenings, vectors, table, backwards, d_innovation,
            d_weights, products, dv, scales, heads, early=True,
        )  # fmt: skip
        source = read  # its room
        self._launch(
            "source", blocks, self.q, closed, d_weights, products, d_means, self.means, vectors, table, innovation,
            source, scales, heads, scale,
        )  # fmt: skip
        places = [gain, closed, source, innovation, None, d_weights, *[None] * 5]
        self._careful(1, d_output, [d_means, None, None], places, scales)
        between = weights
        rooms, size = min(of_sequences, CAREFUL_BLOCKS), keys * keys + 3 * CHUNK * keys + CHUNK * CHUNK
        self._launch(
            "careful_covariance", rooms, self.k, self.g, self.observation, self.covariances, *self.rests,
            self.whitenings, d_weights, gain, closed, source, innovation, d_covariance, table, first, between, scales,
            d_initial, self._new(rooms, size, dtype=torch.float64), self.cut.sequences, heads,
        )  # fmt: skip
        self._walk(gain, closed, source, vectors, d_covariance, between, scales, d_initial)
        self._launch(
            "known", blocks, self.q, self.k, self.whitenings, vectors, between, gain, table, backwards, d_weights,
            products, innovation, source, scales, heads, scale, early=in_one,
        )  # fmt: skip
        del loops
        found = [new(x) for x in (self.q, self.k, self.g, self.process, self.observation)]
        self._launch(
            "inputs", blocks, self.q, self.k, d_output, self.g, self.means, self.covariances, vectors, products,
            d_weights, innovation, source, d_innovation, scales, table, *found, heads, scale,
        )  # fmt: skip
        del gradients
        self._careful(2, d_output, [d_means, between, source], [*[None] * 6, *found], scales)
        del kept, states
        dq, dk, dg, d_process, d_observation = found
        found = [
            d[..., : x.shape[-1]].contiguous() if d.dim() == 4 else d.to(x.dtype).reshape(x.shape)
            for d, x in zip((dq, dk, dv, dg, d_process, d_observation), self.given, strict=True)
        ]
        if not in_one:
            d_initial = (d_initial + d_initial.mT) / 2
        d_initial = d_initial[..., : sizes[0], : sizes[0]].reshape(covariance.shape)
        return *found, d_first[..., : sizes[0], : sizes[1]].contiguous(), d_initial.contiguous()
