"""The CPU backend: fused forward and backward in Numba, bitwise the same for any number of threads.

One head of one sequence, with state M (information) and J (excess precision), both [V, K], and alpha_t = exp(g_t):

    M_t = alpha_t M_{t-1} + w_t k_t^T           J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T
    R_t = 1 / (J_t + prior)                     y_t = (M_t R_t) q_t             var_t = R_t q_t^2

The gradients walk t = T..1, from those of the final state (alpha_{T+1} = 1), with n_t = (dy_t q_t^T) R_t:

    dM_t = alpha_{t+1} dM_{t+1} + n_t           x_t = n_t M_t R_t + (dvar_t (q_t^2)^T) R_t^2
    dJ_t = alpha_{t+1} dJ_{t+1} - x_t           dprior = -sum x_t
    dq_t = (M_t R_t)^T dy_t + 2 q_t (R_t^T dvar_t)
    dk_t = dM_t^T w_t + 2 k_t (dJ_t^T beta_t)   dw_t = dM_t k_t                 dbeta_t = dJ_t k_t^2
    dg_t = alpha_t (<dM_t, M_{t-1}> + <dJ_t, J_{t-1}>)

The last line needs the earlier state but, unlike a running sum of differences, is exact beside alpha = 0.

Layout   The value rows of a head are cut into tiles of one SIMD vector (64 bytes: 16 rows of float32, 8 of float64),
         the last one padded. A tile is stored key by key with its rows along the lanes, so that y, dw and dbeta are
         sums of whole vectors; only dq and dk are sums over lanes. It stays in the L1 or L2 cache.
Tasks    One head of one sequence, or some of its tiles where heads are few; dq, dk and dg then have that many partial
         copies. The cut follows from the shapes alone and sums run in a fixed order: no bit depends on the threads.
Memory   Forward saves nothing. Backward stores the state of every S-th token in a sweep, then replays S tokens of one
         tile at a time and walks them back. S is what fits the L2 cache, or sqrt(T) if that is more, so that the
         scratch of a thread grows with sqrt(T) (2 K V + 32 K) elements: at K = 32, V = 64 in float32, 0.7 MB for
         T = 1024 and 6 MB for T = 65536.
Types    float64 for a float64 q, else float32; sums over tiles and tokens (dg, dprior) in float64. The only fast-math
         flag is "contract", which allows fused multiply-adds: infinities and NaNs behave as everywhere.
"""

# pyright: reportCallIssue=false
# (an @intrinsic is called without the typing context that it is defined with)

import functools
import logging
import math
import operator
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable
from torch import Tensor

from ..contract import compute_dtype
from .custom import register

VECTOR_BYTES = 64
BLOCK = 8  # tokens that forward copies to scratch at a time: with a small state they share the L1 cache
L2_BYTES = 1 << 19  # what a segment of backward may fill
MIN_TASKS = 8  # fewer heads than this are cut into several tasks each
INLINE_WORK = 1 << 18  # state elements x tokens below which waking threads costs more than it brings
ANNOUNCE_AFTER = 1.0  # seconds of compiling; loading from the disk cache takes less

logger = logging.getLogger("metaplastic")


# SIMD vectors for Numba. LLVM's own vectoriser does not keep a vector of sums in a register across an outer loop.
# A machine with narrower registers uses several of them for one vector.


class Lanes(types.Type):
    def __init__(self, dtype):
        self.dtype, self.count = dtype, 8 * VECTOR_BYTES // dtype.bitwidth
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, ir.VectorType(manager.lookup(lanes.dtype).get_value_type(), lanes.count))


def _define_operator(symbol, instruction):
    @type_callable(symbol)
    def _(context):
        return lambda left, right: left if isinstance(left, Lanes) and left == right else None

    @lower_builtin(symbol, Lanes, Lanes)
    def _(context, builder, signature, operands):
        return getattr(builder, instruction)(*operands)


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


def _shuffle(builder, left, right, lanes):
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _broadcast(builder, value, count):
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, value, ir.IntType(32)(0)), undefined, [0] * count)


def _pointer(context, builder, array_type, array, index, target=None):
    pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    return pointer if target is None else builder.bitcast(pointer, context.get_value_type(target).as_pointer())


def _add_halves(builder, left, right, half):
    """Folds every group of 2 * half lanes onto its first half; groups of left and right take turns in the result."""
    count = left.type.count
    starts = [start + source for start in range(0, count, 2 * half) for source in (0, count)]
    first = [start + lane for start in starts for lane in range(half)]
    second = [lane + half for lane in first]
    return builder.fadd(_shuffle(builder, left, right, first), _shuffle(builder, left, right, second))


def _masked(builder, lanes, operation, result, operands, count, default):
    """LLVM's masked load or store of the first `count` lanes; memory beyond them is not touched."""
    i32 = ir.IntType(32)
    numbers = ir.Constant(ir.VectorType(i32, lanes.count), list(range(lanes.count)))
    mask = builder.icmp_signed("<", numbers, _broadcast(builder, builder.trunc(count, i32), lanes.count))
    operands = [*operands, i32(lanes.dtype.bitwidth // 8), mask, *default]
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    name = f"llvm.masked.{operation}.v{lanes.count}f{lanes.dtype.bitwidth}.p0"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


@intrinsic
def splat(typing, value):
    """`value` in every lane."""

    def generate(context, builder, signature, arguments):
        return _broadcast(builder, *arguments, signature.return_type.count)

    return Lanes(value)(value), generate


@intrinsic
def spread(typing, array, index):
    """`array[index]` in every lane. As in `load` and `store` the index is not checked and does not wrap around."""

    def generate(context, builder, signature, arguments):
        return _broadcast(builder, builder.load(_pointer(context, builder, array, *arguments)), lanes.count)

    lanes = Lanes(array.dtype)
    return lanes(array, types.intp), generate


@intrinsic
def load(typing, array, index, count=None):
    """The vector at `array[index]`, or its first `count` lanes (it may have fewer) and zeros in the others."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments[:2], lanes)
        if count is None:
            return builder.load(pointer, align=array.dtype.bitwidth // 8)
        vector = context.get_value_type(lanes)
        return _masked(builder, lanes, "load", vector, [pointer], arguments[2], [ir.Constant(vector, None)])

    lanes = Lanes(array.dtype)
    return lanes(array, types.intp, types.Omitted(None) if count is None else types.intp), generate


@intrinsic
def store(typing, array, index, vector, count=None):
    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments[:2], vector)
        if count is None:
            builder.store(arguments[2], pointer, align=array.dtype.bitwidth // 8)
        else:
            _masked(builder, vector, "store", ir.VoidType(), [arguments[2], pointer], arguments[3], [])
        return context.get_dummy_value()

    return types.none(array, types.intp, vector, types.Omitted(None) if count is None else types.intp), generate


@intrinsic
def lane_sum(typing, vector):
    """The sum over the lanes, a scalar."""

    def generate(context, builder, signature, arguments):
        (total,) = arguments
        half = vector.count // 2
        while half:
            total = _add_halves(builder, total, total, half)
            half //= 2
        return builder.extract_element(total, ir.IntType(32)(0))

    return vector.dtype(vector), generate


@intrinsic
def lane_sums(typing, array):
    """Lane i is the sum over the lanes of the i-th vector in `array`, which holds as many of them as lanes."""

    def generate(context, builder, signature, arguments):
        places = [ir.IntType(64)(i * lanes.count) for i in range(lanes.count)]
        pointers = [_pointer(context, builder, array, *arguments, place, lanes) for place in places]
        vectors = [builder.load(pointer, align=array.dtype.bitwidth // 8) for pointer in pointers]
        while half := len(vectors) // 2:
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [_add_halves(builder, left, right, half) for left, right in pairs]
        return vectors[0]

    lanes = Lanes(array.dtype)
    return lanes(array), generate


# Kernels. Tensors arrive flat, [token, head, feature] with all sequences in one row, cut by `offsets`. In scratch, the
# features of a token are padded with zeros to whole vectors. A state is [sequence, head, tile, key, M or J, lane].
# -(-a // b) rounds a / b up.

_helper = njit(error_model="numpy", fastmath={"contract"})


def _kernel(function):
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # Numba finds no folder it can write to
        return njit(**options)(function)


@_helper
def _copy_in(block, source, at, stride, tokens, width):
    """`width` features of consecutive tokens. The features of one head are a thin slice of memory: read in place,
    line after line would miss the cache, or they would compete for the same few lines of it."""
    lanes = VECTOR_BYTES // block.itemsize
    to = 0
    for _ in range(tokens):
        for i in range(0, width, lanes):
            store(block, to, load(source, at + i, width - i))
            to += lanes
        at += stride


@_helper
def _copy_out(target, to, stride, block, tokens, width):
    lanes = VECTOR_BYTES // block.itemsize
    at = 0
    for _ in range(tokens):
        for i in range(0, width, lanes):
            store(target, to + i, load(block, at), width - i)
            at += lanes
        to += stride


@_helper
def _fetch(writes, inputs, token, tokens, heads, keys, values, v, rows):
    """What consecutive tokens write, to scratch: k, k^2, w and beta in padded rows, and alpha."""
    k_block, k2_block, w_block, beta_block, alpha_block = writes
    _, k, w, beta, alpha, _ = inputs
    lanes = VECTOR_BYTES // k.itemsize
    _copy_in(k_block, k, token * keys, heads * keys, tokens, keys)
    _copy_in(w_block, w, token * values + v, heads * values, tokens, rows)
    _copy_in(beta_block, beta, token * values + v, heads * values, tokens, rows)
    for i in range(0, tokens * -(-keys // lanes) * lanes, lanes):
        store(k2_block, i, load(k_block, i) * load(k_block, i))
    for s in range(tokens):
        alpha_block[s] = alpha[token + s * heads]


@_helper
def _advance(writes, tokens, row, pitch, keys, source, at, target, to, stride):
    """The recurrence on one tile, from the state source[at:]. The first token leaves target[to:], the next one the
    state `stride` after that (0: only the last state is kept)."""
    k_block, k2_block, w_block, beta_block, alpha_block = writes
    lanes = VECTOR_BYTES // target.itemsize
    key = 0
    for s in range(tokens):
        w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha_block, s)
        for i in range(keys):
            m, j = load(source, at + 2 * i * lanes), load(source, at + (2 * i + 1) * lanes)
            store(target, to + 2 * i * lanes, m * alpha_t + w_t * spread(k_block, key + i))
            store(target, to + (2 * i + 1) * lanes, j * alpha_t + beta_t * spread(k2_block, key + i))
        row += pitch
        key += -(-keys // lanes) * lanes
        source, at, to = target, to, to + stride


@_kernel
def _forward(inputs, offsets, state, output, variance, sizes, scratch, first, last):
    """`state` holds the initial states and is left with the final ones."""
    q, prior = inputs[0], inputs[5]
    heads, keys, values, group = sizes
    writes, (q_block, output_block, variance_block) = scratch[:5], scratch[5:]
    k_block, k2_block, w_block, beta_block, alpha_block = writes
    lanes = VECTOR_BYTES // q.itemsize
    key_pitch = -(-keys // lanes) * lanes
    groups = -(-values // (group * lanes))
    one = splat(q.dtype.type(1))
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group * lanes
        rows = min(group * lanes, values - v)
        pitch = -(-rows // lanes) * lanes
        start = ((n * heads + h) * -(-values // lanes) * lanes + v) * 2 * keys
        base = spread(prior, h)
        for t in range(offsets[n], offsets[n + 1], BLOCK):
            tokens, token = min(BLOCK, offsets[n + 1] - t), t * heads + h
            _fetch(writes, inputs, token, tokens, heads, keys, values, v, rows)
            _copy_in(q_block, q, token * keys, heads * keys, tokens, keys)
            for tile in range(0, pitch, lanes):
                for s in range(tokens):
                    row, key, at = s * pitch + tile, s * key_pitch, start + tile * 2 * keys
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha_block, s)
                    read, var = one - one, one - one
                    for i in range(key, key + keys):
                        m = load(state, at) * alpha_t + w_t * spread(k_block, i)
                        j = load(state, at + lanes) * alpha_t + beta_t * spread(k2_block, i)
                        store(state, at, m)
                        store(state, at + lanes, j)
                        r = one / (j + base)
                        read = read + m * r * spread(q_block, i)
                        if variance is not None:
                            var = var + r * (spread(q_block, i) * spread(q_block, i))
                        at += 2 * lanes
                    store(output_block, row, read)
                    store(variance_block, row, var)
            _copy_out(output, token * values + v, heads * values, output_block, tokens, rows)
            if variance is not None:
                _copy_out(variance, token * values + v, heads * values, variance_block, tokens, rows)


@_kernel
def _decode(inputs, states, finals, output, variance, sizes, scratch, first, last):
    """Sequences of one token, one head a task. The states are [row, key] as callers have them, keys along the lanes."""
    q, k, w, beta, alpha, prior = inputs
    heads, keys, values = sizes
    (information, excess), (final_information, final_excess) = states, finals
    one = splat(q.dtype.type(1))
    for token in range(first, last):
        base, alpha_t = spread(prior, token % heads), spread(alpha, token)
        for row in range(token * values, (token + 1) * values):
            w_t, beta_t = spread(w, row), spread(beta, row)
            read, var = one - one, one - one
            for i in range(0, keys, VECTOR_BYTES // q.itemsize):
                at, left = row * keys + i, keys - i
                q_t, k_t = load(q, token * keys + i, left), load(k, token * keys + i, left)
                m, j = w_t * k_t, beta_t * (k_t * k_t)
                if information.size:
                    m, j = load(information, at, left) * alpha_t + m, load(excess, at, left) * alpha_t + j
                store(final_information, at, m, left)
                store(final_excess, at, j, left)
                r = one / (j + base)
                read, var = read + m * r * q_t, var + r * (q_t * q_t)
            output[row] = lane_sum(read)
            if variance is not None:
                variance[row] = lane_sum(var)


@_helper
def _walk(scratch, tokens, row, pitch, keys, base, gradient, at, dg, dg_at, dg_stride, d_variance):
    """The gradients of `tokens` tokens from one tile, last token first. Adds to those of q, k and g; returns sum x."""
    k_block, k2_block, w_block, beta_block, alpha_block, q_block, dy_block, dvar_block = scratch[:8]
    dq_block, dk_block, dw_block, dbeta_block, dq_lanes, dk_lanes, replay = scratch[8:15]
    lanes = VECTOR_BYTES // gradient.itemsize
    size, key_pitch = 2 * keys * lanes, -(-keys // lanes) * lanes
    one = splat(gradient.dtype.type(1))
    zero = one - one
    total = 0.0
    for s in range(tokens - 1, -1, -1):
        place, before, to = row + s * pitch, s * size, at
        w_t, beta_t, dy_t = load(w_block, place), load(beta_block, place), load(dy_block, place)
        alpha_next = spread(alpha_block, s + 1)
        dw_t, dbeta_t, m_sum, j_sum, x_sum = zero, zero, zero, zero, zero
        for chunk in range(s * key_pitch, s * key_pitch + keys, lanes):
            for i in range(chunk, min(chunk + lanes, s * key_pitch + keys)):
                q_t, k_t = spread(q_block, i), spread(k_block, i)
                r = one / (load(replay, before + size + lanes) + base)
                mean = load(replay, before + size) * r
                n_t = q_t * dy_t * r
                x_t = n_t * mean
                dq_t = mean * dy_t
                if d_variance is not None:
                    dvar_t, spread_t = load(dvar_block, place), q_t * r
                    x_t = x_t + dvar_t * (spread_t * spread_t)
                    dq_t = dq_t + dvar_t * (spread_t + spread_t)
                dm = load(gradient, to) * alpha_next + n_t
                dj = load(gradient, to + lanes) * alpha_next - x_t
                store(gradient, to, dm)
                store(gradient, to + lanes, dj)
                store(dq_lanes, (i - chunk) * lanes, dq_t)
                store(dk_lanes, (i - chunk) * lanes, dm * w_t + dj * (beta_t * (k_t + k_t)))
                dw_t = dw_t + dm * k_t
                dbeta_t = dbeta_t + dj * spread(k2_block, i)
                m_sum = m_sum + dm * load(replay, before)
                j_sum = j_sum + dj * load(replay, before + lanes)
                x_sum = x_sum + x_t
                before += 2 * lanes
                to += 2 * lanes
            store(dq_block, chunk, load(dq_block, chunk) + lane_sums(dq_lanes))
            store(dk_block, chunk, load(dk_block, chunk) + lane_sums(dk_lanes))
        store(dw_block, place, dw_t)
        store(dbeta_block, place, dbeta_t)
        dg[dg_at + s * dg_stride] += lane_sum(m_sum + j_sum)
        total += lane_sum(x_sum)
    return total


@_kernel
def _backward(inputs, offsets, initial, gradient, d_output, d_variance, results, sums, sizes, scratch, first, last):
    """`gradient` holds the gradients of the final states and is left with those of the initial ones."""
    q, alpha, prior = inputs[0], inputs[4], inputs[5]
    dq, dk, dw, dbeta = results
    dg, dprior = sums
    heads, keys, values, group, segment = sizes
    writes, alpha_block, (q_block, dy_block, dvar_block) = scratch[:5], scratch[4], scratch[5:8]
    dq_block, dk_block, dw_block, dbeta_block, _, _, replay, entries = scratch[8:]
    lanes = VECTOR_BYTES // q.itemsize
    size, key_pitch = 2 * keys * lanes, -(-keys // lanes) * lanes
    groups = -(-values // (group * lanes))
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group * lanes
        rows = min(group * lanes, values - v)
        tiles = -(-rows // lanes)
        pitch = tiles * lanes
        start = ((n * heads + h) * -(-values // lanes) * lanes + v) * 2 * keys
        begin, end = offsets[n], offsets[n + 1]
        segments = -(-(end - begin) // segment)
        shift = task % groups * alpha.size  # to the partial sums of this group of tiles
        dprior[task] = 0

        for i in range(0, tiles * size, lanes):  # the state that each segment starts from
            store(entries, i, load(initial, start + i))
        for index in range(segments - 1):
            _fetch(writes, inputs, (begin + index * segment) * heads + h, segment, heads, keys, values, v, rows)
            for tile in range(tiles):
                at = (index * tiles + tile) * size
                _advance(writes, segment, tile * lanes, pitch, keys, entries, at, entries, at + tiles * size, 0)

        for index in range(segments - 1, -1, -1):
            t = begin + index * segment
            tokens, token = min(segment, end - t), t * heads + h
            _fetch(writes, inputs, token, tokens, heads, keys, values, v, rows)
            alpha_block[tokens] = alpha[token + tokens * heads] if t + tokens < end else 1
            _copy_in(q_block, q, token * keys, heads * keys, tokens, keys)
            _copy_in(dy_block, d_output, token * values + v, heads * values, tokens, rows)
            if d_variance is not None:
                _copy_in(dvar_block, d_variance, token * values + v, heads * values, tokens, rows)
            for i in range(tokens * key_pitch):
                dq_block[i] = dk_block[i] = 0
            for i in range(shift + token, shift + token + tokens * heads, heads):
                dg[i] = 0
            for tile in range(tiles):
                for i in range(0, size, lanes):
                    store(replay, i, load(entries, (index * tiles + tile) * size + i))
                _advance(writes, tokens, tile * lanes, pitch, keys, replay, 0, replay, size, size)
                at, base = start + tile * size, spread(prior, h)
                dprior[task] -= _walk(
                    scratch, tokens, tile * lanes, pitch, keys, base, gradient, at, dg, shift + token, heads, d_variance
                )
            _copy_out(dq, (shift + token) * keys, heads * keys, dq_block, tokens, keys)
            _copy_out(dk, (shift + token) * keys, heads * keys, dk_block, tokens, keys)
            _copy_out(dw, token * values + v, heads * values, dw_block, tokens, rows)
            _copy_out(dbeta, token * values + v, heads * values, dbeta_block, tokens, rows)
            for s in range(tokens):
                i = shift + token + s * heads
                dg[i] = alpha_block[s] * dg[i] if alpha_block[s] > 0 else 0  # 0 even if a long-forgotten state is huge

        if begin < end:
            for i in range(start, start + tiles * size, lanes):
                store(gradient, i, load(gradient, i) * spread(alpha, begin * heads + h))


# Threads. Numba's own parallel loops are no choice: their portable scheduler aborts when two Python threads enter it.

_compiled = set()
_compiling = threading.Lock()


@functools.cache
def _pool(process: int, helpers: int) -> ThreadPoolExecutor:
    """One per process, because threads do not survive a fork."""
    return ThreadPoolExecutor(helpers, thread_name_prefix="metaplastic")


def _compile(kernel, variant, *arguments):
    """Compiles, or loads from Numba's cache, at the first call of a variant; announces it when that takes long."""
    with _compiling:
        if (kernel, variant) in _compiled:
            return
        place = kernel.stats.cache_path
        kept = f"once: cached in {place}" if place else "in every process: no folder to cache it in"
        message = "compiling the Palimpsa CPU kernel %s for this machine (a few seconds, %s)"
        timer = threading.Timer(ANNOUNCE_AFTER, logger.warning, (message, kernel.__name__.strip("_"), kept))
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

    pool = _pool(os.getpid(), torch.get_num_threads() - 1)
    helpers = [pool.submit(drain) for _ in range(threads - 1)]
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
        _run(_decode, variant, arguments, (), dtype, sequences * heads, work)
    else:
        group = _group(sequences, heads, values, lanes)
        tiles = _to_tiles((information, excess_precision), shape, dtype)
        arguments = (inputs, cuts, _array(tiles, dtype), *reads, (heads, keys, values, group))
        padded, rows = -(-keys // lanes) * lanes, group * lanes
        scratch = [BLOCK * n for n in (padded, padded, rows, rows, 1, padded, rows, rows)]
        _run(_forward, variant, arguments, scratch, dtype, sequences * heads * -(-values // (group * lanes)), work)
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
    groups = -(-values // (group * lanes))
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
    _run(_backward, (dtype, d_variance is None), arguments, scratch, dtype, dprior.numel(), work)

    if groups > 1:
        dq, dk, dg = (functools.reduce(torch.add, x.chunk(groups)) for x in (dq, dk, dg))
    gradients = (dq if scale == 1 else dq * scale, dk, dw, dbeta, dg, dprior.sum((0, 2)))
    states = _from_tiles(gradient, shape)
    return *(d.to(x.dtype) for d, x in zip(gradients, (q, k, w, beta, g, prior), strict=True)), *states


apply = register("cpu", forward, backward)
