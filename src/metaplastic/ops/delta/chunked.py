r"""The chunked backend: the WY form of the delta rule in plain PyTorch, on any device.

Inside a chunk with entry state M_0 and R[t, s], entry, tail, last as in ``ops/decay.py`` (x is an elementwise product):

    (I + N) u = beta x (V - (entry x K) M_0)        N[t, s] = beta_t <k_t, R k_s> for s < t: what s wrote, t subtracts
    output = (entry x Q) M_0 + <Q, R K> u           M_end = last x M_0 + (tail x K)^T u

The backward solves the transposed system; the entry state of every chunk and the writes u are kept for it.
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
    """k [n, H, C, K], v [n, H, C, V], beta [n, H, C, 1], g [n, H, C, 1 or K]; mean [n, H, K, V].

    ``written``: u, if it is known already.
    """

    def __init__(self, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, mean: Tensor, written: Optional = None):
        self.k, self.v, self.beta, self.decay, self.mean = k, v, beta, Decay(g), mean
        # Products with a triangle of ones: at this size several times as fast as tril.
        self.lower = torch.ones(k.shape[-2], k.shape[-2], dtype=k.dtype, device=k.device).tril()
        self.strictly_lower = self.lower.tril(-1)
        self.entered = self.decay.entry * k
        self.overlap = self.decay.pairs(k, k) * self.strictly_lower
        self.residual = v - self.entered @ mean
        self.written: Tensor = self._solve() if written is None else written

    def _solve(self) -> Tensor:
        system, residual = self.beta * self.overlap, self.beta * self.residual
        return torch.linalg.solve_triangular(system, residual, upper=False, unitriangular=True)

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
        d_system = -(d_scaled @ written.mT) * self.strictly_lower
        d_beta = (d_scaled * self.residual).sum(-1, keepdim=True) + (d_system * self.overlap).sum(-1, keepdim=True)
        d_residual, d_overlap = self.beta * d_scaled, self.beta * d_system
        d_pairs = (d_output @ written.mT) * self.lower
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


def _heads_first(x: Tensor) -> Tensor:
    """``[n, C, H, ...]`` -> ``[n, H, C, ...]``, laid out anew: every matrix product would copy it otherwise."""
    return x.transpose(1, 2).contiguous()


def _chunk_size(rows: int, heads: int, key_size: int, per_key: bool, device: torch.device) -> int:
    # Per key the pairwise decays are [K, C, C].
    return chunk_size(rows * heads * key_size * (16 if per_key else 1), device, 16 if per_key else 64)


def _prepare(q, k, v, beta, g, mean, cu_seqlens):
    offsets = read_offsets("delta", cu_seqlens, q.shape[1])
    dtype = compute_dtype(q)
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    heads, key_size, value_size = q.shape[2], q.shape[3], v.shape[3]
    if mean is None:
        state = q.new_zeros((rows, heads, key_size, value_size), dtype=dtype)
    else:
        state = mean.to(dtype).clone(memory_format=torch.contiguous_format)
    size = _chunk_size(rows, heads, key_size, g.dim() == 4, q.device)
    g = g if g.dim() == 4 else g[..., None]
    qs, *inputs = (x.to(dtype) for x in (q, k, v, beta[..., None], g))
    return offsets, qs, inputs, state, Chunks(q.shape[0], q.shape[1], offsets, size, q.device)


def _room(q: Tensor, v: Tensor, rows: int, size: int, packed: bool) -> tuple[Tensor, Tensor]:
    """Room for the entry state of every chunk of every sequence and for the writes; ``size`` 0: none."""
    dtype, length = compute_dtype(q), q.shape[1]
    count = 0
    if size:
        count = length // size + rows if packed else rows * (-(-length // size))
    entries = q.new_empty((count, q.shape[2], q.shape[3], v.shape[3]), dtype=dtype)
    return entries, q.new_zeros(v.shape if size else (0,), dtype=dtype)


@torch.library.custom_op("metaplastic::delta_chunked", mutates_args=())
def apply(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, mean: Optional, cu_seqlens: Optional, scale: float,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and final state, and if ``keep`` what the backward needs: entry states and writes."""
    with full_precision(q.device):
        offsets, qs, inputs, state, chunks = _prepare(q, k, v, beta, g, mean, cu_seqlens)
        check_values(beta, g, None if offsets is None else int(offsets[-1]))
        entries, written = _room(q, v, len(state), chunks.size if keep else 0, offsets is not None)
        if q.shape[1] == 1 and offsets is None and not keep:  # decoding: one step needs none of the chunk's machinery
            given = [x[:, 0].to(state.dtype) for x in (k, v, beta, g)]
            final = rule.step(rule.DeltaState(state), *given)
            output = rule.readout(final, qs[:, 0] * scale)[0][:, None].to(q.dtype)
            return output, final.mean, entries, written
        output, begin = q.new_zeros(v.shape), 0
        for c in range(chunks.count):
            rows = chunks.rows(c)
            entry = state[rows]
            chunk = _Chunk(*(_heads_first(chunks.take(x, c)) for x in inputs), mean=entry)
            chunks.put(output, c, chunk.read(_heads_first(chunks.take(qs, c)) * scale).transpose(1, 2))
            if keep:
                entries[begin : begin + len(entry)] = entry
                begin += len(entry)
                chunks.put(written, c, chunk.written.transpose(1, 2))
            state[rows] = chunk.final()
        entries[begin:] = 0
        return output, state, entries, written


@apply.register_fake
def _(q, k, v, beta, g, mean, cu_seqlens, scale, keep=True):
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size = _chunk_size(rows, q.shape[2], q.shape[3], g.dim() == 4, q.device) if keep else 0
    state = q.new_empty((rows, q.shape[2], q.shape[3], v.shape[3]), dtype=compute_dtype(q))
    return q.new_empty(v.shape), state, *_room(q, v, rows, size, cu_seqlens is not None)


@torch.library.custom_op("metaplastic::delta_chunked_backward", mutates_args=())
def _backward(
    d_output: Tensor, d_mean: Optional, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor,
    mean: Optional, entries: Tensor, written: Tensor, cu_seqlens: Optional, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with full_precision(q.device):
        _, qs, inputs, state, chunks = _prepare(q, k, v, beta, g, mean, cu_seqlens)
        d_state = torch.zeros_like(state) if d_mean is None else d_mean.to(state.dtype).clone()
        grads = [x.new_zeros(x.shape) for x in (q, k, v, beta, g)]
        counts = [len(d_state[chunks.rows(c)]) for c in range(chunks.count)]
        end = sum(counts)
        for c in reversed(range(chunks.count)):
            rows = chunks.rows(c)
            query, dy, *given = (_heads_first(chunks.take(x, c)) for x in (qs, d_output, *inputs, written))
            *given, u = given
            chunk = _Chunk(*given, mean=entries[end - counts[c] : end], written=u)
            dq, dk, dv, d_beta, dg, d_entry = chunk.backward(query * scale, dy.to(state.dtype), d_state[rows])
            for out, value in zip(grads, (dq * scale, dk, dv, d_beta, dg), strict=True):
                value = value.transpose(1, 2)
                chunks.put(out, c, value if out.dim() == 4 else value[..., 0])
            d_state[rows] = d_entry
            end -= counts[c]
        dq, dk, dv, d_beta, dg = grads
        return dq, dk, dv, d_beta, dg, d_state


@_backward.register_fake
def _(d_output, d_mean, q, k, v, beta, g, mean, entries, written, cu_seqlens, scale):
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = q.new_empty((rows, q.shape[2], q.shape[3], v.shape[3]), dtype=compute_dtype(q))
    return *(x.new_empty(x.shape) for x in (q, k, v, beta, g)), state


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_mean, *_):
    *inputs, cu_seqlens, entries, written = ctx.saved_tensors
    if d_output is None:
        d_output = inputs[0].new_zeros(inputs[2].shape)
    gradients = _backward(d_output, d_mean, *inputs, entries, written, cu_seqlens, ctx.scale)
    wanted = [d if x is not None else None for d, x in zip(gradients, inputs, strict=True)]
    return *wanted, None, None, None


apply.register_autograd(_differentiate, setup_context=_setup_context)
