"""The torch backend: PyTorch's own depthwise convolution, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import compute_dtype


def apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """As ``short_convolution``; ``state`` is of x's dtype."""
    if state is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = x.new_zeros(rows, weight.shape[1] - 1, weight.shape[0])
    if cu_seqlens is None:
        window = torch.cat([state, x], 1)
        y, new_state = _convolve(window, weight, bias), window[:, x.shape[1] :].clone()
    else:
        y, new_state = _packed(x, weight, bias, state, cu_seqlens)
    return F.silu(y) if silu else y, new_state


def _convolve(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[B, W - 1 + T, C] -> [B, T, C]``."""
    channels, width = weight.shape
    if window.shape[1] == width:  # one token, its sum in float32 as within a convolution
        dtype = compute_dtype(window)
        y = (window.to(dtype) * weight.T.to(dtype)).sum(1, keepdim=True)
        return (y if bias is None else y + bias.to(dtype)).to(window.dtype)
    if window.shape[1] < width:
        return window[:, :0]
    bias = None if bias is None else bias.to(window.dtype)
    y = F.conv1d(window.transpose(1, 2), weight[:, None].to(window.dtype), bias, groups=channels)
    return y.transpose(1, 2).contiguous()  # channels last, as all that follows has it


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Lays the sequences out one after the other, each behind its own state, and convolves once."""
    channels, kept = weight.shape[0], weight.shape[1] - 1
    offsets = cu_seqlens.to(x.device, torch.int64, non_blocking=True)
    token = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(offsets, token, right=True) - 1  # the first one is 0; N for the tail
    slot = token + kept * (sequence + 1).clamp(max=len(offsets) - 1)
    state_slot = offsets[:-1, None] + kept * torch.arange(len(offsets) - 1, device=x.device)[:, None]
    state_slot = state_slot + torch.arange(kept, device=x.device)
    window = x.new_zeros(kept * (len(offsets) - 1) + x.shape[1], channels)
    window = window.index_copy(0, slot, x[0]).index_copy(0, state_slot.flatten(), state.flatten(0, 1))
    y = F.pad(_convolve(window[None], weight, bias), (0, 0, kept, 0))[:, slot]
    inside = (sequence < len(offsets) - 1)[:, None]
    return y.where(inside, 0), window[state_slot + (offsets[1:] - offsets[:-1])[:, None]]
