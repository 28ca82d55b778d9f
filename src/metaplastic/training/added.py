"""What a shard of a sequence adds to an affine memory (``ops/added``), with its gradients.

Nothing is kept for the backward pass but the inputs, which the operator keeps anyway; where those are computed again,
the sums as well, which are as small as a state.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.checkpointing import once
from ..ops.added import gradients, sums


def added(k: Tensor, left: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """c_1 and so on ``[B, H, V, K]`` of as many ``values [B, T, H, V]`` in the dtype of left, ``[B, T, H, 1 or K]``."""
    return _Added.apply(k, left, *values)  # pyright: ignore[reportReturnType]


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, left: Tensor, *values: Tensor):
        ctx.save_for_backward(k, left, *values)
        return once(partial(sums, k, left, values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *of_sums: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        k, left, *values = ctx.saved_tensors
        return gradients(of_sums, k, left, values)
