"""``[B, T, H, N]`` tensors as elementwise Triton kernels take them."""

from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """``[B T, H, N]``, the last axis dense; some columns of a wider matrix stay where they are."""
    x = x.detach()
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).flatten(0, 1)


def strides(*tensors: Tensor) -> list[int]:
    """Of tokens and heads, one tensor after the other."""
    return [stride for x in tensors for stride in x.stride()[:2]]
