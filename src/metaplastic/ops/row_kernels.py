"""What Triton kernels share whose programs have some tokens of a head and all of its columns (:mod:`.rows`)."""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def place(tokens, heads, WIDTH: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Of this program: its head, its tokens ``[BT, 1]``, its columns ``[1, BV]``, and which of both there are.

    Heads lie side by side in memory, and so do the programs that run at the same time.
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    t = program // heads * BT + tl.arange(0, BT)[:, None]
    column = tl.arange(0, BV)[None, :]
    return head, t, column, (t < tokens) & (column < WIDTH)
