r"""The Triton kernels of the write and its evidence; the equations are in :mod:`.`.

Layout     A program has BT tokens of a head and all of its values. Everything is read once and written once.
Precision  float32 from what is read to what is written. The gradient of c is a sum for each program, and the sums of
           the programs are added up afterwards: no atomics, the same bits in every run.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ..row_kernels import place


@triton.jit
def _sigmoid(e, at, here):
    """sigmoid(e) and its derivative, neither from a difference."""
    p = tl.load(e + at, mask=here, other=0.0).to(tl.float32)
    x = tl.exp(-tl.abs(p))
    part = 1 / (1 + x)
    return tl.where(p < 0, x * part, part), x * part * part


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    u, e, s, c, w, beta, tokens, heads, u_token, u_head, e_token, e_head,
    VALUES: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Rows of u and e as they come; s, w and beta are contiguous."""
    head, t, value, here = place(tokens, heads, VALUES, BT, BV)
    strength = tl.load(s + t * heads + head, mask=t < tokens, other=0.0).to(tl.float32)
    scale = tl.load(c + head).to(tl.float32)
    values = tl.load(u + t * u_token + head * u_head + value, mask=here, other=0.0).to(tl.float32)
    evidence, _slope = _sigmoid(e, t * e_token + head * e_head + value, here)
    at = (t * heads + head) * VALUES + value
    tl.store(w + at, (values * strength).to(w.dtype.element_ty), mask=here)
    tl.store(beta + at, (evidence * (scale * strength)).to(beta.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def backward_kernel(
    dw, d_beta, u, e, s, c, du, de, ds, sums, tokens, heads,
    dw_token, dw_head, d_beta_token, d_beta_head, u_token, u_head, e_token, e_head,
    VALUES: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """``sums`` [programs of a head, H]; du, de, ds and s are contiguous."""
    head, t, value, here = place(tokens, heads, VALUES, BT, BV)
    strength = tl.load(s + t * heads + head, mask=t < tokens, other=0.0).to(tl.float32)
    scale = tl.load(c + head).to(tl.float32)
    of_write = tl.load(dw + t * dw_token + head * dw_head + value, mask=here, other=0.0).to(tl.float32)
    of_beta = tl.load(d_beta + t * d_beta_token + head * d_beta_head + value, mask=here, other=0.0).to(tl.float32)
    values = tl.load(u + t * u_token + head * u_head + value, mask=here, other=0.0).to(tl.float32)
    evidence, slope = _sigmoid(e, t * e_token + head * e_head + value, here)
    at = (t * heads + head) * VALUES + value
    tl.store(du + at, (of_write * strength).to(du.dtype.element_ty), mask=here)
    tl.store(de + at, (of_beta * slope * (scale * strength)).to(de.dtype.element_ty), mask=here)
    of_both = tl.sum(of_beta * evidence, axis=1)[:, None]  # no term where there is no value
    of_strength = tl.sum(of_write * values, axis=1)[:, None] + scale * of_both
    tl.store(ds + t * heads + head, of_strength.to(ds.dtype.element_ty), mask=t < tokens)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(of_both * strength, axis=1), axis=0))
