"""The chunked backend: the exact chunk form (``chunk.py``) in plain PyTorch, on any device, chunk after chunk.

For the backward pass the entry state of every chunk is kept, and its inverse Cholesky factor if that is as exact as the
products are; all else is recomputed: on a CPU chunk after chunk, elsewhere, where starting small kernels is what takes
long, in the batched products of :mod:`metaplastic.ops.bayesian.parallel_backward`.

On a CPU heads are shared out among threads (:mod:`.threads`), and all products are float64: float32 is too little where
a token is far less certain than its noise or far more certain than the least certain key is, and which tokens those are
must not decide how other ones are rounded.
"""

from typing import Any

import torch
from torch import Tensor

from ...rules import bayesian as rule
from ..chunks import Chunks, budget, chunk_size
from ..contract import compute_dtype, full_precision
from . import check_values
from .adjoint import Adjoint
from .call import Call
from .chunk import ALL, symmetric
from .custom import differentiable
from .frame import Frame
from .parallel_backward import Saved, Table, adjoint
from .threads import side_by_side

Optional = Tensor | None
SMALL = 3 << 12  # elements of one array of a chunk on a CPU, 96 KiB in float64
GROUP = 1 << 15  # of one array of all chunks that are done at once there
ENOUGH = 256  # rows x heads x keys


class Plan(Call):
    """A call, and how it is cut into chunks one after another."""

    def __init__(
        self, q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale, size: int | None = None
    ):
        super().__init__(q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale)
        size = self.size(self.rows, self.heads, self.keys, q.device) if size is None else size
        self.chunks = Chunks(q.shape[0], q.shape[1], self.offsets, size, q.device)
        self.work, self.device = _work(q), q.device
        self.given, self.cu_seqlens = (q, k, v, g, process_noise, observation_noise, rotation), cu_seqlens
        whole = self.chunks.count if self.offsets is not None else q.shape[1] // size
        self.whole = min(whole, self.chunks.count)  # chunks of as many tokens

    @staticmethod
    def size(rows: int, heads: int, keys: int, device: torch.device) -> int:
        """Tokens per chunk. On a CPU fewer where arrays are large: half as many are a third less work per token, and
        stay in a core's own cache, but they are twice as many operations."""
        if device.type != "cpu":
            return chunk_size(rows * heads * keys, device)
        per_token = max(1, rows * _heads_at_once(rows, heads, keys) * keys)
        return min(chunk_size(per_token, device), max(32, SMALL // per_token))

    def of(self, heads: slice) -> "Plan":
        """The same for some of the heads."""
        q, k, v, g, process_noise, observation_noise, rotation = (_of(x, heads) for x in self.given)
        others = process_noise, observation_noise, rotation, self.cu_seqlens, self.scale, self.chunks.size
        return Plan(q, k, v, g, *others)

    def batches(self) -> list[range]:
        """Chunks, one after another, of which what needs no state is computed at once."""
        tokens = self.rows * self.heads * self.groups * self.keys * self.chunks.size
        room = GROUP if self.device.type == "cpu" else budget(self.device) // 16
        most = max(1, room // max(1, tokens))
        whole = self.whole
        found = [range(c, min(c + most, whole)) for c in range(0, whole, most)]
        return found + [range(c, c + 1) for c in range(whole, self.chunks.count)]

    def places(self, some: range) -> list[tuple[int, slice]]:
        """Of the rows of some chunks together, those of each."""
        found, at = [], 0
        for c in some:
            found.append((c, slice(at, at + _count(self.chunks.rows(c), self.rows))))
            at = found[-1][1].stop
        return found

    def tokens(self, x: Tensor, c: Any) -> Tensor:
        if not isinstance(c, range):
            return super().tokens(x, c)
        parts = [self.chunks.take(x, each) for each in c]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, out: Tensor, c: Any, value: Tensor) -> None:
        for each, here in self.places(c) if isinstance(c, range) else [(c, ALL)]:
            super().put(out, each, value[here])


def _heads_at_once(rows: int, heads: int, keys: int) -> int:
    """Of a part that one thread does: few, but so many that a product takes longer than to start it."""
    return min(heads, max(1, ENOUGH // max(1, rows * keys)))


def _parts(plan: Plan) -> list[slice]:
    """Heads that are done side by side, whatever the number of threads."""
    if plan.device.type != "cpu":
        return [ALL]
    step = _heads_at_once(plan.rows, plan.heads, plan.keys)
    return [slice(at, min(at + step, plan.heads)) for at in range(0, plan.heads, max(1, step))]


def _work(q: Tensor) -> torch.dtype:
    """Of all products."""
    return torch.float64 if q.device.type == "cpu" else compute_dtype(q)  # elsewhere it may be slow, or not there


@torch.library.custom_op("metaplastic::bayesian_chunked", mutates_args=())
def _filter(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, process_noise: Tensor, observation_noise: Tensor, rotation: Optional,
    mean: Tensor, covariance: Tensor, cu_seqlens: Optional, scale: float, output_variance: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with full_precision(q.device):
        plan = Plan(q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale)
        tokens = None if plan.offsets is None else int(plan.offsets[-1])
        check_values(g, process_noise, observation_noise, rotation, tokens)
        if q.shape[1] == 1 and plan.offsets is None and not keep:  # decoding: one step needs no chunk
            given = [x[:, 0].to(plan.work) for x in (k, v, g, process_noise, observation_noise)]
            angle = None if rotation is None else rotation[:, 0].to(plan.work)
            final = rule.step(rule.GaussianState(mean.to(plan.work), covariance.to(plan.work)), *given, rotation=angle)
            y, spread = rule.readout(final, q[:, 0].to(plan.work) * scale)
            spread = spread[:, None] if output_variance else spread.new_empty(0)
            covariance = symmetric(final.covariance)  # or it would be less so with every token
            spread, mean, covariance = (x.to(plan.dtype) for x in (spread, final.mean, covariance))
            return y[:, None].to(q.dtype), spread, mean, covariance, *_room(plan, q, v, keep)
        output = q.new_zeros(v.shape)
        variance = q.new_zeros(observation_noise.shape if output_variance else (0,), dtype=plan.dtype)
        finals = mean.new_empty(mean.shape), covariance.new_empty(covariance.shape)
        saved = _room(plan, q, v, keep)

        def run(heads: slice) -> None:
            spread = variance[:, :, heads] if output_variance else None
            kept = [x[:, heads] for x in saved] if keep else None
            found = _forward(plan.of(heads), mean[:, heads], covariance[:, heads], output[:, :, heads], spread, kept)
            for whole, x in zip(finals, found, strict=True):
                whole[:, heads] = x

        side_by_side(run, _parts(plan))
        return output, variance, *finals, *saved


def _forward(
    plan: Plan, mean: Tensor, covariance: Tensor, output: Tensor, variance: Tensor | None, saved: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Fills the outputs, and what is kept if it is; returns the final states."""
    state, end = [x.to(plan.work) for x in plan.split(mean, covariance)], 0
    for some in plan.batches():
        frame = Frame(plan.take(some, plan.work))
        chunk = frame.open()
        for c, here in plan.places(some):
            rows = plan.chunks.rows(c)
            chunk.enter(state[0][rows], state[1][rows], here)
            _set(state, rows, frame.leave(*chunk.final(here), here))
        chunk.close()
        y, spread = chunk.read(variance is not None)
        plan.put(output, some, y)
        if variance is not None and spread is not None:
            plan.put(variance, some, spread[..., None])
        if saved is not None:
            begin, end, length = end, end + len(y), y.shape[-2]
            saved[0][begin:end], saved[1][begin:end] = chunk.mean, chunk.covariance
            if saved[2].numel():
                saved[2][begin:end, ..., :length, :length] = chunk.whitening
    return plan.join(state[0], state[1])


def _room(plan: Plan, q: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _saved_shapes(q, v, plan.rows, plan.groups, plan.chunks.size if keep else 0, plan.offsets is not None)


def _saved_shapes(q, v, rows, groups, size, packed) -> tuple[Tensor, Tensor, Tensor]:
    """Room for entry means, entry covariances and, where they are exact enough to be read again, whitenings of every
    chunk of every sequence (zeros: there may be fewer, and the last ones shorter); ``size`` 0: none."""
    heads, keys, dtype = q.shape[2], q.shape[3], compute_dtype(q)
    count = 0
    if size:
        count = q.shape[1] // size + rows if packed else rows * (-(-q.shape[1] // size))
    shape, pairs = (count, heads, groups), size if dtype == _work(q) else 0
    return (
        q.new_zeros((*shape, keys, v.shape[3] // groups), dtype=dtype),
        q.new_zeros((*shape, keys, keys), dtype=dtype),
        q.new_zeros((*shape, pairs, pairs), dtype=dtype),
    )


@_filter.register_fake
def _(q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, cu_seqlens, scale, variance, keep):
    dtype = compute_dtype(q)
    groups = observation_noise.shape[3] if observation_noise.dim() == 4 else 1
    rows = mean.shape[0]
    size = Plan.size(rows, q.shape[2], q.shape[3], q.device) if keep else 0
    spread = q.new_empty(observation_noise.shape if variance else (0,), dtype=dtype)
    saved = _saved_shapes(q, v, rows, groups, size, cu_seqlens is not None)
    states = (x.new_empty(x.shape) for x in (mean, covariance))
    return q.new_empty(v.shape), spread, *states, *saved


@torch.library.custom_op("metaplastic::bayesian_chunked_backward", mutates_args=())
def _adjoint(
    d_output: Tensor, d_variance: Optional, d_mean: Optional, d_covariance: Optional,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, process_noise: Tensor, observation_noise: Tensor, rotation: Optional,
    mean: Tensor, covariance: Tensor, means: Tensor, covariances: Tensor, whitenings: Tensor,
    cu_seqlens: Optional, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with full_precision(q.device):
        inputs = (q, k, v, g, process_noise, observation_noise, rotation)
        plan = Plan(*inputs, cu_seqlens, scale)
        if q.device.type != "cpu":
            kept = means, covariances, whitenings
            return all_at_once(d_output, d_variance, d_mean, d_covariance, inputs, mean, covariance, kept, plan, scale)
        grads = [x.new_zeros(x.shape) if x is not None else q.new_empty(0) for x in inputs]
        given = [
            torch.zeros_like(x) if d is None else d
            for x, d in zip((mean, covariance), (d_mean, d_covariance), strict=True)
        ]
        firsts = mean.new_empty(mean.shape), covariance.new_empty(covariance.shape)

        def run(heads: slice) -> None:
            kept = [x[:, heads] for x in (means, covariances, whitenings)]
            outs = [None if x is None else out[:, :, heads] for x, out in zip(inputs, grads, strict=True)]
            d_states = given[0][:, heads], given[1][:, heads]
            found = _backward(plan.of(heads), d_output[:, :, heads], _of(d_variance, heads), d_states, kept, outs)
            for whole, x in zip(firsts, found, strict=True):
                whole[:, heads] = x

        side_by_side(run, _parts(plan))
        dq, dk, dv, dg, d_process, d_observation, d_rotation = grads
        return dq, dk, dv, dg, d_process, d_observation, d_rotation, *firsts


def _backward(
    plan: Plan, d_output: Tensor, d_variance: Optional, d_states: tuple[Tensor, Tensor], kept: list[Tensor],
    grads: list[Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fills the gradients of the inputs; returns those of the initial states."""
    d_state = [x.to(plan.work) for x in plan.split(d_states[0], d_states[1])]
    d_state[1] = symmetric(d_state[1])
    if d_variance is not None and not plan.grouped:
        d_variance = d_variance[..., None]
    d_output = d_output.unflatten(-1, (plan.groups, -1))  # [B, T, H, G, V / G]
    batches = plan.batches()
    end = sum(here.stop for some in batches for _, here in plan.places(some)[-1:])
    for some in reversed(batches):
        places = plan.places(some)
        begin = end - places[-1][1].stop
        frame = Frame(plan.take(some, plan.work))
        mean, covariance, whitening = (x[begin:end].to(plan.work) for x in kept)
        length = frame.v.shape[-2]
        chunk = frame.enter(mean, covariance, whitening[..., :length, :length] if whitening.numel() else None)
        dy = plan.tokens(d_output, some).permute(0, 2, 3, 1, 4).to(plan.work)
        dv = None if d_variance is None else plan.tokens(d_variance, some).permute(0, 2, 3, 1).to(plan.work)
        inside = Adjoint(chunk, dy, dv)
        for c, here in reversed(places):
            rows = plan.chunks.rows(c)
            inside.enter(*frame.return_to(d_state[0][rows], d_state[1][rows], here), here)
            _set(d_state, rows, inside.entry(here))
        found = frame.gradients(inside)
        found[0], found[3] = found[0] * plan.scale, _halved(found[3]) if plan.paired else found[3]
        for out, value in zip(grads, found, strict=True):
            if out is not None:
                plan.put(out, some, value)
        end = begin
    return plan.join(d_state[0], d_state[1])


def all_at_once(d_output, d_variance, d_mean, d_covariance, inputs, mean, covariance, kept, plan: Plan, scale: float):
    """The same gradients, of all chunks side by side but for the recursions of the states' gradients."""
    q = inputs[0]
    table = Table(q.shape[0], q.shape[1], plan.offsets, kept[2].shape[-1], q.device)
    saved = Saved(*kept, place=table.here(table.by_number()))
    finals = d_output, d_variance, d_mean, d_covariance
    found, d_mean, d_covariance = adjoint(*finals, inputs, mean, covariance, saved, plan.offsets, scale)
    dq, dk, dv, dg, d_process, d_observation, d_rotation = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dg, d_process, d_observation, d_rotation, d_mean, d_covariance


def _of(x: Tensor | None, heads: slice) -> Any:
    return None if x is None else x[:, :, heads]


def _halved(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).sum(-1)


def _set(state: list[Tensor], rows: slice | Tensor, new: tuple[Tensor, Tensor]) -> None:
    for i, x in enumerate(new):
        if isinstance(rows, slice):
            state[i] = x
        else:
            state[i][rows] = x


def _count(rows: slice | Tensor, total: int) -> int:
    return total if isinstance(rows, slice) else len(rows)


@_adjoint.register_fake
def _(
    d_output, d_variance, d_mean, d_covariance, q, k, v, g, process_noise, observation_noise, rotation,
    mean, covariance, means, covariances, whitenings, cu_seqlens, scale,
):  # fmt: skip
    inputs = (q, k, v, g, process_noise, observation_noise, rotation)
    like = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)
    return *like, mean.new_empty(mean.shape), covariance.new_empty(covariance.shape)


apply = differentiable(_filter, _adjoint)
