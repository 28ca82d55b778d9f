"""The Triton kernels of vectors of length 1; the equations are in :mod:`.`. A program has BT tokens of a head."""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ..row_kernels import place


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    x, y, tokens, heads, x_token, x_head, EPS: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):
    head, t, key, here = place(tokens, heads, WIDTH, BT, BV)
    own = tl.load(x + t * x_token + head * x_head + key, mask=here, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(own * own, axis=1) + EPS)[:, None]
    tl.store(y + (t * heads + head) * WIDTH + key, (own * inverse).to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def backward_kernel(
    dy, x, dx, tokens, heads, dy_token, dy_head, x_token, x_head,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, t, key, here = place(tokens, heads, WIDTH, BT, BV)
    own = tl.load(x + t * x_token + head * x_head + key, mask=here, other=0.0).to(tl.float32)
    d = tl.load(dy + t * dy_token + head * dy_head + key, mask=here, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(own * own, axis=1) + EPS)[:, None]
    along = tl.sum(own * d, axis=1)[:, None] * inverse * inverse * inverse
    tl.store(dx + (t * heads + head) * WIDTH + key, (d * inverse - along * own).to(dx.dtype.element_ty), mask=here)
