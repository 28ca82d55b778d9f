"""The CPU backend: cuts the work of :mod:`.cpu_kernels` into tasks and runs them on threads.

How the work is cut follows from the shapes alone and every sum runs in a fixed order: no bit of any result depends on
the number of threads. Equations, layout and memory: see the kernels.
"""

import contextlib
import functools
import logging
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ..contract import compute_dtype
from .cpu_kernels import BLOCK, backward_kernel, decode_kernel, forward_kernel
from .custom import register
from .lanes import VECTOR_BYTES

L2_BYTES = 1 << 19  # what a segment of backward may fill
MIN_TASKS = 8  # fewer heads than this are cut into several tasks each
INLINE_WORK = 1 << 18  # state elements x tokens below which waking threads costs more than it brings
ANNOUNCE_AFTER = 4.0  # seconds of compiling; loading from the disk cache takes less, on a busy machine too

logger = logging.getLogger("metaplastic")

# Threads. Numba's own parallel loops are no choice: their portable scheduler aborts when two Python threads enter it.

_compiled = set()
_compiling = threading.Lock()


@functools.cache
def _pool(process: int, helpers: int) -> ThreadPoolExecutor:
    """One per process, because threads do not survive a fork."""
    return ThreadPoolExecutor(helpers, thread_name_prefix="metaplastic")


def _describe(kernel, variant):
    """ "forward, float32, with variance": what sets this compilation apart from the others."""
    dtype, with_variance = variant
    part = {"decode_kernel": "forward of single tokens"}.get(kernel.__name__, kernel.__name__.removesuffix("_kernel"))
    return f"{part}, {str(dtype).removeprefix('torch.')}, {'with' if with_variance else 'without'} variance"


def _compile(kernel, variant, *arguments):
    """Compiles, or loads from Numba's cache, at the first call of a variant; announces it when that takes long."""
    with _compiling:
        if (kernel, variant) in _compiled:
            return
        place = kernel.stats.cache_path
        kept = f"once: cached in {place}" if place else "in every process: no folder to cache it in"
        message = "compiling the Palimpsa CPU kernel for this machine: %s (a few seconds, %s)"
        timer = threading.Timer(ANNOUNCE_AFTER, logger.warning, (message, _describe(kernel, variant), kept))
        timer.daemon = True
        timer.start()
        try:
            kernel(*arguments, 0, 0)
        finally:
            timer.cancel()
        _compiled.add((kernel, variant))


def _run(kernel, variant, arguments, scratch_sizes, dtype, tasks, work):
    """kernel(*arguments, scratch, first, last) over all tasks; every thread takes the next few when it is free."""

    def scratch():
        return tuple(torch.empty(size, dtype=dtype).numpy() for size in scratch_sizes)  # torch aligns to 64 bytes

    if (kernel, variant) not in _compiled:
        _compile(kernel, variant, *arguments, scratch())
    threads = min(torch.get_num_threads(), tasks) if work >= INLINE_WORK else 1
    if threads <= 1:
        kernel(*arguments, scratch(), 0, tasks)
        return
    step = max(1, tasks // (8 * threads))
    ranges = iter([(first, min(first + step, tasks)) for first in range(0, tasks, step)])

    def drain():
        own = scratch()
        for first, last in ranges:
            kernel(*arguments, own, first, last)

    pool, helpers = _pool(os.getpid(), torch.get_num_threads() - 1), []
    with contextlib.suppress(RuntimeError):  # when the interpreter is shutting down, this thread does it all
        helpers += [pool.submit(drain) for _ in range(threads - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():  # still queued behind another caller: nothing is left for it
            helper.result()


# Tensors in, tensors out.


def _array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    x = x.detach() if x.dtype == dtype else x.detach().to(dtype)
    return x.contiguous().numpy().reshape(-1)


def _inputs(q, k, w, beta, g, prior, scale, dtype):
    q, k, w, beta, g, prior = (_array(x, dtype) for x in (q, k, w, beta, g, prior))
    with np.errstate(all="ignore"):  # tokens beyond the last sequence may hold anything
        return q if scale == 1 else q * q.dtype.type(scale), k, w, beta, np.exp(g), prior


def _cuts(q: Tensor, offsets: Tensor | None) -> np.ndarray:
    if offsets is None:
        return np.arange(q.shape[0] + 1, dtype=np.int64) * q.shape[1]
    return offsets.contiguous().numpy()


def _to_tiles(states, shape, dtype) -> Tensor:
    """M and J (or their gradients) [N,H,V,K], None for zeros, as the kernels keep them: [N,H,tiles,K,2,lanes]."""
    sequences, heads, values, keys = shape
    lanes = VECTOR_BYTES // dtype.itemsize
    tiles = torch.zeros((sequences, heads, -(-values // lanes), keys, 2, lanes), dtype=dtype)
    for part, state in zip(tiles.unbind(-2), states, strict=True):
        if state is not None:
            padded = torch.nn.functional.pad(state.detach(), (0, 0, 0, -values % lanes))
            part.copy_(padded.unflatten(2, (-1, lanes)).mT)
    return tiles


def _from_tiles(tiles: Tensor, shape) -> list[Tensor]:
    states = [torch.empty(shape, dtype=tiles.dtype) for _ in range(2)]
    for part, state in zip(tiles.unbind(-2), states, strict=True):
        state.copy_(part.mT.flatten(2, 3)[:, :, : shape[2]])
    return states


def _group(sequences, heads, values, lanes):
    """Tiles a task takes: all of a head, whose sums over rows then need no second buffer, unless heads are few."""
    tiles = -(-values // lanes)
    return max(1, min(tiles, tiles * heads * sequences // MIN_TASKS))


def forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance):
    """Output [B,T,H,V], variance [B,T,H,V] (empty unless asked for), final M and J [N,H,V,K]."""
    dtype, cuts = compute_dtype(q), _cuts(q, offsets)
    sequences, (heads, keys), values = len(cuts) - 1, q.shape[2:], w.shape[3]
    shape, lanes = (sequences, heads, values, keys), VECTOR_BYTES // dtype.itemsize
    inputs = _inputs(q, k, w, beta, g, prior, scale, dtype)
    new = torch.empty if offsets is None else torch.zeros  # zero beyond the last sequence
    output = new(w.shape, dtype=dtype)
    variance = new(w.shape if output_variance else 0, dtype=dtype)
    reads = (_array(output, dtype), _array(variance, dtype) if output_variance else None)
    variant, work = (dtype, output_variance), g.numel() * keys * values
    if (np.diff(cuts) == 1).all():
        final = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        states = tuple(_array(torch.empty(0) if x is None else x, dtype) for x in (information, excess_precision))
        arguments = (inputs, states, tuple(_array(x, dtype) for x in final), *reads, (heads, keys, values))
        _run(decode_kernel, variant, arguments, (), dtype, sequences * heads, work)
    else:
        group = _group(sequences, heads, values, lanes)
        tiles = _to_tiles((information, excess_precision), shape, dtype)
        arguments = (inputs, cuts, _array(tiles, dtype), *reads, (heads, keys, values, group))
        padded, rows = -(-keys // lanes) * lanes, group * lanes
        scratch = [BLOCK * n for n in (padded, padded, rows, rows, 1, padded, rows, rows)]
        _run(
            forward_kernel, variant, arguments, scratch, dtype, sequences * heads * -(-values // (group * lanes)), work
        )
        final = _from_tiles(tiles, shape)
    return output.to(q.dtype), variance, *final


def backward(
    d_output, d_variance, d_information, d_excess_precision,
    q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
):  # fmt: skip
    """Gradients of q, k, w, beta, g, prior and of both initial states, each in the dtype of its input."""
    dtype, cuts = compute_dtype(q), _cuts(q, offsets)
    sequences, (heads, keys), values = len(cuts) - 1, q.shape[2:], w.shape[3]
    shape, lanes = (sequences, heads, values, keys), VECTOR_BYTES // dtype.itemsize
    inputs = _inputs(q, k, w, beta, g, prior, scale, dtype)
    initial = _to_tiles((information, excess_precision), shape, dtype)
    gradient = _to_tiles((d_information, d_excess_precision), shape, dtype)
    group = _group(sequences, heads, values, lanes)
    groups = max(1, -(-values // (group * lanes)))
    new = torch.empty if offsets is None else torch.zeros
    dq, dk = (new((groups * x.shape[0], *x.shape[1:]), dtype=dtype) for x in (q, k))
    dg = new((groups * g.shape[0], *g.shape[1:]), dtype=torch.float64)
    dw, dbeta = (new(w.shape, dtype=dtype) for _ in range(2))
    dprior = torch.empty((sequences, heads, groups), dtype=torch.float64)

    longest = int(np.diff(cuts).max(initial=1))
    padded, rows = -(-keys // lanes) * lanes, group * lanes
    per_token = (padded, padded, rows, rows, 1, padded, rows, rows, padded, padded, rows, rows)
    fitting = L2_BYTES // ((sum(per_token) + 2 * keys * lanes) * dtype.itemsize)
    segment = min(longest, max(16, min(64, fitting), math.isqrt(longest)))
    scratch = [(segment + 1) * n for n in per_token] + [lanes * lanes, lanes * lanes]
    scratch += [(segment + 1) * 2 * keys * lanes, -(-longest // segment) * 2 * keys * rows]
    outer = (_array(d_output, dtype), None if d_variance is None else _array(d_variance, dtype))
    results = tuple(_array(x, dtype) for x in (dq, dk, dw, dbeta))
    sums = (_array(dg, torch.float64), _array(dprior, torch.float64))
    sizes = (heads, keys, values, group, segment)
    arguments = (inputs, cuts, _array(initial, dtype), _array(gradient, dtype), *outer, results, sums, sizes)
    work = 4 * g.numel() * keys * values
    _run(backward_kernel, (dtype, d_variance is not None), arguments, scratch, dtype, dprior.numel(), work)

    if groups > 1:
        dq, dk, dg = (functools.reduce(torch.add, x.chunk(groups)) for x in (dq, dk, dg))
    gradients = (dq if scale == 1 else dq * scale, dk, dw, dbeta, dg, dprior.sum((0, 2)))
    states = _from_tiles(gradient, shape)
    return *(d.to(x.dtype) for d, x in zip(gradients, (q, k, w, beta, g, prior), strict=True)), *states


apply = register("cpu", forward, backward)
