"""Tensors in, tensors out: what :mod:`.kernels` are given, and what is left to do after them.

Blocks follow from K, V and the dtype alone: nothing is tuned or compiled anew for another T, B or H.
"""

# pyright: reportIndexIssue=false, reportCallIssue=false
# (a function under triton.jit is launched: kernel[grid](...))

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import compute_dtype
from . import kernels

ELEMENT_BYTES_PER_WARP = 4096  # of one tile: 32 registers a thread
WARP_ROWS = 8  # fewer value rows in a block waste bandwidth
BACKWARD_ROWS = 32  # more rows: fewer partial sums to write; fewer: more programs, shorter waits between warps


class Blocks(NamedTuple):
    """A tile of ``keys`` x ``rows`` that ``warps`` hold; ``count`` tiles make a state."""

    keys: int
    rows: int
    count: int
    warps: int

    @property
    def options(self) -> dict[str, int]:
        return {"BK": self.keys, "BV": self.rows, "num_warps": self.warps}


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _blocks(keys: int, values: int, itemsize: int, rows: int) -> Blocks:
    """At most ``rows`` value rows, fewer if that leaves none of a block unused."""
    keys = max(16, _power(keys))
    divisor = values & -values
    rows = min(rows, divisor if divisor >= WARP_ROWS else max(WARP_ROWS, _power(values)))
    return Blocks(keys, rows, -(-values // rows), max(1, keys * rows * itemsize // ELEMENT_BYTES_PER_WARP))


def forward_blocks(keys: int, values: int, itemsize: int) -> Blocks:
    """One warp where possible: it never waits for another."""
    rows = ELEMENT_BYTES_PER_WARP // (itemsize * max(16, _power(keys)))
    return _blocks(keys, values, itemsize, max(WARP_ROWS, rows))


def backward_blocks(keys: int, values: int, itemsize: int) -> Blocks:
    return _blocks(keys, values, itemsize, BACKWARD_ROWS)


@functools.lru_cache(maxsize=64)
def _sequences(cuts: tuple[int, ...], group: int, device: torch.device) -> tuple[Tensor, int]:
    """int64 ``[N, 4]``: first token, tokens, tokens in a span, first slot for a saved state; the number of slots."""
    table, slot = [], 0
    for start, end in itertools.pairwise(cuts):
        span = group * max(1, round(math.sqrt((end - start) / group)))
        table.append((start, end - start, span, slot))
        slot += -(-(end - start) // span) + -(-min(span, end - start) // group)
    return torch.tensor(table, dtype=torch.int64).reshape(-1, 4).to(device, non_blocking=True), slot


def _cuts(q: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if offsets is None:
        return tuple(n * q.shape[1] for n in range(q.shape[0] + 1))
    return tuple(offsets.tolist())


def _leaves_gaps(q: Tensor, cuts: tuple[int, ...]) -> bool:
    """Whether no program writes some tokens: those beyond the last sequence, or all if there are no keys."""
    return cuts[-1] < q.shape[0] * q.shape[1] or not q.shape[3]


def _inputs(q, k, w, beta, g, prior, scale, dtype):
    """Contiguous, in their own dtypes; scale and exp are applied once here rather than in every block."""
    q, k, w, beta, g, prior = (x.detach() for x in (q, k, w, beta, g, prior))
    if scale != 1:
        q = q.to(dtype) * scale
    return *(x.contiguous() for x in (q, k, w, beta)), g.to(dtype).exp().contiguous(), prior.to(dtype).contiguous()


def _states(states: tuple[Tensor | None, ...], shape: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """Copies with the value rows contiguous: [N, H, V, K], None for zeros, to [N, H, K, V]."""
    n, heads, values, keys = shape
    copies = [like.new_zeros((n, heads, keys, values)) for _ in states]
    for copy, state in zip(copies, states, strict=True):
        if state is not None:
            copy.copy_(state.detach().mT)
    return copies


def forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance):
    """Output [B,T,H,V] in q's dtype, variance [B,T,H,V] (empty unless asked for), final M and J [N,H,V,K]."""
    dtype, cuts = compute_dtype(q), _cuts(q, offsets)
    (heads, keys), values = q.shape[2:], w.shape[3]
    *inputs, alpha, prior = _inputs(q, k, w, beta, g, prior, scale, dtype)
    states = _states((information, excess_precision), (len(cuts) - 1, heads, values, keys), alpha)
    new = torch.zeros if _leaves_gaps(q, cuts) else torch.empty
    output = new(w.shape, dtype=q.dtype, device=q.device)
    variance = new(w.shape if output_variance else (0,), dtype=dtype, device=q.device)
    blocks = forward_blocks(keys, values, dtype.itemsize)
    if states[0].numel():
        table, _ = _sequences(cuts, kernels.GROUP, q.device)
        with torch.accelerator.device_index(q.device.index):
            kernels.forward_kernel[((len(cuts) - 1) * heads * blocks.count,)](
                *inputs, alpha, prior, *states, output, variance, table, heads,
                K=keys, V=values, VARIANCE=output_variance, **blocks.options,
            )  # fmt: skip
    return output, variance, *(s.mT.contiguous() for s in states)


def backward(
    d_output, d_variance, d_information, d_excess_precision,
    q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
):  # fmt: skip
    """Gradients of q, k, w, beta, g, prior and of both initial states, each in the dtype of its input."""
    dtype, cuts = compute_dtype(q), _cuts(q, offsets)
    (heads, keys), values = q.shape[2:], w.shape[3]
    shape = (len(cuts) - 1, heads, values, keys)
    *inputs, alpha, base = _inputs(q, k, w, beta, g, prior, scale, dtype)
    states = _states((information, excess_precision), shape, alpha)
    gradients = _states((d_information, d_excess_precision), shape, alpha)
    blocks = backward_blocks(keys, values, dtype.itemsize)
    new = torch.zeros if _leaves_gaps(q, cuts) else torch.empty

    def parts(x: Tensor) -> Tensor:
        kept = x.dtype if blocks.count == 1 and (x is not q or scale == 1) else dtype
        return new((blocks.count, *x.shape), dtype=kept, device=x.device)

    dq, dk, dg = parts(q), parts(k), parts(g)
    dw, dbeta = (new(x.shape, dtype=x.dtype, device=x.device) for x in (w, beta))
    table, slots = _sequences(cuts, kernels.GROUP, q.device)
    d_prior = alpha.new_zeros((slots, heads, values))
    if states[0].numel():
        saved = alpha.new_empty((slots, heads, blocks.count, 2, keys, blocks.rows))
        d_output = d_output.contiguous()
        d_variance = d_output if d_variance is None else d_variance.contiguous()
        with torch.accelerator.device_index(q.device.index):
            kernels.backward_kernel[(shape[0] * heads * blocks.count,)](
                *inputs, alpha, base, *states, d_output, d_variance, table, saved,
                dq, dk, dw, dbeta, dg, *gradients, d_prior, heads, g.shape[0] * g.shape[1],
                K=keys, V=values, GROUP=kernels.GROUP, VARIANCE=d_variance is not d_output, **blocks.options,
            )  # fmt: skip

    dq, dk, dg = (x[0] if len(x) == 1 else x.sum(0) for x in (dq, dk, dg))
    if scale != 1:
        dq *= scale
    sums = (dq, dk, dw, dbeta, dg, d_prior.sum((0, 2)))
    sums = (d.to(x.dtype) for d, x in zip(sums, (q, k, w, beta, g, prior), strict=True))
    return *sums, *(s.mT.contiguous() for s in gradients)
