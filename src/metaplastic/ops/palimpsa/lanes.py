"""SIMD vectors for Numba kernels: ``Lanes`` holds one vector of 64 bytes, with arithmetic, loads, stores and sums.

LLVM's own vectoriser does not keep a vector of sums in a register across an outer loop; these make vectors explicit.
A machine with narrower registers uses several of them for one vector. Loads and stores need no alignment.
Numba's disk cache of a kernel knows the kernel's own file only: after a change here, touch cpu_kernels.py.
"""

# pyright: reportCallIssue=false
# (an @intrinsic is called without the typing context that it is defined with)

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

VECTOR_BYTES = 64


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
