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
         sums of whole vectors, and only dq and dk are sums over lanes. It stays in the L1 or L2 cache.
Tasks    One head of one sequence, or some of its tiles where heads are few. The cut follows from the shapes alone and
         partial sums of dq, dk and dg are added in a fixed order: the number of threads changes no bit.
Memory   Forward saves nothing. Backward stores the state of every S-th token in a sweep, then replays S tokens of one
         tile at a time and walks them back. S fits the L2 cache but is at least sqrt(T), so that the scratch of a
         thread grows as sqrt(T) (2 K V + 32 K) elements (under 1 MB at T = 1024, K = 32, V = 64).
Types    float64 for a float64 q, else float32; dg and dprior are summed over tiles and tokens in float64. The one
         fast-math flag, "contract", allows fused multiply-adds: infinities and NaNs behave as in PyTorch.
"""

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
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable
from torch import Tensor

from ..contract import compute_dtype
from .custom import register

FORWARD_BLOCK = 8  # tokens copied to contiguous scratch at a time; with a small state they share the L1 cache
L2_BYTES = 1 << 19  # what a segment of the backward pass may fill
MIN_TASKS = 16  # heads below this number are cut into several tasks each
INLINE_WORK = 1 << 18  # state elements x tokens below which waking threads costs more than it brings

logger = logging.getLogger("metaplastic")


# SIMD vectors for Numba. LLVM's own vectoriser cannot hold the sum over an outer loop in a vector register.
# Machines with narrower registers than 64 bytes use several of them per vector.


class Lanes(types.Type):
    def __init__(self, dtype):
        self.dtype, self.count = dtype, 512 // dtype.bitwidth
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


@intrinsic
def splat(typing, value):
    """`value` in every lane."""

    def generate(context, builder, signature, arguments):
        return _broadcast(builder, *arguments, signature.return_type.count)

    return Lanes(value)(value), generate


@intrinsic
def spread(typing, array, index):
    """`array[index]` in every lane; like `load` and `store` it takes a flat index and does not check it."""

    def generate(context, builder, signature, arguments):
        return _broadcast(builder, builder.load(_pointer(context, builder, array, *arguments)), lanes.count)

    lanes = Lanes(array.dtype)
    return lanes(array, types.intp), generate


@intrinsic
def load(typing, array, index):
    def generate(context, builder, signature, arguments):
        return builder.load(_pointer(context, builder, array, *arguments, lanes), align=array.dtype.bitwidth // 8)

    lanes = Lanes(array.dtype)
    return lanes(array, types.intp), generate


@intrinsic
def store(typing, array, index, vector):
    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, array, *arguments[:2], vector)
        builder.store(arguments[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), generate


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
    """Lane i is the sum over the lanes of the i-th vector in `array`, which holds as many vectors as they have lanes."""

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
# features of a token are padded with zeros to whole vectors; a tile is M of key 0, J of key 0, M of key 1, ...

_helper = njit(error_model="numpy", fastmath={"contract"})


def _kernel(function):
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # Numba finds no folder it can write to
        return njit(**options)(function)


@_helper
def _copy_in(block, source, start, stride, tokens, width):
    """`width` features of consecutive tokens, `stride` apart. Used in place they would miss the cache one by one."""
    lanes = 64 // block.itemsize
    pitch = (width + lanes - 1) // lanes * lanes
    for token in range(tokens):
        at, to = start + token * stride, token * pitch
        for i in range(0, width - lanes + 1, lanes):
            store(block, to + i, load(source, at + i))
        for i in range(width // lanes * lanes, pitch):
            block[to + i] = source[at + i] if i < width else 0


@_helper
def _copy_out(target, start, stride, tokens, width, block):
    lanes = 64 // block.itemsize
    pitch = (width + lanes - 1) // lanes * lanes
    for token in range(tokens):
        at, to = token * pitch, start + token * stride
        for i in range(0, width - lanes + 1, lanes):
            store(target, to + i, load(block, at + i))
        for i in range(width // lanes * lanes, width):
            target[to + i] = block[at + i]


@_helper
def _tiles_from_rows(tiles, information, excess, start, rows, keys):
    """A state as the caller has it, [rows, keys], to tiles. An empty array stands for zeros."""
    lanes = 64 // tiles.itemsize
    tiles[: (rows + lanes - 1) // lanes * 2 * keys * lanes] = 0
    if information.size:
        for row in range(rows):
            to = row // lanes * 2 * keys * lanes + row % lanes
            for i in range(keys):
                tiles[to + 2 * i * lanes] = information[start + row * keys + i]
                tiles[to + (2 * i + 1) * lanes] = excess[start + row * keys + i]


@_helper
def _rows_from_tiles(information, excess, start, rows, keys, tiles):
    lanes = 64 // tiles.itemsize
    for row in range(rows):
        at = row // lanes * 2 * keys * lanes + row % lanes
        for i in range(keys):
            information[start + row * keys + i] = tiles[at + 2 * i * lanes]
            excess[start + row * keys + i] = tiles[at + (2 * i + 1) * lanes]


@_helper
def _update(m, j, w, beta, alpha, k):
    return m * alpha + w * k, j * alpha + beta * (k * k)


@_helper
def _update_tile(target, to, source, at, k, key, keys, w, beta, alpha):
    """One token of the recurrence on one tile, from source[at:] to target[to:]."""
    lanes = 64 // target.itemsize
    for i in range(keys):
        place = 2 * i * lanes
        m, j = _update(load(source, at + place), load(source, at + place + lanes), w, beta, alpha, spread(k, key + i))
        store(target, to + place, m)
        store(target, to + place + lanes, j)


@_helper
def _decode(inputs, begin, h, start, rows, v, output, variance, final_information, final_excess, sizes):
    """A sequence of one token: the state is used as it lies in memory, keys along the lanes."""
    q, k, w, beta, alpha, prior, information, excess = inputs
    heads, keys, values = sizes
    lanes = 64 // q.itemsize
    token = begin * heads + h
    one, zero = q.dtype.type(1), q.dtype.type(0)
    for row in range(rows):
        w_t, beta_t = w[token * values + v + row], beta[token * values + v + row]
        read, var, read_lanes, var_lanes = zero, zero, splat(zero), splat(zero)
        at = start + row * keys
        for i in range(0, keys - lanes + 1, lanes):
            m, j = splat(zero), splat(zero)
            if information.size:
                m, j = load(information, at + i), load(excess, at + i)
            m, j = _update(m, j, splat(w_t), splat(beta_t), splat(alpha[token]), load(k, token * keys + i))
            store(final_information, at + i, m)
            store(final_excess, at + i, j)
            q_t, r = load(q, token * keys + i), splat(one) / (j + splat(prior[h]))
            read_lanes, var_lanes = read_lanes + m * r * q_t, var_lanes + r * (q_t * q_t)
        for i in range(keys // lanes * lanes, keys):
            m, j = zero, zero
            if information.size:
                m, j = information[at + i], excess[at + i]
            m, j = _update(m, j, w_t, beta_t, alpha[token], k[token * keys + i])
            final_information[at + i], final_excess[at + i] = m, j
            q_t, r = q[token * keys + i], one / (j + prior[h])
            read, var = read + m * r * q_t, var + r * (q_t * q_t)
        output[token * values + v + row] = lane_sum(read_lanes) + read
        if variance is not None:
            variance[token * values + v + row] = lane_sum(var_lanes) + var


@_kernel
def _forward(inputs, offsets, output, variance, final_information, final_excess, sizes, group, scratch, first, last):
    q, k, w, beta, alpha, prior, information, excess = inputs
    heads, keys, values = sizes
    q_block, k_block, w_block, beta_block, output_block, variance_block, state = scratch
    lanes = 64 // q.itemsize
    key_pitch = (keys + lanes - 1) // lanes * lanes
    groups = (values + group - 1) // group
    one = splat(q.dtype.type(1))
    zero = one - one
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group
        rows = min(group, values - v)
        pitch = (rows + lanes - 1) // lanes * lanes
        start = ((n * heads + h) * values + v) * keys
        begin, end = offsets[n], offsets[n + 1]
        if end - begin == 1:
            _decode(inputs, begin, h, start, rows, v, output, variance, final_information, final_excess, sizes)
            continue
        base = splat(prior[h])
        _tiles_from_rows(state, information, excess, start, rows, keys)
        for t in range(begin, end, FORWARD_BLOCK):
            tokens = min(FORWARD_BLOCK, end - t)
            key_start, row_start = (t * heads + h) * keys, (t * heads + h) * values + v
            for block, source in ((q_block, q), (k_block, k)):
                _copy_in(block, source, key_start, heads * keys, tokens, keys)
            for block, source in ((w_block, w), (beta_block, beta)):
                _copy_in(block, source, row_start, heads * values, tokens, rows)
            for tile in range(0, pitch, lanes):
                for s in range(tokens):
                    row, key, at = s * pitch + tile, s * key_pitch, 2 * tile * keys
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha, (t + s) * heads + h)
                    read, var = zero, zero
                    for i in range(key, key + keys):
                        m, j = load(state, at), load(state, at + lanes)
                        m, j = _update(m, j, w_t, beta_t, alpha_t, spread(k_block, i))
                        store(state, at, m)
                        store(state, at + lanes, j)
                        r = one / (j + base)
                        read = read + m * r * spread(q_block, i)
                        if variance is not None:
                            var = var + r * (spread(q_block, i) * spread(q_block, i))
                        at += 2 * lanes
                    store(output_block, row, read)
                    if variance is not None:
                        store(variance_block, row, var)
            _copy_out(output, row_start, heads * values, tokens, rows, output_block)
            if variance is not None:
                _copy_out(variance, row_start, heads * values, tokens, rows, variance_block)
        _rows_from_tiles(final_information, final_excess, start, rows, keys, state)


@_kernel
def _backward(inputs, offsets, d_output, d_variance, results, dg, dprior, sizes, group, segment, scratch, first, last):
    q, k, w, beta, alpha, prior, information, excess = inputs
    d_information, d_excess, dq, dk, dw, dbeta = results  # of the states: gradients of the final one in, the first one out
    heads, keys, values = sizes
    q_block, k_block, dq_block, dk_block, w_block, beta_block, dy_block, dvar_block, dw_block, dbeta_block = scratch[:10]
    dq_lanes, dk_lanes, replay, gradient, entries = scratch[10:]
    lanes = 64 // q.itemsize
    size = 2 * keys * lanes  # of a tile
    key_pitch = (keys + lanes - 1) // lanes * lanes
    groups = (values + group - 1) // group
    one = splat(q.dtype.type(1))
    zero = one - one
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group
        rows = min(group, values - v)
        tiles = (rows + lanes - 1) // lanes
        pitch = tiles * lanes
        start = ((n * heads + h) * values + v) * keys
        begin, end = offsets[n], offsets[n + 1]
        segments = (end - begin + segment - 1) // segment
        base = splat(prior[h])
        shift = task % groups * alpha.size  # to the partial sums of this group
        dprior[task] = 0
        _tiles_from_rows(entries, information, excess, start, rows, keys)
        _tiles_from_rows(gradient, d_information, d_excess, start, rows, keys)

        for index in range(segments - 1):  # the state that every segment starts from
            t = begin + index * segment
            _copy_in(k_block, k, (t * heads + h) * keys, heads * keys, segment, keys)
            for block, source in ((w_block, w), (beta_block, beta)):
                _copy_in(block, source, (t * heads + h) * values + v, heads * values, segment, rows)
            for tile in range(tiles):
                at = (index * tiles + tile) * size
                to = at + tiles * size
                for s in range(segment):
                    row = s * pitch + tile * lanes
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha, (t + s) * heads + h)
                    _update_tile(entries, to, entries, at, k_block, s * key_pitch, keys, w_t, beta_t, alpha_t)
                    at = to

        for index in range(segments - 1, -1, -1):
            t = begin + index * segment
            tokens = min(segment, end - t)
            key_start, row_start = (t * heads + h) * keys, (t * heads + h) * values + v
            for block, source in ((q_block, q), (k_block, k)):
                _copy_in(block, source, key_start, heads * keys, tokens, keys)
            for block, source in ((w_block, w), (beta_block, beta), (dy_block, d_output)):
                _copy_in(block, source, row_start, heads * values, tokens, rows)
            if d_variance is not None:
                _copy_in(dvar_block, d_variance, row_start, heads * values, tokens, rows)
            dq_block[: tokens * key_pitch] = 0
            dk_block[: tokens * key_pitch] = 0
            for s in range(tokens):
                dg[shift + (t + s) * heads + h] = 0
            for tile in range(tiles):
                entry = (index * tiles + tile) * size
                replay[:size] = entries[entry : entry + size]
                for s in range(tokens):
                    row = s * pitch + tile * lanes
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha, (t + s) * heads + h)
                    at, to = s * size, (s + 1) * size
                    _update_tile(replay, to, replay, at, k_block, s * key_pitch, keys, w_t, beta_t, alpha_t)
                for s in range(tokens - 1, -1, -1):
                    row = s * pitch + tile * lanes
                    w_t, twice_beta_t, dy_t = load(w_block, row), load(beta_block, row), load(dy_block, row)
                    twice_beta_t = twice_beta_t + twice_beta_t
                    after = spread(alpha, (t + s + 1) * heads + h) if t + s + 1 < end else one
                    dw_t, dbeta_t, m_sum, j_sum, x_sum = zero, zero, zero, zero, zero
                    for block_start in range(0, keys, lanes):
                        for i in range(block_start, min(block_start + lanes, keys)):
                            key, to = s * key_pitch + i, tile * size + 2 * i * lanes
                            before = s * size + 2 * i * lanes  # M_{t-1} and J_{t-1}; M_t and J_t follow one size later
                            q_t, k_t = spread(q_block, key), spread(k_block, key)
                            r = one / (load(replay, before + size + lanes) + base)
                            mean = load(replay, before + size) * r
                            n_t = q_t * dy_t * r
                            x_t = n_t * mean
                            dq_t = mean * dy_t
                            if d_variance is not None:
                                spread_t, dvar_t = q_t * r, load(dvar_block, row)
                                x_t = x_t + dvar_t * (spread_t * spread_t)
                                dq_t = dq_t + dvar_t * (spread_t + spread_t)
                            dm = load(gradient, to) * after + n_t
                            dj = load(gradient, to + lanes) * after - x_t
                            store(gradient, to, dm)
                            store(gradient, to + lanes, dj)
                            store(dq_lanes, (i - block_start) * lanes, dq_t)
                            store(dk_lanes, (i - block_start) * lanes, dm * w_t + dj * (twice_beta_t * k_t))
                            dw_t = dw_t + dm * k_t
                            dbeta_t = dbeta_t + dj * (k_t * k_t)
                            m_sum = m_sum + dm * load(replay, before)
                            j_sum = j_sum + dj * load(replay, before + lanes)
                            x_sum = x_sum + x_t
                        for block, sums in ((dq_block, dq_lanes), (dk_block, dk_lanes)):
                            to = s * key_pitch + block_start
                            store(block, to, load(block, to) + lane_sums(sums))
                    store(dw_block, row, dw_t)
                    store(dbeta_block, row, dbeta_t)
                    dg[shift + (t + s) * heads + h] += lane_sum(m_sum + j_sum)
                    dprior[task] -= lane_sum(x_sum)
            for block, target in ((dq_block, dq), (dk_block, dk)):
                _copy_out(target, shift * keys + key_start, heads * keys, tokens, keys, block)
            for block, target in ((dw_block, dw), (dbeta_block, dbeta)):
                _copy_out(target, row_start, heads * values, tokens, rows, block)

        if begin < end:
            after = spread(alpha, begin * heads + h)
            for i in range(0, tiles * size, lanes):
                store(gradient, i, load(gradient, i) * after)
        _rows_from_tiles(d_information, d_excess, start, rows, keys, gradient)


# Threads. Not Numba's own parallel loops: their portable scheduler aborts when two Python threads enter it.

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
        kept = f"cached in {place}" if place else "in every process: there is no folder to cache it in"
        message = "compiling the Palimpsa CPU kernel %s for this machine (once, some 5 s; %s)"
        timer = threading.Timer(1.0, logger.warning, (message, kernel.__name__.strip("_"), kept))
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
        return tuple(torch.empty(size, dtype=dtype).numpy() for size in scratch_sizes)  # aligned to 64 bytes by torch

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

    helpers = [_pool(os.getpid(), threads - 1).submit(drain) for _ in range(threads - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():  # still queued behind another caller: nothing is left for it
            helper.result()


def _array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    return x.detach().to(dtype).contiguous().numpy().reshape(-1)


def _prepare(q, k, w, beta, g, prior, information, excess_precision, offsets, scale):
    """What both kernels take: inputs, offsets, (heads, keys, values), and how many value rows make a task."""
    dtype = compute_dtype(q)
    (batch, length, heads, keys), values = q.shape, w.shape[3]
    q = q if scale == 1 else q.detach().to(dtype) * scale
    alpha = g.detach().to(dtype).exp()
    states = [torch.empty(0) if x is None else x for x in (information, excess_precision)]
    inputs = tuple(_array(x, dtype) for x in (q, k, w, beta, alpha, prior, *states))
    offsets = np.arange(batch + 1) * length if offsets is None else offsets.numpy()
    lanes = 64 // dtype.itemsize
    tiles = -(-values // lanes)
    group = max(1, min(tiles, tiles * heads * (len(offsets) - 1) // MIN_TASKS)) * lanes
    return inputs, offsets, (heads, keys, values), group


def forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance):
    """Output [B,T,H,V], variance [B,T,H,V] (empty unless asked for), final M and J [N,H,V,K]."""
    dtype = compute_dtype(q)
    inputs, cuts, sizes, group = _prepare(q, k, w, beta, g, prior, information, excess_precision, offsets, scale)
    heads, keys, values = sizes
    output = torch.empty(w.shape, dtype=dtype)
    variance = torch.empty(w.shape if output_variance else 0, dtype=dtype)
    if offsets is not None:
        for x in (output, variance)[: 1 + output_variance]:
            x[:, cuts[-1] :] = 0
    final = [torch.empty((len(cuts) - 1, heads, values, keys), dtype=dtype) for _ in range(2)]
    reads = (_array(output, dtype), _array(variance, dtype) if output_variance else None)
    padded = -(-keys * dtype.itemsize // 64) * 64 // dtype.itemsize
    scratch = [FORWARD_BLOCK * n for n in (padded, padded, group, group, group, group)] + [2 * keys * group]
    arguments = (inputs, cuts, *reads, *(_array(x, dtype) for x in final), sizes, group)
    tasks, work = (len(cuts) - 1) * heads * -(-values // group), g.numel() * keys * values
    _run(_forward, (dtype, output_variance), arguments, scratch, dtype, tasks, work)
    return output.to(q.dtype), variance, *final


def backward(
    d_output, d_variance, d_information, d_excess_precision,
    q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
):  # fmt: skip
    """Gradients of q, k, w, beta, g, prior and of both initial states, each in the dtype of its input."""
    dtype = compute_dtype(q)
    inputs, cuts, sizes, group = _prepare(q, k, w, beta, g, prior, information, excess_precision, offsets, scale)
    heads, keys, values = sizes
    groups = -(-values // group)
    new = torch.empty if offsets is None else torch.zeros  # tokens beyond the last sequence have zero gradients
    dq, dk = (new((groups, *q.shape), dtype=dtype) for _ in range(2))
    dw, dbeta = (new(w.shape, dtype=dtype) for _ in range(2))
    dg = new((groups, *g.shape), dtype=torch.float64)
    dprior = torch.empty((len(cuts) - 1, heads, groups), dtype=torch.float64)
    states = [torch.zeros((len(cuts) - 1, heads, values, keys), dtype=dtype) for _ in range(2)]
    for state, gradient in zip(states, (d_information, d_excess_precision), strict=True):
        if gradient is not None:
            state.copy_(gradient)

    lanes = 64 // dtype.itemsize
    padded = -(-keys // lanes) * lanes
    longest = int(np.diff(cuts).max(initial=1))
    row = 4 * padded + 6 * group + 2 * keys * lanes
    segment = min(longest, max(16, min(64, L2_BYTES // (row * dtype.itemsize)), math.isqrt(longest)))
    scratch = [segment * n for n in (*4 * (padded,), *6 * (group,))]
    scratch += [lanes * lanes, lanes * lanes, (segment + 1) * 2 * keys * lanes]
    scratch += [2 * keys * group, -(-longest // segment) * 2 * keys * group]
    outer = (_array(d_output, dtype), None if d_variance is None else _array(d_variance, dtype))
    results = tuple(_array(x, dtype) for x in (*states, dq, dk, dw, dbeta))
    sums = (_array(dg, torch.float64), _array(dprior, torch.float64))
    arguments = (inputs, cuts, *outer, results, *sums, sizes, group, segment)
    _run(_backward, (dtype, d_variance is None), arguments, scratch, dtype, dprior.numel(), 4 * g.numel() * keys * values)

    dq, dk, dg = (functools.reduce(Tensor.add_, x.unbind()) for x in (dq, dk, dg))  # in order: deterministic
    alpha = g.detach().double().exp()
    dg = torch.where(alpha > 0, alpha * dg, 0)
    gradients = (dq if scale == 1 else dq * scale, dk, dw, dbeta, dg, dprior.sum((0, 2)))
    return *(d.to(x.dtype) for d, x in zip(gradients, (q, k, w, beta, g, prior), strict=True)), *states


apply = register("cpu", forward, backward)
