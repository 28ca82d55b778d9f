r"""The chunked backend: the WY form of the delta rule in plain PyTorch, on any device, for all chunks at once
(``ops/pieces.py``).

Inside a chunk with entry state M_0 and R[t, s], entry, tail, last as in ``ops/decay.py`` (x is an elementwise product):

    (I + N) u = beta x (V - (entry x K) M_0)        N[t, s] = beta_t <k_t, R k_s> for s < t: what s wrote, t subtracts
    output = (entry x Q) M_0 + <Q, R K> u           M_end = last x M_0 + (tail x K)^T u

With A = (I + N)^-1 beta x V and B = (I + N)^-1 beta x (entry x K), which need no entry state, u = A - B M_0 and

    M_end = (diag(last) - (tail x K)^T B) M_0 + (tail x K)^T A

is all that goes from chunk to chunk: one product of a [K, K] matrix for each. The gradient goes back through its
transpose. The backward solves the transposed system; the entry state of every chunk and the writes u are kept for it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules import delta as rule
from ..chunks import budget, chunk_size, crossing_sums
from ..contract import compute_dtype, full_precision, read_offsets
from ..decay import Decay
from ..pieces import Group, Pieces
from . import check_values

Optional = Tensor | None


class _Chunk:
    """k [n, H, C, K], v [n, H, C, V], beta [n, H, C, 1], g [n, H, C, 1 or K]."""

    def __init__(self, k: Tensor, v: Tensor, beta: Tensor, g: Tensor):
        self.k, self.v, self.beta, self.decay = k, v, beta, Decay(g)
        # Products with a triangle of ones: at this size several times as fast as tril.
        self.lower = torch.ones(k.shape[-2], k.shape[-2], dtype=k.dtype, device=k.device).tril()
        self.strictly_lower = self.lower.tril(-1)
        self.entered = self.decay.entry * k
        self.overlap = self.decay.pairs(k, k) * self.strictly_lower
        self.system = beta * self.overlap
        self.leaving = self.decay.tail * k

    def solve(self, right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.system, right, upper=False, unitriangular=True)

    def transition(self, faded: Tensor) -> Tensor:
        """What the final state is of the entry state, [n, H, K, K], given B."""
        eye = torch.eye(faded.shape[-1], dtype=faded.dtype, device=faded.device)
        return self.decay.last * eye - self.leaving.mT @ faded

    def enter(self, group: Group, state: Tensor) -> tuple[Tensor, Tensor]:
        """Entry states [n, H, K, V] and writes u; ``state``, before the group, becomes that after it."""
        if len(group.counts) == 1:  # nothing has to be known before the state is
            now = state[: group.counts[0]]
            entry = now.clone()
            written = self.solve(self.beta * (self.v - self.entered @ entry))
            now.copy_(self.decay.last.mT * entry + self.leaving.mT @ written)
            return entry, written
        solved = self.solve(self.beta * torch.cat([self.v, self.entered], -1))
        fresh, faded = solved[..., : self.v.shape[-1]], solved[..., self.v.shape[-1] :]
        entry = group.scan(self.leaving.mT @ fresh, self.transition(faded), state, _advance)
        return entry, fresh - faded @ entry

    def leave(self, group: Group, q: Tensor, d_output: Tensor, d_read: Tensor, d_state: Tensor) -> Tensor:
        """The gradient of the final states, ``d_state`` being that of the state after the group; it becomes that of the
        state before it. ``d_read`` as in :meth:`backward`."""
        if len(group.counts) == 1:
            return d_state[: group.counts[0]].clone()  # the caller finds what it becomes, from the gradient of v
        faded = self.solve(self.beta * self.entered)
        d_entry = (self.decay.entry * q).mT @ d_output - faded.mT @ d_read
        return group.scan_back(d_entry, self.transition(faded).mT, d_state, _advance)

    def read(self, q: Tensor, mean: Tensor, written: Tensor) -> Tensor:
        return (self.decay.entry * q) @ mean + self.decay.pairs(q, self.k) @ written

    def backward(
        self, q: Tensor, d_output: Tensor, d_read: Tensor, d_mean: Tensor, mean: Tensor, written: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, beta and g, given those of the outputs, of the writes as far as the chunk itself reads
        them (``d_read``) and of the final state."""
        k, decay = self.k, self.decay
        residual = self.v - self.entered @ mean
        d_written = d_read + self.leaving @ d_mean
        d_scaled = torch.linalg.solve_triangular(self.system.mT, d_written, upper=True, unitriangular=True)
        d_system = -(d_scaled @ written.mT) * self.strictly_lower
        d_beta = (d_scaled * residual).sum(-1, keepdim=True) + (d_system * self.overlap).sum(-1, keepdim=True)
        d_residual, d_overlap = self.beta * d_scaled, self.beta * d_system
        d_pairs = (d_output @ written.mT) * self.lower
        from_q, from_k = decay.over_earlier(d_pairs, k), decay.over_earlier(d_overlap, k)
        carried = decay.tail * (written @ d_mean.mT)
        later = decay.over_later(d_pairs, q) + decay.over_later(d_overlap, k) + carried
        reads, entering = d_output @ mean.mT, -d_residual @ mean.mT
        dq = from_q + decay.entry * reads
        dk = from_k + later + decay.entry * entering
        kept = (decay.last.mT * d_mean * mean).sum(-1)[..., None, :]
        dg = self._decay_gradient(q, d_pairs, d_overlap, decay.entry * (q * reads + k * entering), k * carried, kept)
        return dq, dk, d_residual, d_beta, dg

    def entering(self, q: Tensor, d_output: Tensor, d_mean: Tensor, d_residual: Tensor) -> Tensor:
        """The gradient of the entry state; that of the residual is that of v."""
        return self.decay.last.mT * d_mean + (self.decay.entry * q).mT @ d_output - self.entered.mT @ d_residual

    def _decay_gradient(self, q, d_pairs, d_overlap, reads, writes, kept) -> Tensor:
        """Sums every term whose decay contains g_u: pairs s < u <= t, reads of M_0 at t >= u, writes at s < u that
        reach the end, and M_0 itself."""
        decay, k = self.decay, self.k
        if decay.per_key:
            both = torch.einsum("...ts,...tk->...kts", d_pairs, q) + torch.einsum("...ts,...tk->...kts", d_overlap, k)
            pairs = crossing_sums(both * decay.ratio * k.mT[..., None, :]).mT
        else:
            reads, writes, kept = (x.sum(-1, keepdim=True) for x in (reads, writes, kept))
            pairs = crossing_sums(d_pairs * decay.pairs(q, k) + d_overlap * self.overlap)[..., None]
        before = F.pad(writes[..., :-1, :].cumsum(-2), (0, 0, 1, 0))
        return pairs + reads.flip(-2).cumsum(-2).flip(-2) + before + kept


def _advance(added: Tensor, transition: Tensor, state: Tensor, out: Tensor) -> None:
    torch.baddbmm(*(x.flatten(0, 1) for x in (added, transition, state)), out=out.flatten(0, 1))


def _chunk_size(rows: int, heads: int, key_size: int, per_key: bool, device: torch.device) -> int:
    # Per key the pairwise decays are [K, C, C]; a CPU is the fastest with few of them.
    largest = 64 if not per_key else 8 if device.type == "cpu" else 16
    return chunk_size(rows * heads * key_size * (16 if per_key else 1), device, largest)


def _at_once(device: torch.device, per_key: bool) -> int:
    """Elements of one array. Chunks with few numbers are the faster for being many at once; with large ones a CPU gains
    nothing from it and pays for their transitions."""
    return 1 << 16 if device.type == "cpu" and not per_key else budget(device)


def _prepare(q, k, v, beta, g, mean, cu_seqlens):
    offsets = read_offsets("delta", cu_seqlens, q.shape[1])
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    heads, keys, values = q.shape[2], q.shape[3], v.shape[3]
    shape, dtype = (rows, heads, keys, values), compute_dtype(q)
    state = q.new_zeros(shape, dtype=dtype) if mean is None else mean.to(dtype)
    size = _chunk_size(rows, heads, keys, g.dim() == 4, q.device)
    pairs = size * size * (keys if g.dim() == 4 else 1)
    of_a_piece = heads * max(keys * max(keys, values), pairs, size * (keys + values))
    most = _at_once(q.device, g.dim() == 4) // max(1, of_a_piece)
    inputs = [k, v, beta[..., None], g if g.dim() == 4 else g[..., None]]
    return offsets, inputs, state, Pieces(q.shape[0], q.shape[1], offsets, size, most, q.device)


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
        offsets, inputs, state, pieces = _prepare(q, k, v, beta, g, mean, cu_seqlens)
        check_values(beta, g, None if offsets is None else int(offsets[-1]))
        size = _chunk_size(len(state), q.shape[2], q.shape[3], g.dim() == 4, q.device) if keep else 0
        entries, written = _room(q, v, len(state), size, offsets is not None)
        if q.shape[1] == 1 and offsets is None and not keep:  # decoding: one step needs none of the chunk's machinery
            query, *given = [x[:, 0].to(state.dtype) for x in (q, k, v, beta, g)]
            final = rule.step(rule.DeltaState(state), *given)
            output = rule.readout(final, query * scale)[0][:, None].to(q.dtype)
            return output, final.mean, entries, written
        output, state, begin = q.new_zeros(v.shape), pieces.ordered(state), 0
        for group in pieces.groups():
            chunk = _Chunk(*(group.take(x, state.dtype) for x in inputs))
            entry, u = chunk.enter(group, state)
            group.put(output, chunk.read(group.take(q, state.dtype) * scale, entry, u))
            if keep:
                entries[begin : begin + len(entry)] = entry
                begin += len(entry)
                group.put(written, u)
        entries[begin:] = 0
        return output, pieces.restored(state), entries, written


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
        _, inputs, state, pieces = _prepare(q, k, v, beta, g, mean, cu_seqlens)
        dtype = state.dtype
        d_state = torch.zeros_like(state) if d_mean is None else pieces.ordered(d_mean.to(dtype))
        grads = [x.new_zeros(x.shape) for x in (q, k, v, beta, g)]
        end = sum(pieces.counts)
        for group in reversed(pieces.groups()):
            entry = entries[end - sum(group.counts) : end]
            end -= len(entry)
            query, dy, u = group.take(q, dtype) * scale, group.take(d_output, dtype), group.take(written, dtype)
            chunk = _Chunk(*(group.take(x, dtype) for x in inputs))
            d_read = chunk.decay.pairs(query, chunk.k).mT @ dy
            d_end = chunk.leave(group, query, dy, d_read, d_state)
            dq, dk, dv, d_beta, dg = chunk.backward(query, dy, d_read, d_end, entry, u)
            if len(group.counts) == 1:
                d_state[: len(entry)] = chunk.entering(query, dy, d_end, dv)
            for out, value in zip(grads, (dq * scale, dk, dv, d_beta, dg), strict=True):
                group.put(out, value if out.dim() == 4 else value[..., 0])
        dq, dk, dv, d_beta, dg = grads
        return dq, dk, dv, d_beta, dg, pieces.restored(d_state)


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
