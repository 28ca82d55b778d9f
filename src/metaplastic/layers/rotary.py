"""Rotary positions: a token's place as an angle between its query and every key.

``Rot(n)`` turns the pair (i, i + K // 2) by ``n base^(-2 i / K)`` (the halves of Llama; the last dimension of an odd K
stays).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def rotated(tensors: Sequence[Tensor], position: Tensor, base: float) -> list[Tensor]:
    """Each ``[B, T, heads, K]`` at ``position [B or 1, T]``; heads may differ."""
    half = tensors[0].shape[-1] // 2
    cos, sin = _turns(position, half, base, tensors[0].dtype)
    return [_turned(x, cos, sin) for x in tensors]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@torch.library.custom_op("metaplastic::rotary_turns", mutates_args=())
def _turns(position: Tensor, half: int, base: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines ``[2, B or 1, T, 1, half]`` of the angles, which are float64, or a long text loses its place.

    An op, for a compiler would put these sines into the loops over heads, where a GPU takes a third of a step for them.
    """
    wide = torch.float32 if position.device.type == "mps" else torch.float64
    steps = torch.arange(half, device=position.device, dtype=wide) / max(half, 1)
    angle = position.to(wide)[..., None, None] * base**-steps
    return torch.stack([angle.cos(), angle.sin()]).to(dtype)


@_turns.register_fake
def _(position, half, base, dtype):
    return position.new_empty((2, *position.shape, 1, half), dtype=dtype)
