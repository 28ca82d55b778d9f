"""Batched products. One of a head would be tall and thin, and leave most of a GPU idle: tokens are summed in pieces,
all side by side."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PIECE = 1024  # tokens


def sums(k: Tensor, left: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    batch, _, heads, keys = k.shape
    found = [left.new_zeros(batch, heads, value.shape[-1], keys) for value in values]
    for part, pieces in _parts(k.shape[1]):
        power, kept = (_by_head(x[:, part], pieces, left.dtype) for x in (k, left))
        for total, value in zip(found, values, strict=True):
            kept = kept * power
            total += (_by_head(value[:, part], pieces, left.dtype).transpose(-1, -2) @ kept).sum(1)
    return tuple(found)


def gradients(of_sums: Sequence[Tensor], k: Tensor, left: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, left, *values)]
    of_sums = [gradient[:, None] for gradient in of_sums]  # the same for every piece
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
