"""``[B, T, H, N]`` tensors as elementwise Triton kernels take them."""

from torch import Tensor

BLOCK = 4096  # numbers of a program, of each input; so no wider rows
WARPS = 8


def rows(x: Tensor) -> Tensor:
    """``[B T, H, N]``, the last axis dense; some columns of a wider matrix stay where they are."""
    x = x.detach()
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).flatten(0, 1)


def strides(*tensors: Tensor) -> list[int]:
    """Of tokens and heads, one tensor after the other."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def blocks(width: int) -> dict[str, int]:
    """Tokens and columns of a program (:mod:`.row_kernels`). They follow from the width alone: nothing is tuned."""
    columns = 1 << max(0, width - 1).bit_length()  # a power of two
    return {"BT": max(1, BLOCK // columns), "BV": columns, "num_warps": WARPS}
