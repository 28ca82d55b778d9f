r"""What a shard of a sequence adds to an affine memory, as products of matrices:

    c_n = sum_t left_t k_t^n v_{n,t}^T,   n = 1 (and 2 where there is evidence),   left_t = exp(g_{t+1} + ... + g_T)

One product of a head would be tall and thin, and leave most of a GPU idle: tokens are summed in pieces, all side by
side. Nothing is kept for the backward pass but the inputs, which the operator keeps anyway (where those are computed
again, the sums as well: they are as small as a state):

    dv_n = c'_n k^n left,   d(k^n left) = v_n c'_n,   and from these dk and dleft                    (c': gradient of c)
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.checkpointing import once

PIECE = 1024  # tokens


def added(k: Tensor, left: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """c_1 and so on ``[B, H, V, K]`` of as many ``values [B, T, H, V]`` in the dtype of left, ``[B, T, H, 1 or K]``."""
    return _Added.apply(k, left, *values)  # pyright: ignore[reportReturnType]


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, left: Tensor, *values: Tensor):
        ctx.save_for_backward(k, left, *values)
        return once(partial(_sums, k, left, values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        k, left, *values = ctx.saved_tensors
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, left, *values)]
        of_sums = [gradient[:, None] for gradient in gradients]  # the same for every piece
        for part, pieces in _parts(k.shape[1]):
            power, kept = (_by_head(x[:, part], pieces, left.dtype) for x in (k, left))
            powers = [kept]  # of left k^n
            for gradient, into in zip(of_sums, found[2:], strict=True):
                powers.append(powers[-1] * power)
                _put(into[:, part], powers[-1] @ gradient.transpose(-1, -2))
            of_power, of_kept = torch.zeros_like(power), torch.zeros_like(power)
            for value, gradient, before in reversed(list(zip(values, of_sums, powers, strict=False))):
                of_kept += _by_head(value[:, part], pieces, left.dtype) @ gradient
                of_power.addcmul_(of_kept, before.expand_as(power))
                of_kept *= power
            _put(found[0][:, part], of_power)
            _put(found[1][:, part], of_kept.sum(-1, keepdim=True) if left.shape[-1] == 1 else of_kept)
        return tuple(found)


def _sums(k: Tensor, left: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    batch, _, heads, keys = k.shape
    sums = [left.new_zeros(batch, heads, value.shape[-1], keys) for value in values]
    for part, pieces in _parts(k.shape[1]):
        power, kept = (_by_head(x[:, part], pieces, left.dtype) for x in (k, left))
        for total, value in zip(sums, values, strict=True):
            kept = kept * power
            total += (_by_head(value[:, part], pieces, left.dtype).transpose(-1, -2) @ kept).sum(1)
    return tuple(sums)


def _parts(length: int) -> Iterator[tuple[slice, int]]:
    """Tokens and how many pieces they are: as many whole ones as there are, then the rest."""
    whole = length // PIECE * PIECE
    if whole:
        yield slice(0, whole), whole // PIECE
    if whole < length:
        yield slice(whole, length), 1


def _by_head(x: Tensor, pieces: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, N] -> [B, pieces, H, T / pieces, N]``, cast and laid out in one pass."""
    return x.unflatten(1, (pieces, -1)).transpose(2, 3).to(dtype, memory_format=torch.contiguous_format)


def _put(into: Tensor, x: Tensor) -> None:
    """Back to ``[B, T, H, N]``, cast on the way."""
    into.unflatten(1, (x.shape[1], -1)).copy_(x.transpose(2, 3))
