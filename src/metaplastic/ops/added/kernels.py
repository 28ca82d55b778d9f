r"""The Triton kernels of what a shard adds, for 16-bit keys and values; the equations are in :mod:`.`.

Layout     sums: a program has some values of a head, all of its keys and the tokens of a piece; the sums of the pieces
           are added up afterwards, in their order: no atomics, the same bits in every run. Gradients: a program has a
           block of tokens of a head, all of its keys, and walks along the values.
Precision  Products are of bfloat16 on the tensor cores, added up in float32. k and v are bfloat16 already; what is not
           is the sum of two parts of bfloat16 (16 of float32's 24 bits), and of the products of parts only that of both
           second ones, 2^-16 of the whole, is left out.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def _parts(x, TYPE: tl.constexpr):
    high = x.to(TYPE)
    return high, (x - high.to(tl.float32)).to(TYPE)


@triton.jit
def _left(left, pitch, rows, here, columns, inside, EACH: tl.constexpr):
    """[tokens, keys], or [tokens, 1] where all keys share it."""
    if EACH:
        return tl.load(left + rows * pitch + columns, mask=here & inside, other=0.0)
    else:
        return tl.load(left + rows * pitch, mask=here, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def sums_kernel(
    k, left, v_1, v_2, sums, tokens, heads,
    k_batch, k_token, k_head, left_batch, left_token, left_head,
    v_1_batch, v_1_token, v_1_head, v_2_batch, v_2_token, v_2_head,
    N: tl.constexpr, EACH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PIECE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``sums`` [pieces, N, B, H, V, K]."""
    TYPE: tl.constexpr = v_1.dtype.element_ty
    piece = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row, h = head // heads, head % heads
    key = tl.arange(0, BK)[None, :]
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    k += row * k_batch + h * k_head
    left += row * left_batch + h * left_head
    v_1 += row * v_1_batch + h * v_1_head
    v_2 += row * v_2_batch + h * v_2_head
    total_1 = tl.zeros([BV, BK], tl.float32)
    total_2 = tl.zeros([BV, BK], tl.float32)
    for first in range(0, PIECE, BT):
        t = piece * PIECE + first + tl.arange(0, BT)[:, None]
        here = t < tokens
        power = tl.load(k + t * k_token + key, mask=here & (key < KEYS), other=0.0).to(tl.float32)
        kept = power * _left(left, left_token, t, here, key, key < KEYS, EACH)
        seen = here & (value[None, :] < VALUES)
        high, low = _parts(kept, TYPE)
        v = tl.trans(tl.load(v_1 + t * v_1_token + value[None, :], mask=seen, other=0.0))
        total_1 = tl.dot(v, high, total_1)
        total_1 = tl.dot(v, low, total_1)
        if N == 2:
            high, low = _parts(kept * power, TYPE)
            v = tl.trans(tl.load(v_2 + t * v_2_token + value[None, :], mask=seen, other=0.0))
            total_2 = tl.dot(v, high, total_2)
            total_2 = tl.dot(v, low, total_2)
    all_heads = tl.num_programs(1).to(tl.int64)
    to = value[:, None] * KEYS + key
    there = (value[:, None] < VALUES) & (key < KEYS)
    sums += (piece * N * all_heads + head) * VALUES * KEYS
    tl.store(sums + to, total_1, mask=there)
    if N == 2:
        tl.store(sums + all_heads * VALUES * KEYS + to, total_2, mask=there)


@triton.jit
def _of_values(
    c_high, c_low, v, d_v, kept, here, inside, key, KEYS: tl.constexpr, VALUES: tl.constexpr, BV: tl.constexpr
):
    """Writes c' kept, the gradient of v, of some tokens, and returns v c', that of kept [tokens, keys]."""
    high, low = _parts(kept, v.dtype.element_ty)
    of_kept = tl.zeros(kept.shape, tl.float32)
    for first in range(0, VALUES, BV):
        value = first + tl.arange(0, BV)
        there = (value[:, None] < VALUES) & inside
        seen = here & (value[None, :] < VALUES)
        of_sum = tl.load(c_high + value[:, None] * KEYS + key, mask=there, other=0.0)
        rest = tl.load(c_low + value[:, None] * KEYS + key, mask=there, other=0.0)
        own = tl.load(v + value[None, :], mask=seen, other=0.0)
        of_kept = tl.dot(own, of_sum, of_kept)
        of_kept = tl.dot(own, rest, of_kept)
        d = tl.dot(high, tl.trans(of_sum))
        d = tl.dot(low, tl.trans(of_sum), d)
        d = tl.dot(high, tl.trans(rest), d)
        tl.store(d_v + value[None, :], d.to(d_v.dtype.element_ty), mask=seen)
    return of_kept


@triton.jit(do_not_specialize=["tokens"])
def gradients_kernel(
    k, left, v_1, v_2, of_sums, d_k, d_left, d_v_1, d_v_2, tokens, heads,
    k_batch, k_token, k_head, left_batch, left_token, left_head,
    v_1_batch, v_1_token, v_1_head, v_2_batch, v_2_token, v_2_head,
    N: tl.constexpr, EACH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``of_sums`` [2, N, B, H, V, K]: the two parts of the gradients; those of inputs are contiguous."""
    head = tl.program_id(1).to(tl.int64)
    row, h = head // heads, head % heads
    key = tl.arange(0, BK)[None, :]
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    here = t < tokens
    inside = key < KEYS
    k += row * k_batch + h * k_head
    left += row * left_batch + h * left_head
    v_1 += row * v_1_batch + h * v_1_head
    v_2 += row * v_2_batch + h * v_2_head
    at = (row * tokens + t) * heads + h  # of [B, T, H]
    of_part = tl.num_programs(1).to(tl.int64) * VALUES * KEYS
    of_sums += head * VALUES * KEYS

    power = tl.load(k + t * k_token + key, mask=here & inside, other=0.0).to(tl.float32)
    remains = _left(left, left_token, t, here, key, inside, EACH)
    kept = power * remains
    # Of left k, without what comes by left k^2.
    of_kept = _of_values(
        of_sums, of_sums + N * of_part, v_1 + t * v_1_token, d_v_1 + at * VALUES, kept,
        here, inside, key, KEYS, VALUES, BV,
    )  # fmt: skip
    of_power = tl.zeros([BT, BK], tl.float32)  # of k, the other factor of left k^2
    if N == 2:
        of_squared = _of_values(
            of_sums + of_part, of_sums + 3 * of_part, v_2 + t * v_2_token, d_v_2 + at * VALUES, kept * power,
            here, inside, key, KEYS, VALUES, BV,
        )  # fmt: skip
        of_power = of_squared * kept
        of_kept += of_squared * power
    of_power += of_kept * remains
    tl.store(d_k + at * KEYS + key, of_power.to(d_k.dtype.element_ty), mask=here & inside)
    of_left = of_kept * power
    if EACH:
        tl.store(d_left + at * KEYS + key, of_left, mask=here & inside)
    else:
        tl.store(d_left + at, tl.sum(of_left, axis=1)[:, None], mask=here)
