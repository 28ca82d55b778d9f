r"""The chunked backend: matrix products in plain PyTorch, on any device, for all chunks at once (``ops/pieces.py``).

Inside a chunk with entry state S_0, D[t, s] = exp(g_{s+1} + ... + g_t) and gamma_t = exp(g_1 + ... + g_t), both with a
trailing key axis when g is per key (written out for one head; x is an elementwise product):

    A[t, s] = sum_k q_t k_s D[t, s]                  y_t   = sum_{s <= t} A[t, s] v_s + S_0 (gamma_t x q_t)
    S_end   = sum_s v_s (D[end, s] x k_s)^T + S_0 diag(gamma_end)

Only S_0 <- S_end goes from chunk to chunk: one elementwise operation for each, and back again for the gradient.

The gradient of g_u sums every term whose decay contains g_u: pairs s < u <= t, reads of S_0 with t >= u, writes that
reach the end with s < u, and S_0 itself. Only sums, no differences: exact beside g = -1000. Memory is bounded by groups
of chunks; the backward recomputes the states.
"""

import torch
from torch import Tensor

from ...rules import additive as rule
from ..chunks import budget, chunk_size, crossing_sums, segment_sums
from ..contract import compute_dtype, full_precision, read_offsets
from ..pieces import Group, Pieces
from . import check_values

Optional = Tensor | None


class _Chunk:
    """Decays of n chunks. k [n, H, C, K], v [n, H, C, V]; g [n, H, C] or [n, H, C, K].

    ``s0 [n, H, V, K]``, the entry states, is given later: it follows from what the chunks write.
    """

    s0: Tensor

    def __init__(self, k: Tensor, v: Tensor, g: Tensor):
        self.k, self.v, self.per_key = k, v, g.dim() == 4
        sums = segment_sums(g.mT if self.per_key else g)  # [n, H, (K,) C, C]
        self.decay = sums.movedim(2, -1).exp() if self.per_key else sums.exp()  # [n, H, C, C, (K)]
        entry = g.cumsum(2).exp()
        self.entry = entry if self.per_key else entry[..., None]  # [n, H, C, K or 1]
        tail = self.decay[:, :, -1]
        self.tail = tail if self.per_key else tail[..., None]  # D[end, s]

    @property
    def last(self) -> Tensor:
        """How much of the entry state is left at the end, [n, H, 1, K or 1]."""
        return self.entry[:, :, -1, None]

    def write(self) -> Tensor:
        """The final state of an empty memory."""
        return self.v.mT @ (self.k * self.tail)

    def scores(self, q: Tensor) -> Tensor:
        if self.per_key:
            return torch.einsum("bhtk,bhsk,bhtsk->bhts", q, self.k, self.decay)
        return (q @ self.k.mT) * self.decay

    def read(self, q: Tensor) -> Tensor:
        return self.scores(q) @ self.v + (q * self.entry) @ self.s0.mT

    def read_backward(self, q: Tensor, dy: Tensor) -> Tensor:
        """The gradient of s0 that its reads give."""
        return dy.mT @ (q * self.entry)

    def backward(self, q: Tensor, dy: Tensor, ds: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and g, given those of the outputs [n, H, C, V] and of the final state."""
        k, v, s0 = self.k, self.v, self.s0
        d_scores = dy @ v.mT  # [n, H, t, s]
        if self.per_key:
            scores = self.scores(q)
            weighted = d_scores[..., None] * self.decay  # [n, H, t, s, K]
            dq_pairs = torch.einsum("bhtsk,bhsk->bhtk", weighted, k)
            dk_pairs = torch.einsum("bhtsk,bhtk->bhsk", weighted, q)
            pairs = weighted * q[:, :, :, None] * k[:, :, None]
        else:
            scores = self.scores(q)
            weighted = d_scores * self.decay
            dq_pairs, dk_pairs = weighted @ k, weighted.mT @ q
            pairs = d_scores * scores
        dv = scores.mT @ dy + (k * self.tail) @ ds.mT
        reads_s0 = (dy @ s0) * self.entry
        end = (v @ ds) * self.tail
        dg = self._dg(pairs, reads_s0 * q, end * k, (s0 * ds * self.last).sum(-2))
        return dq_pairs + reads_s0, dk_pairs + end, dv, dg

    def _dg(self, pairs: Tensor, reads: Tensor, writes: Tensor, carried: Tensor) -> Tensor:
        """pairs [.., t, s, (K)], reads and writes [.., C, K], carried [.., K] -> [.., C, (K)]."""
        if self.per_key:
            crosses = crossing_sums(pairs.movedim(-1, 2)).mT
        else:
            reads, writes, carried = reads.sum(-1), writes.sum(-1), carried.sum(-1)
            crosses = crossing_sums(pairs)
        before = torch.cat([torch.zeros_like(writes[:, :, :1]), writes[:, :, :-1].cumsum(2)], 2)
        return crosses + reads.flip(2).cumsum(2).flip(2) + before + carried[:, :, None]


def _prepare(q, k, v, g, mean, cu_seqlens):
    offsets = read_offsets("additive", cu_seqlens, q.shape[1])
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    heads, key_size, value_size = q.shape[2], q.shape[3], v.shape[3]
    shape, dtype = (rows, heads, value_size, key_size), compute_dtype(q)
    s = q.new_zeros(shape, dtype=dtype) if mean is None else mean.to(dtype)
    # The pairwise decays are [C, C], or [C, C, K] per key. The smaller sizes are the fastest on a CPU.
    keys = key_size if g.dim() == 4 else 1
    largest = (8 if g.dim() == 4 else 32) if q.device.type == "cpu" else (16 if g.dim() == 4 else 64)
    size = chunk_size(rows * heads * key_size * (16 if g.dim() == 4 else 1), q.device, largest)
    of_a_piece = heads * max(value_size * key_size, size * size * keys, size * max(value_size, key_size))
    most = budget(q.device) // max(1, of_a_piece)
    return offsets, s, Pieces(q.shape[0], q.shape[1], offsets, size, most, q.device)


@torch.library.custom_op("metaplastic::additive_chunked", mutates_args=())
def apply(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, mean: Optional, cu_seqlens: Optional, scale: float
) -> tuple[Tensor, Tensor]:
    with full_precision(q.device):
        return _forward(q, k, v, g, mean, cu_seqlens, scale)


def _forward(q, k, v, g, mean, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    offsets, s, pieces = _prepare(q, k, v, g, mean, cu_seqlens)
    check_values(g, None if offsets is None else int(offsets[-1]))
    if q.shape[1] == 1 and offsets is None:  # decoding: one step needs none of the chunk's machinery
        query, *inputs = (x[:, 0].to(s.dtype) for x in (q, k, v, g))
        final = rule.step(rule.AdditiveState(s), *inputs).mean
        return (final @ (query * scale)[..., None])[..., 0][:, None].to(q.dtype), final
    output, s = q.new_zeros(v.shape), pieces.ordered(s)
    for group in pieces.groups():
        chunk = _Chunk(*(group.take(x, s.dtype) for x in (k, v, g)))
        chunk.s0 = group.scan(chunk.write(), chunk.last, s)
        group.put(output, chunk.read(group.take(q, s.dtype) * scale))
    return output, pieces.restored(s)


@apply.register_fake
def _(q, k, v, g, mean, cu_seqlens, scale):
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty(v.shape), q.new_empty((rows, q.shape[2], v.shape[3], q.shape[3]), dtype=compute_dtype(q))


@torch.library.custom_op("metaplastic::additive_chunked_backward", mutates_args=())
def _backward(
    d_output: Tensor, d_mean: Optional, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    mean: Optional, cu_seqlens: Optional, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with full_precision(q.device):
        return _gradients(d_output, d_mean, q, k, v, g, mean, cu_seqlens, scale)


def _gradients(d_output, d_mean, q, k, v, g, mean, cu_seqlens, scale):
    _, s, pieces = _prepare(q, k, v, g, mean, cu_seqlens)
    s, dtype = pieces.ordered(s), s.dtype
    ds = torch.zeros_like(s) if d_mean is None else pieces.ordered(d_mean.to(dtype))
    grads = [x.new_zeros(x.shape) for x in (q, k, v, g)]

    def advance(group: Group, state: Tensor) -> _Chunk:
        chunk = _Chunk(*(group.take(x, dtype) for x in (k, v, g)))
        chunk.s0 = group.scan(chunk.write(), chunk.last, state)
        return chunk

    for group, state in pieces.walk_back(s, advance):
        chunk = advance(group, state)
        query, dy = group.take(q, dtype) * scale, group.take(d_output, dtype)
        d_end = group.scan_back(chunk.read_backward(query, dy), chunk.last, ds)
        dq, *others = chunk.backward(query, dy, d_end)
        for out, value in zip(grads, (dq * scale, *others), strict=True):
            group.put(out, value)
    dq, dk, dv, dg = grads
    return dq, dk, dv, dg, pieces.restored(ds)


@_backward.register_fake
def _(d_output, d_mean, q, k, v, g, mean, cu_seqlens, scale):
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = q.new_empty((rows, q.shape[2], v.shape[3], q.shape[3]), dtype=compute_dtype(q))
    return *(x.new_empty(x.shape) for x in (q, k, v, g)), state


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
