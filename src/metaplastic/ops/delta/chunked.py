r"""The chunked backend: the WY form of the delta rule in plain PyTorch, on any device.

Inside a chunk with entry state M_0 and R[t, s], entry, tail, last as in ``ops/decay.py`` (x is an elementwise product):

    (I + N) u = beta x (V - (entry x K) M_0)        N[t, s] = beta_t <k_t, R k_s> for s < t: what s wrote, t subtracts
    output = (entry x Q) M_0 + <Q, R K> u           M_end = last x M_0 + (tail x K)^T u

The backward solves the transposed system and recomputes states from about sqrt(T / C) checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules import delta as rule
from ..chunks import Chunks, chunk_size
from ..contract import compute_dtype, full_precision, read_offsets
from ..decay import Decay, crossing
from . import check_values

Optional = Tensor | None


class _Chunk:
    """k [n, H, C, K], v [n, H, C, V], beta [n, H, C, 1], g [n, H, C, 1 or K]; mean [n, H, K, V]."""

    def __init__(self, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, mean: Tensor):
        self.k, self.v, self.beta, self.decay, self.mean = k, v, beta, Decay(g), mean
        self.entered = self.decay.entry * k
        self.overlap = self.decay.pairs(k, k).tril(-1)
        self.residual = v - self.entered @ mean
        self.written = torch.linalg.solve_triangular(
            beta * self.overlap, beta * self.residual, upper=False, unitriangular=True
        )

    def final(self) -> Tensor:
        return self.decay.last.mT * self.mean + (self.decay.tail * self.k).mT @ self.written

    def read(self, q: Tensor) -> Tensor:
        return (self.decay.entry * q) @ self.mean + self.decay.pairs(q, self.k) @ self.written

    def backward(self, q: Tensor, d_output: Tensor, d_mean: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, beta, g and the entry state, given those of the outputs and of the final state."""
        k, decay, written = self.k, self.decay, self.written
        d_written = decay.pairs(q, k).mT @ d_output + (decay.tail * k) @ d_mean
        d_scaled = torch.linalg.solve_triangular(
            (self.beta * self.overlap).mT, d_written, upper=True, unitriangular=True
        )
        d_system = -(d_scaled @ written.mT).tril(-1)
        d_beta = (d_scaled * self.residual).sum(-1, keepdim=True) + (d_system * self.overlap).sum(-1, keepdim=True)
        d_residual, d_overlap = self.beta * d_scaled, self.beta * d_system
        d_pairs = (d_output @ written.mT).tril()
        from_q, from_k = decay.over_earlier(d_pairs, k), decay.over_earlier(d_overlap, k)
        carried = decay.tail * (written @ d_mean.mT)
        later = decay.over_later(d_pairs, q) + decay.over_later(d_overlap, k) + carried
        reads, entering = d_output @ self.mean.mT, -d_residual @ self.mean.mT
        dq = from_q + decay.entry * reads
        dk = from_k + later + decay.entry * entering
        dg = self._decay_gradient(q, d_pairs, d_overlap, decay.entry * (q * reads + k * entering), k * carried, d_mean)
        d_entry = decay.last.mT * d_mean + (decay.entry * q).mT @ d_output - self.entered.mT @ d_residual
        return dq, dk, d_residual, d_beta, dg, d_entry

    def _decay_gradient(self, q, d_pairs, d_overlap, reads, writes, d_mean) -> Tensor:
        """Sums every term whose decay contains g_u: pairs s < u <= t, reads of M_0 at t >= u, writes at s < u that
        reach the end, and M_0 itself."""
        decay, k = self.decay, self.k
        carried = (decay.last.mT * d_mean * self.mean).sum(-1)[..., None, :]
        if decay.per_key:
            both = torch.einsum("...ts,...tk->...kts", d_pairs, q) + torch.einsum("...ts,...tk->...kts", d_overlap, k)
            pairs = crossing(both * decay.ratio * k.mT[..., None, :]).mT
        else:
            reads, writes, carried = (x.sum(-1, keepdim=True) for x in (reads, writes, carried))
            pairs = crossing(d_pairs * decay.pairs(q, k) + d_overlap * self.overlap)[..., None]
        before = F.pad(writes[..., :-1, :].cumsum(-2), (0, 0, 1, 0))
        return pairs + reads.flip(-2).cumsum(-2).flip(-2) + before + carried


def _prepare(q, k, v, beta, g, mean, cu_seqlens):
    offsets = read_offsets("delta", cu_seqlens, q.shape[1])
    dtype = compute_dtype(q)
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    heads, key_size, value_size = q.shape[2], q.shape[3], v.shape[3]
    if mean is None:
        state = q.new_zeros((rows, heads, key_size, value_size), dtype=dtype)
    else:
        state = mean.to(dtype).clone(memory_format=torch.contiguous_format)
    per_key = g.dim() == 4  # then the pairwise decays are [K, C, C]
    size = chunk_size(rows * heads * key_size * (16 if per_key else 1), q.device, 16 if per_key else 64)
    g = g if per_key else g[..., None]
    qs, *inputs = (x.to(dtype) for x in (q, k, v, beta[..., None], g))
    return offsets, qs, inputs, state, Chunks(q.shape[0], q.shape[1], offsets, size, q.device)


@torch.library.custom_op("metaplastic::delta_chunked", mutates_args=())
def apply(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, mean: Optional, cu_seqlens: Optional, scale: float
) -> tuple[Tensor, Tensor]:
    with full_precision(q.device):
        offsets, qs, inputs, state, chunks = _prepare(q, k, v, beta, g, mean, cu_seqlens)
        check_values(beta, g, None if offsets is None else int(offsets[-1]))
        if q.shape[1] == 1 and offsets is None:  # decoding: one step needs none of the chunk's machinery
            given = [x[:, 0].to(state.dtype) for x in (k, v, beta, g)]
            final = rule.step(rule.DeltaState(state), *given)
            return rule.readout(final, qs[:, 0] * scale)[0][:, None].to(q.dtype), final.mean
        output = q.new_zeros(v.shape)
        for c in range(chunks.count):
            rows = chunks.rows(c)
            chunk = _Chunk(*(chunks.take(x, c).transpose(1, 2) for x in inputs), mean=state[rows])
            chunks.put(output, c, chunk.read(chunks.take(qs, c).transpose(1, 2) * scale).transpose(1, 2))
            state[rows] = chunk.final()
        return output, state


@apply.register_fake
def _(q, k, v, beta, g, mean, cu_seqlens, scale):
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty(v.shape), q.new_empty((rows, q.shape[2], q.shape[3], v.shape[3]), dtype=compute_dtype(q))


@torch.library.custom_op("metaplastic::delta_chunked_backward", mutates_args=())
def _backward(
    d_output: Tensor, d_mean: Optional, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor,
    mean: Optional, cu_seqlens: Optional, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with full_precision(q.device):
        _, qs, inputs, state, chunks = _prepare(q, k, v, beta, g, mean, cu_seqlens)
        d_state = torch.zeros_like(state) if d_mean is None else d_mean.to(state.dtype).clone()
        grads = [x.new_zeros(x.shape) for x in (q, k, v, beta, g)]

        def enter(c: int, entry: list[Tensor]) -> _Chunk:
            return _Chunk(*(chunks.take(x, c).transpose(1, 2) for x in inputs), *entry)

        for c, entry in chunks.walk_back([state], lambda c, entry: [enter(c, entry).final()]):
            rows = chunks.rows(c)
            dy = chunks.take(d_output, c).to(state.dtype).transpose(1, 2)
            chunk, query = enter(c, entry), chunks.take(qs, c).transpose(1, 2) * scale
            dq, dk, dv, d_beta, dg, d_entry = chunk.backward(query, dy, d_state[rows])
            for out, value in zip(grads, (dq * scale, dk, dv, d_beta, dg), strict=True):
                value = value.transpose(1, 2)
                chunks.put(out, c, value if out.dim() == 4 else value[..., 0])
            d_state[rows] = d_entry
        dq, dk, dv, d_beta, dg = grads
        return dq, dk, dv, d_beta, dg, d_state


@_backward.register_fake
def _(d_output, d_mean, q, k, v, beta, g, mean, cu_seqlens, scale):
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = q.new_empty((rows, q.shape[2], q.shape[3], v.shape[3]), dtype=compute_dtype(q))
    return *(x.new_empty(x.shape) for x in (q, k, v, beta, g)), state


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_mean):
    *inputs, cu_seqlens = ctx.saved_tensors
    if d_output is None:
        d_output = inputs[0].new_zeros(inputs[2].shape)
    gradients = _backward(d_output, d_mean, *inputs, cu_seqlens, ctx.scale)
    wanted = [d if x is not None else None for d, x in zip(gradients, inputs, strict=True)]
    return *wanted, None, None


apply.register_autograd(_differentiate, setup_context=_setup_context)
