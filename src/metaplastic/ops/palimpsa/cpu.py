"""Palimpsa on the CPU: forward and backward kernels in Numba, exact and independent of the number of threads.

One head of one sequence, with state M (information) and J (excess precision), both [V, K], and alpha_t = exp(g_t):

    M_t = alpha_t M_{t-1} + w_t k_t^T           J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T
    R_t = 1 / (J_t + prior)                     y_t = (M_t R_t) q_t           var_t = R_t q_t^2

Backward walks t = T..1 with dM, dJ (the gradients of the final state at t = T, alpha_{T+1} = 1), n_t = (dy_t q_t^T) R_t:

    dM_t = alpha_{t+1} dM_{t+1} + n_t           x_t = n_t M_t R_t + (dvar_t (q_t^2)^T) R_t^2
    dJ_t = alpha_{t+1} dJ_{t+1} - x_t           dprior = - sum x_t
    dq_t = (M_t R_t)^T dy_t + 2 q_t R_t^T dvar_t
    dk_t = dM_t^T w_t + 2 k_t dJ_t^T beta_t     dw_t = dM_t k_t               dbeta_t = dJ_t k_t^2
    dg_t = alpha_t (<dM_t, M_{t-1}> + <dJ_t, J_{t-1}>)

The last line needs the earlier states but, unlike a running sum over later tokens, cancels nothing and is exactly zero where alpha_t is.

Layout.  V is cut into tiles of one SIMD vector (64 bytes: 16 rows of float32, 8 of float64; V is padded to that), held key by key, so
    that value rows lie along the lanes: y, dw and dbeta are plain vector sums over keys, and only dq and dk are sums over lanes.
Tasks.   A task is one head of one sequence, or a group of its tiles where there are few heads. Groups follow from the shapes alone and
    their partial sums of dq, dk and dg are added in order, so results are bitwise the same for any number of threads.
Memory.  The forward pass keeps nothing for the backward pass, which recomputes: a sweep stores the state every S tokens, then each
    segment of S tokens is replayed into a buffer, one tile at a time, and walked in reverse. S is what fits the L2 cache and at least
    sqrt(T), which bounds the scratch of a thread by about sqrt(T) (2 K V + 32 K) elements (1.5 MB at T = 1024, K = 32, V = 64).
Types.   float64 for float64 q, otherwise float32; dg and dprior are added up in float64. "contract" is the only fast-math flag: it
    permits fused multiply-adds and nothing else, so infinities and NaNs propagate as IEEE 754 has it.
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
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from ..contract import compute_dtype
from .custom import register

FORWARD_BLOCK = 16  # tokens copied into contiguous scratch at a time
MIN_TASKS = 16  # with fewer heads than this, a head's tiles are spread over several tasks
L2_BYTES = 1 << 19  # what a segment of the backward pass may fill of the cache
INLINE_WORK = 1 << 18  # state elements times tokens below which threads cost more than they bring

logger = logging.getLogger("metaplastic")


# ---------------------------------------------------------------- SIMD vectors in Numba
# LLVM's loop vectoriser cannot keep a vector of sums in a register across the loop over keys, so vectors are made explicit.
# LLVM splits the 64 bytes over narrower registers where the machine has no AVX-512.


class Lanes(types.Type):
    """64 bytes of floats that are added, subtracted, multiplied and divided lane by lane."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.count = 512 // dtype.bitwidth
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, ir.VectorType(manager.lookup(lanes.dtype).get_value_type(), lanes.count))


def _type_operator(context):
    return lambda left, right: left if isinstance(left, Lanes) and left == right else None


def _lower_operator(instruction):
    return lambda context, builder, signature, operands: getattr(builder, instruction)(*operands)


for _operator, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    type_callable(_operator)(_type_operator)
    lower_builtin(_operator, Lanes, Lanes)(_lower_operator(_instruction))


def _shuffle(builder, left, right, lanes):
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _broadcast(builder, value, count):
    vector = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, ir.IntType(32)(0))
    return _shuffle(builder, vector, vector, [0] * count)


def _pointer(context, builder, array_type, array, index):
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _vector_pointer(context, builder, lanes, *position):
    return builder.bitcast(_pointer(context, builder, *position), context.get_value_type(lanes).as_pointer())


def _mask(builder, lanes, count):
    numbers = ir.Constant(ir.VectorType(ir.IntType(64), lanes.count), list(range(lanes.count)))
    return builder.icmp_signed("<", numbers, _broadcast(builder, count, lanes.count))


@intrinsic
def splat(typing, value):
    """Every lane is `value`."""

    def generate(context, builder, signature, arguments):
        return _broadcast(builder, arguments[0], signature.return_type.count)

    return Lanes(value)(value), generate


@intrinsic
def spread(typing, array, index):
    """Every lane is the element at a flat index (not bounds-checked, like the loads and stores below)."""

    def generate(context, builder, signature, arguments):
        return _broadcast(builder, builder.load(_pointer(context, builder, array, *arguments)), signature.return_type.count)

    return Lanes(array.dtype)(array, types.intp), generate


@intrinsic
def load(typing, array, index):
    def generate(context, builder, signature, arguments):
        pointer = _vector_pointer(context, builder, signature.return_type, array, *arguments)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), generate


@intrinsic
def store(typing, array, index, vector):
    def generate(context, builder, signature, arguments):
        pointer = _vector_pointer(context, builder, vector, array, *arguments[:2])
        builder.store(arguments[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), generate


@intrinsic
def load_first(typing, array, index, count):
    """The first `count` lanes from memory, zero in the others, whose memory is not touched. count may exceed the lanes."""

    def generate(context, builder, signature, arguments):
        lanes = signature.return_type
        vector = context.get_value_type(lanes)
        operands = [
            _vector_pointer(context, builder, lanes, array, *arguments[:2]),
            ir.IntType(32)(array.dtype.bitwidth // 8),
            _mask(builder, lanes, arguments[2]),
            ir.Constant(vector, None),
        ]
        kind = ir.FunctionType(vector, [operand.type for operand in operands])
        name = f"llvm.masked.load.v{lanes.count}f{array.dtype.bitwidth}.p0"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)

    return Lanes(array.dtype)(array, types.intp, types.intp), generate


@intrinsic
def store_first(typing, array, index, count, vector):
    """The first `count` lanes to memory."""

    def generate(context, builder, signature, arguments):
        operands = [
            arguments[3],
            _vector_pointer(context, builder, vector, array, *arguments[:2]),
            ir.IntType(32)(array.dtype.bitwidth // 8),
            _mask(builder, vector, arguments[2]),
        ]
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        name = f"llvm.masked.store.v{vector.count}f{array.dtype.bitwidth}.p0"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp, vector), generate


def _add_halves(builder, left, right, half):
    """Vectors of groups of 2 * half lanes: fold every group onto its first half, groups of left and right alternating."""
    count = left.type.count
    groups = [[source + lane for lane in range(start, start + half)] for start in range(0, count, 2 * half) for source in (0, count)]
    low = [lane for group in groups for lane in group]
    return builder.fadd(_shuffle(builder, left, right, low), _shuffle(builder, left, right, [lane + half for lane in low]))


@intrinsic
def row_sums(typing, array, index):
    """Lane i is the sum over the lanes of the i-th of as many consecutive vectors as there are lanes."""

    def generate(context, builder, signature, arguments):
        lanes = signature.return_type
        size = lanes.count
        starts = [builder.add(arguments[1], ir.IntType(64)(i * size)) for i in range(size)]
        pointers = [_vector_pointer(context, builder, lanes, array, arguments[0], start) for start in starts]
        vectors = [builder.load(pointer, align=array.dtype.bitwidth // 8) for pointer in pointers]
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [_add_halves(builder, left, right, half) for left, right in zip(vectors[:half], vectors[half:])]
        return vectors[0]

    return Lanes(array.dtype)(array, types.intp), generate


@intrinsic
def lane_sum(typing, vector):
    """The sum of the lanes of one vector, as a scalar."""

    def generate(context, builder, signature, arguments):
        (total,) = arguments
        half = vector.count // 2
        while half:
            total = _add_halves(builder, total, total, half)
            half //= 2
        return builder.extract_element(total, ir.IntType(32)(0))

    return vector.dtype(vector), generate


# ---------------------------------------------------------------- kernels
# Tensors arrive flat in memory order [token, head, feature], all sequences one after the other, and `offsets` cuts the tokens.
# In scratch, a token's features are padded with zeros to whole vectors, and the state of one tile is
# key 0: M in `lanes` rows, J in `lanes` rows; key 1: ...

_helper = njit(error_model="numpy", fastmath={"contract"})


def _kernel(function):
    try:
        return njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})(function)
    except RuntimeError:  # Numba finds no folder it may write to
        return njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)


@_helper
def _copy_in(block, source, start, stride, tokens, width):
    """`width` features of `tokens` consecutive tokens into scratch. One head is a thin slice of memory, whose lines
    would otherwise be fetched late and, at power-of-two strides, evict each other."""
    lanes = 64 // block.itemsize
    to = 0
    for token in range(tokens):
        for i in range(0, width, lanes):
            store(block, to, load_first(source, start + token * stride + i, width - i))
            to += lanes


@_helper
def _copy_out(target, start, stride, tokens, width, block):
    lanes = 64 // block.itemsize
    at = 0
    for token in range(tokens):
        for i in range(0, width, lanes):
            store_first(target, start + token * stride + i, width - i, load(block, at))
            at += lanes


@_helper
def _square(target, source, size):
    for i in range(0, size, 64 // source.itemsize):
        store(target, i, load(source, i) * load(source, i))


@_helper
def _tiles_from_rows(tiles, information, excess, start, rows, keys):
    """A head's [rows, keys] state into tiles; an empty array stands for zeros."""
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
def _write(target, to, source, at, k, k2, token_keys, keys, w, beta, alpha):
    """One token of the recurrence on one tile, from source[at:] to target[to:]."""
    lanes = 64 // target.itemsize
    for i in range(keys):
        information = load(source, at + 2 * i * lanes) * alpha + w * spread(k, token_keys + i)
        excess = load(source, at + (2 * i + 1) * lanes) * alpha + beta * spread(k2, token_keys + i)
        store(target, to + 2 * i * lanes, information)
        store(target, to + (2 * i + 1) * lanes, excess)


@_helper
def _step_rows(
    q, k, w, beta, alpha, prior, information, excess, start, output, variance, final_information, final_excess,
    token_keys, token_rows, rows, keys,
):  # fmt: skip
    """A sequence of one token (decoding): the state is used where it lies, with the keys along the lanes."""
    lanes = 64 // q.itemsize
    one = splat(q.dtype.type(1))
    zero = one - one
    for row in range(rows):
        row_w, row_beta = spread(w, token_rows + row), spread(beta, token_rows + row)
        read, spread_ = zero, zero
        for i in range(0, keys, lanes):
            at, left = start + row * keys + i, keys - i
            keys_q, keys_k = load_first(q, token_keys + i, left), load_first(k, token_keys + i, left)
            m, j = row_w * keys_k, row_beta * (keys_k * keys_k)
            if information.size:
                m = load_first(information, at, left) * splat(alpha) + m
                j = load_first(excess, at, left) * splat(alpha) + j
            store_first(final_information, at, left, m)
            store_first(final_excess, at, left, j)
            r = one / (j + splat(prior))
            read = read + m * r * keys_q
            if variance is not None:
                spread_ = spread_ + r * (keys_q * keys_q)
        output[token_rows + row] = lane_sum(read)
        if variance is not None:
            variance[token_rows + row] = lane_sum(spread_)


@_kernel
def _forward(
    q, k, w, beta, alpha, prior, information, excess, offsets, output, variance, final_information, final_excess,
    heads, keys, values, group, scratch, first, last,
):  # fmt: skip
    lanes = 64 // q.itemsize
    groups = (values + group - 1) // group
    key_pitch = (keys + lanes - 1) // lanes * lanes
    parts = scratch[: 3 * FORWARD_BLOCK * key_pitch].reshape((3, FORWARD_BLOCK * key_pitch))
    q_block, k_block, k2_block = parts[0], parts[1], parts[2]
    rest = scratch[parts.size :]
    parts = rest[: 4 * FORWARD_BLOCK * group].reshape((4, FORWARD_BLOCK * group))
    w_block, beta_block, output_block, variance_block = parts[0], parts[1], parts[2], parts[3]
    state = rest[parts.size :]
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group
        rows = min(group, values - v)
        tiles = (rows + lanes - 1) // lanes
        pitch = tiles * lanes
        begin, end = offsets[n], offsets[n + 1]
        start = ((n * heads + h) * values + v) * keys
        if end - begin == 1:
            _step_rows(
                q, k, w, beta, alpha[begin * heads + h], prior[h], information, excess, start, output, variance,
                final_information, final_excess, (begin * heads + h) * keys, (begin * heads + h) * values + v, rows, keys,
            )  # fmt: skip
            continue
        one, base = splat(q.dtype.type(1)), splat(prior[h])
        _tiles_from_rows(state, information, excess, start, rows, keys)
        for t in range(begin, end, FORWARD_BLOCK):
            tokens = min(FORWARD_BLOCK, end - t)
            token_keys, token_rows = (t * heads + h) * keys, (t * heads + h) * values + v
            _copy_in(q_block, q, token_keys, heads * keys, tokens, keys)
            _copy_in(k_block, k, token_keys, heads * keys, tokens, keys)
            _square(k2_block, k_block, tokens * key_pitch)
            _copy_in(w_block, w, token_rows, heads * values, tokens, rows)
            _copy_in(beta_block, beta, token_rows, heads * values, tokens, rows)
            for tile in range(tiles):
                for s in range(tokens):
                    at, to = tile * 2 * keys * lanes, s * pitch + tile * lanes
                    w_t, beta_t, alpha_t = load(w_block, to), load(beta_block, to), spread(alpha, (t + s) * heads + h)
                    read = one - one
                    var = one - one
                    for i in range(s * key_pitch, s * key_pitch + keys):
                        m = load(state, at) * alpha_t + w_t * spread(k_block, i)
                        j = load(state, at + lanes) * alpha_t + beta_t * spread(k2_block, i)
                        store(state, at, m)
                        store(state, at + lanes, j)
                        r = one / (j + base)
                        read = read + m * r * spread(q_block, i)
                        if variance is not None:
                            var = var + r * (spread(q_block, i) * spread(q_block, i))
                        at += 2 * lanes
                    store(output_block, to, read)
                    if variance is not None:
                        store(variance_block, to, var)
            _copy_out(output, token_rows, heads * values, tokens, rows, output_block)
            if variance is not None:
                _copy_out(variance, token_rows, heads * values, tokens, rows, variance_block)
        _rows_from_tiles(final_information, final_excess, start, rows, keys, state)


@_kernel
def _backward(
    d_output, d_variance, d_information, d_excess, q, k, w, beta, alpha, prior, information, excess, offsets,
    dq, dk, dw, dbeta, dg, dprior, heads, keys, values, group, segment, scratch, first, last,
):  # fmt: skip
    lanes = 64 // q.itemsize
    groups = (values + group - 1) // group
    key_pitch = (keys + lanes - 1) // lanes * lanes
    size = 2 * keys * lanes  # of the state of one tile
    parts = scratch[: 5 * segment * key_pitch].reshape((5, segment * key_pitch))
    q_block, k_block, k2_block, dq_block, dk_block = parts[0], parts[1], parts[2], parts[3], parts[4]
    rest = scratch[parts.size :]
    parts = rest[: 6 * segment * group].reshape((6, segment * group))
    w_block, beta_block, dy_block, dvar_block, dw_block, dbeta_block = parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]
    rest = rest[parts.size :]
    q_lanes, k_lanes, rest = rest[: lanes * lanes], rest[lanes * lanes : 2 * lanes * lanes], rest[2 * lanes * lanes :]
    replay, rest = rest[: (segment + 1) * size], rest[(segment + 1) * size :]
    gradient, entries = rest[: group * 2 * keys], rest[group * 2 * keys :]
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group
        rows = min(group, values - v)
        tiles = (rows + lanes - 1) // lanes
        pitch = tiles * lanes
        begin, end = offsets[n], offsets[n + 1]
        segments = (end - begin + segment - 1) // segment
        start = ((n * heads + h) * values + v) * keys
        one, base = splat(q.dtype.type(1)), splat(prior[h])
        zero = one - one
        shift = task % groups * alpha.size  # to this group's partial sums
        prior_sum = 0.0
        _tiles_from_rows(entries, information, excess, start, rows, keys)
        _tiles_from_rows(gradient, d_information, d_excess, start, rows, keys)

        for index in range(segments - 1):
            t = begin + index * segment
            _copy_in(k_block, k, (t * heads + h) * keys, heads * keys, segment, keys)
            _square(k2_block, k_block, segment * key_pitch)
            _copy_in(w_block, w, (t * heads + h) * values + v, heads * values, segment, rows)
            _copy_in(beta_block, beta, (t * heads + h) * values + v, heads * values, segment, rows)
            for tile in range(tiles):
                at = (index * tiles + tile) * size
                to = at + tiles * size
                for s in range(segment):
                    row = s * pitch + tile * lanes
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha, (t + s) * heads + h)
                    _write(entries, to, entries, at, k_block, k2_block, s * key_pitch, keys, w_t, beta_t, alpha_t)
                    at = to

        for index in range(segments - 1, -1, -1):
            t = begin + index * segment
            tokens = min(segment, end - t)
            token_keys, token_rows = (t * heads + h) * keys, (t * heads + h) * values + v
            _copy_in(q_block, q, token_keys, heads * keys, tokens, keys)
            _copy_in(k_block, k, token_keys, heads * keys, tokens, keys)
            _square(k2_block, k_block, tokens * key_pitch)
            _copy_in(w_block, w, token_rows, heads * values, tokens, rows)
            _copy_in(beta_block, beta, token_rows, heads * values, tokens, rows)
            _copy_in(dy_block, d_output, token_rows, heads * values, tokens, rows)
            if d_variance is not None:
                _copy_in(dvar_block, d_variance, token_rows, heads * values, tokens, rows)
            dq_block[: tokens * key_pitch] = 0
            dk_block[: tokens * key_pitch] = 0
            for s in range(tokens):
                dg[shift + (t + s) * heads + h] = 0
            for tile in range(tiles):
                replay[:size] = entries[(index * tiles + tile) * size : (index * tiles + tile + 1) * size]
                for s in range(tokens):
                    row = s * pitch + tile * lanes
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha, (t + s) * heads + h)
                    _write(replay, (s + 1) * size, replay, s * size, k_block, k2_block, s * key_pitch, keys, w_t, beta_t, alpha_t)
                for s in range(tokens - 1, -1, -1):
                    row, key = s * pitch + tile * lanes, s * key_pitch
                    w_t, beta_t, dy_t = load(w_block, row), load(beta_block, row), load(dy_block, row)
                    beta_t = beta_t + beta_t
                    if d_variance is not None:
                        dvar_t = load(dvar_block, row)
                    after = spread(alpha, (t + s + 1) * heads + h) if t + s + 1 < end else one
                    dw_t, dbeta_t, dm_m, dj_j, x_sum = zero, zero, zero, zero, zero
                    for i in range(0, keys, lanes):
                        for lane in range(min(lanes, keys - i)):
                            q_i, k_i = spread(q_block, key + i + lane), spread(k_block, key + i + lane)
                            before, to = s * size + 2 * (i + lane) * lanes, tile * size + 2 * (i + lane) * lanes
                            r = one / (load(replay, before + size + lanes) + base)
                            mu = load(replay, before + size) * r
                            n_t = q_i * dy_t * r
                            x = n_t * mu
                            q_lane = mu * dy_t
                            if d_variance is not None:
                                spread_ = q_i * r
                                x = x + dvar_t * (spread_ * spread_)
                                q_lane = q_lane + dvar_t * (spread_ + spread_)
                            dm = load(gradient, to) * after + n_t
                            dj = load(gradient, to + lanes) * after - x
                            store(gradient, to, dm)
                            store(gradient, to + lanes, dj)
                            store(q_lanes, lane * lanes, q_lane)
                            store(k_lanes, lane * lanes, dm * w_t + dj * (beta_t * k_i))
                            dw_t = dw_t + dm * k_i
                            dbeta_t = dbeta_t + dj * spread(k2_block, key + i + lane)
                            dm_m = dm_m + dm * load(replay, before)
                            dj_j = dj_j + dj * load(replay, before + lanes)
                            x_sum = x_sum + x
                        store(dq_block, key + i, load(dq_block, key + i) + row_sums(q_lanes, 0))
                        store(dk_block, key + i, load(dk_block, key + i) + row_sums(k_lanes, 0))
                    store(dw_block, row, dw_t)
                    store(dbeta_block, row, dbeta_t)
                    dg[shift + (t + s) * heads + h] += lane_sum(dm_m + dj_j)
                    prior_sum -= lane_sum(x_sum)
            _copy_out(dq, shift * keys + token_keys, heads * keys, tokens, keys, dq_block)
            _copy_out(dk, shift * keys + token_keys, heads * keys, tokens, keys, dk_block)
            _copy_out(dw, token_rows, heads * values, tokens, rows, dw_block)
            _copy_out(dbeta, token_rows, heads * values, tokens, rows, dbeta_block)

        dprior[task] = prior_sum
        if begin < end:
            after = spread(alpha, begin * heads + h)
            for i in range(0, tiles * size, lanes):
                store(gradient, i, load(gradient, i) * after)
        _rows_from_tiles(d_information, d_excess, start, rows, keys, gradient)


# ---------------------------------------------------------------- running them


@functools.cache
def _pool(process, threads):
    """Threads do not survive a fork, so the process is part of the key. Numba's own parallel loops are no alternative:
    its portable scheduler aborts the process when two Python threads enter it."""
    return ThreadPoolExecutor(threads, thread_name_prefix="metaplastic")


_compiled = set()
_compiling = threading.Lock()


def _compile(kernel, arguments, variant):
    """Compiles, or loads from the disk cache, on the first call of a variant; says so when it takes long."""
    if (kernel, variant) in _compiled:
        return
    with _compiling:
        place = kernel.stats.cache_path
        message = "compiling the Palimpsa CPU kernel %s for this machine (once, about 5 s; %s)"
        kept = f"cached in {place}" if place else "not cached: no folder to write to"
        timer = threading.Timer(0.5, logger.warning, (message, kernel.__name__.strip("_"), kept))
        timer.daemon = True
        timer.start()
        try:
            kernel(*arguments, 0, 0)
        finally:
            timer.cancel()
        _compiled.add((kernel, variant))


def _run(kernel, arguments, variant, tasks, work, scratch):
    """kernel(*arguments, scratch, first, last) over all tasks; every thread takes the next few when it is free."""
    _compile(kernel, (*arguments, scratch), variant)
    threads = min(torch.get_num_threads(), tasks) if work >= INLINE_WORK else 1
    if threads == 1:
        kernel(*arguments, scratch, 0, tasks)
        return
    size = max(1, tasks // (8 * threads))
    ranges = iter([(first, min(first + size, tasks)) for first in range(0, tasks, size)])

    def drain(scratch):
        for first, last in ranges:
            kernel(*arguments, scratch, first, last)

    helpers = [_pool(os.getpid(), threads - 1).submit(drain, np.empty_like(scratch)) for _ in range(threads - 1)]
    drain(scratch)
    for helper in helpers:
        if not helper.cancel():  # still queued behind another caller's work, with nothing left to do
            helper.result()


def _array(x, dtype):
    return x.detach().to(dtype).contiguous().numpy().reshape(-1)


def _inputs(q, k, w, beta, g, prior, information, excess_precision, offsets, scale):
    """The arrays every kernel takes, in order, and the sizes (sequences, heads, keys, values)."""
    dtype = compute_dtype(q)
    (batch, length, heads, keys), values = q.shape, w.shape[3]
    q, k, w, beta, prior = (_array(x, dtype) for x in (q if scale == 1 else q.to(dtype) * scale, k, w, beta, prior))
    alpha = _array(g.detach().to(dtype).exp(), dtype)
    states = [_array(torch.empty(0) if x is None else x, dtype) for x in (information, excess_precision)]
    offsets = np.arange(batch + 1) * length if offsets is None else offsets.numpy()
    return (q, k, w, beta, alpha, prior, *states, offsets), (len(offsets) - 1, heads, keys, values)


def _group(sequences, heads, values, lanes):
    """Value rows of a task: a whole head where there are tasks enough, so that its sums over rows need no second buffer."""
    tiles = -(-values // lanes)
    return max(1, min(tiles, tiles * sequences * heads // MIN_TASKS)) * lanes


def forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance):
    """Output [B, T, H, V], variance [B, T, H, V] (empty unless asked for), final M and J [N, H, V, K]."""
    dtype = compute_dtype(q)
    arrays, (sequences, heads, keys, values) = _inputs(
        q, k, w, beta, g, prior, information, excess_precision, offsets, scale
    )
    output = torch.empty(w.shape, dtype=dtype)
    variance = torch.empty(w.shape if output_variance else 0, dtype=dtype)
    if offsets is not None:
        output[:, int(offsets[-1]) :] = 0
        if output_variance:
            variance[:, int(offsets[-1]) :] = 0
    final = [torch.empty((sequences, heads, values, keys), dtype=dtype) for _ in range(2)]
    lanes = 64 // dtype.itemsize
    group = _group(sequences, heads, values, lanes)
    key_pitch = -(-keys // lanes) * lanes
    scratch = torch.empty(FORWARD_BLOCK * (3 * key_pitch + 4 * group) + 2 * keys * group, dtype=dtype).numpy()
    read = [output.view(-1).numpy(), variance.view(-1).numpy() if output_variance else None]
    sizes = (heads, keys, values, group)
    tasks = sequences * heads * -(-values // group)
    _run(
        _forward, (*arrays, *read, *(x.view(-1).numpy() for x in final), *sizes), (dtype, output_variance),
        tasks, arrays[4].size * keys * values, scratch,
    )  # fmt: skip
    return output.to(q.dtype), variance, *final


def backward(
    d_output, d_variance, d_information, d_excess_precision,
    q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
):  # fmt: skip
    """Gradients of q, k, w, beta, g, prior and both initial states, each in the dtype of its input."""
    dtype = compute_dtype(q)
    arrays, (sequences, heads, keys, values) = _inputs(
        q, k, w, beta, g, prior, information, excess_precision, offsets, scale
    )
    lanes = 64 // dtype.itemsize
    group = _group(sequences, heads, values, lanes)
    groups = -(-values // group)
    new = torch.empty if offsets is None else torch.zeros
    dq, dk = (new((groups, *q.shape), dtype=dtype) for _ in range(2))
    dw, dbeta = (new(w.shape, dtype=dtype) for _ in range(2))
    dg = new((groups, *g.shape), dtype=torch.float64)
    dprior = torch.empty((sequences, heads, groups), dtype=torch.float64)
    shape = (sequences, heads, values, keys)
    # Gradients of the final states go in, gradients of the initial states come out.
    states = [
        torch.zeros(shape, dtype=dtype) if x is None else x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for x in (d_information, d_excess_precision)
    ]
    longest = int(np.diff(arrays[-1]).max(initial=0))
    key_pitch = -(-keys // lanes) * lanes
    row = 5 * key_pitch + 6 * group + 2 * keys * lanes
    segment = max(16, min(64, L2_BYTES // (row * dtype.itemsize)), math.isqrt(longest))
    segment = min(int(os.environ.get("SEGM", segment)), max(1, longest))
    size = segment * row + 2 * lanes * lanes + 2 * keys * lanes + (1 + -(-longest // segment)) * 2 * keys * group
    scratch = torch.empty(size, dtype=dtype).numpy()
    outgoing = [_array(d_output, dtype), None if d_variance is None else _array(d_variance, dtype)]
    results = [x.view(-1).numpy() for x in (*states, dq, dk, dw, dbeta, dg, dprior)]
    _run(
        _backward, (*outgoing, *results[:2], *arrays, *results[2:], heads, keys, values, group, segment),
        (dtype, d_variance is None), dprior.numel(), 4 * arrays[4].size * keys * values, scratch,
    )  # fmt: skip
    dq, dk, dg = (functools.reduce(torch.Tensor.add_, x.unbind()) for x in (dq, dk, dg))
    alpha = g.double().exp()
    dg = torch.where(alpha > 0, dg * alpha, 0)
    return dq.mul_(scale).to(q.dtype), dk.to(k.dtype), dw.to(w.dtype), dbeta.to(beta.dtype), dg.to(g.dtype), dprior.sum((0, 2)).to(prior.dtype), *states


apply = register("cpu", forward, backward)
