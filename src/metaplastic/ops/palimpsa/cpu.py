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
