"""The chunked backend: the exact chunk form (``chunk.py``) in plain PyTorch, on any device, chunk after chunk.

For the backward pass the entry state and the inverse Cholesky factor of every chunk are kept, all else is recomputed:
on a CPU chunk after chunk, elsewhere, where starting small kernels is what takes long, in the batched products of
:mod:`metaplastic.ops.bayesian.parallel_backward`.

On a CPU all products are float64: float32 is too little where a token is far less certain than its noise or far more
certain than the least certain key is, and which tokens those are must not decide how other ones are rounded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules import bayesian as rule
from ..chunks import Chunks, chunk_size
from ..contract import compute_dtype, full_precision
from . import check_values
from .call import Call
from .custom import differentiable
from .frame import Frame
from .parallel_backward import Saved, Table, adjoint

Optional = Tensor | None


class Plan(Call):
    """A call, and how it is cut into chunks one after another."""

    def __init__(self, q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale):
        super().__init__(q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale)
        size = self.size(self.rows, self.heads, self.keys, q.device)
        self.chunks = Chunks(q.shape[0], q.shape[1], self.offsets, size, q.device)
        self.work = _work(q)

    @staticmethod
    def size(rows: int, heads: int, keys: int, device: torch.device) -> int:
        return chunk_size(rows * heads * keys, device)


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
            symmetric = (final.covariance + final.covariance.mT) / 2  # or it would be less so with every token
            spread, mean, covariance = (x.to(plan.dtype) for x in (spread, final.mean, symmetric))
            return y[:, None].to(q.dtype), spread, mean, covariance, *_room(plan, q, v, keep)
        output = q.new_zeros(v.shape)
        variance = q.new_zeros(observation_noise.shape if output_variance else (0,), dtype=plan.dtype)
        state = [x.to(plan.work) for x in plan.split(mean, covariance)]
        kept: list[list[Tensor]] = [[], [], []]
        for c in range(plan.chunks.count):
            rows = plan.chunks.rows(c)
            entry = [s[rows] for s in state]
            frame = Frame(plan.take(c, plan.work))
            chunk = frame.enter(*entry)
            y, spread = chunk.read(frame.q, output_variance)
            plan.put(output, c, y)
            if spread is not None:
                plan.put(variance, c, spread[..., None])
            if keep:
                for pieces, x in zip(kept, (*entry, _padded(chunk.whitening, plan.chunks.size)), strict=True):
                    pieces.append(x.to(plan.dtype, copy=True))
            for s, new in zip(state, frame.leave(*chunk.final()), strict=True):
                s[rows] = new
        saved = _room(plan, q, v, keep)
        for whole, pieces in zip(saved, kept, strict=True):
            used = sum(len(x) for x in pieces)
            torch.cat([*pieces, whole.new_zeros(whole.shape[0] - used, *whole.shape[1:])], out=whole)
        mean, covariance = plan.join(*(x.to(plan.dtype) for x in state))
        return output, variance, mean, covariance, *saved


def _padded(x: Tensor, size: int) -> Tensor:
    """The last chunk may be shorter."""
    return F.pad(x, (0, size - x.shape[-1], 0, size - x.shape[-1]))


def _room(plan: Plan, q: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _saved_shapes(
        q, v, plan.rows, plan.groups, plan.chunks.size if keep else 0, plan.offsets is not None, plan.dtype
    )


def _saved_shapes(q, v, rows, groups, size, packed, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Room for entry means, entry covariances and whitenings of every chunk of every sequence; ``size`` 0: none."""
    heads, keys = q.shape[2], q.shape[3]
    count = 0
    if size:
        count = q.shape[1] // size + rows if packed else rows * (-(-q.shape[1] // size))
    shape = (count, heads, groups)
    return (
        q.new_empty((*shape, keys, v.shape[3] // groups), dtype=dtype),
        q.new_empty((*shape, keys, keys), dtype=dtype),
        q.new_empty((*shape, size, size), dtype=dtype),
    )


@_filter.register_fake
def _(q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, cu_seqlens, scale, variance, keep):
    dtype = compute_dtype(q)
    groups = observation_noise.shape[3] if observation_noise.dim() == 4 else 1
    rows = mean.shape[0]
    size = Plan.size(rows, q.shape[2], q.shape[3], q.device) if keep else 0
    spread = q.new_empty(observation_noise.shape if variance else (0,), dtype=dtype)
    saved = _saved_shapes(q, v, rows, groups, size, cu_seqlens is not None, dtype)
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
        start = [
            torch.zeros_like(x) if d is None else d.to(x.dtype)
            for x, d in zip((mean, covariance), (d_mean, d_covariance), strict=True)
        ]
        d_state = [x.to(plan.work) for x in plan.split(start[0], start[1])]
        grads = [x.new_zeros(x.shape) if x is not None else q.new_empty(0) for x in inputs]
        if d_variance is not None and not plan.grouped:
            d_variance = d_variance[..., None]
        d_output = d_output.unflatten(-1, (plan.groups, -1))  # [B, T, H, G, V / G]
        end = sum(_count(plan.chunks.rows(c), plan.rows) for c in range(plan.chunks.count))
        for c in reversed(range(plan.chunks.count)):
            rows = plan.chunks.rows(c)
            begin = end - _count(rows, plan.rows)
            frame = Frame(plan.take(c, plan.work))
            length = frame.q.shape[-2]
            whitening = whitenings[begin:end, ..., :length, :length] if plan.work == plan.dtype else None  # else anew
            chunk = frame.enter(means[begin:end].to(plan.work), covariances[begin:end].to(plan.work), whitening)
            dy = plan.chunks.take(d_output, c).permute(0, 2, 3, 1, 4).to(plan.work)
            dv = None if d_variance is None else plan.chunks.take(d_variance, c).permute(0, 2, 3, 1).to(plan.work)
            inside = frame.return_to(*(s[rows] for s in d_state))
            d = chunk.backward(frame.q, dy, dv, *inside)
            found = frame.gradients(chunk, d, *inside)
            found[0], found[3] = found[0] * scale, _halved(found[3]) if plan.paired else found[3]
            for out, value in zip(grads, found, strict=True):
                if value is not None:
                    plan.put(out, c, value)
            assert d.mean is not None and d.covariance is not None
            d_state[0][rows], d_state[1][rows] = d.mean, d.covariance
            end = begin
        dq, dk, dv, dg, d_process, d_observation, d_rotation = grads
        states = plan.join(*(x.to(plan.dtype) for x in d_state))
        return dq, dk, dv, dg, d_process, d_observation, d_rotation, *states


def all_at_once(d_output, d_variance, d_mean, d_covariance, inputs, mean, covariance, kept, plan: Plan, scale: float):
    """The same gradients, of all chunks side by side but for the recursions of the states' gradients."""
    q = inputs[0]
    table = Table(q.shape[0], q.shape[1], plan.offsets, kept[2].shape[-1], q.device)
    saved = Saved(*kept, place=table.here(table.by_number()))
    finals = d_output, d_variance, d_mean, d_covariance
    found, d_mean, d_covariance = adjoint(*finals, inputs, mean, covariance, saved, plan.offsets, scale)
    dq, dk, dv, dg, d_process, d_observation, d_rotation = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dg, d_process, d_observation, d_rotation, d_mean, d_covariance


def _halved(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).sum(-1)


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
