"""A short causal depthwise convolution that keeps its last inputs as a state, and never looks through padding."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..ops.contract import compute_dtype


class ShortConvolution(nn.Module):
    """``y_t = sum_i weight[:, W - 1 - i] x_{t - i} + bias`` over the last W real tokens, per channel.

    The state is the last W - 1 real inputs, ``[B, W - 1, C]`` (``[N, W - 1, C]`` for packed sequences). Padded tokens
    are skipped, wherever they stand: what a real token sees and what the state holds are as if they were not there.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = False):
        super().__init__()
        for name, size in (("channels", channels), ("kernel_size", kernel_size)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        self.channels, self.kernel_size = channels, kernel_size
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.kernel_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"

    def init_state(self, batch: int) -> Float[Tensor, "B W C"]:
        return self.weight.new_zeros(batch, self.kernel_size - 1, self.channels)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        state: Float[Tensor, "N W C"] | None = None,
        *,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, "..."] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "N W C"]]:
        """Returns the outputs and the new state. ``mask`` is True at real tokens; not together with ``cu_seqlens``."""
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        expected = (rows, self.kernel_size - 1, self.channels)
        if state is None:
            state = x.new_zeros(expected)
        elif tuple(state.shape) != expected:
            raise ValueError(f"the convolution state must be {list(expected)}, got {list(state.shape)}")
        state = state.to(x.dtype)
        if cu_seqlens is not None:
            return self._packed(x, state, cu_seqlens)
        if mask is not None:
            return self._padded(x, state, mask)
        window = torch.cat([state, x], 1)
        return self._convolve(window), window[:, x.shape[1] :].clone()

    def _convolve(self, window: Tensor) -> Tensor:
        """``[B, W - 1 + T, C] -> [B, T, C]``."""
        if window.shape[1] == self.kernel_size:  # one token, its sum in float32 as within a convolution
            dtype = compute_dtype(window)
            y = (window.to(dtype) * self.weight.T.to(dtype)).sum(1, keepdim=True)
            return (y if self.bias is None else y + self.bias.to(dtype)).to(window.dtype)
        if window.shape[1] < self.kernel_size:
            return window[:, :0]
        bias = None if self.bias is None else self.bias.to(window.dtype)
        y = F.conv1d(window.transpose(1, 2), self.weight[:, None].to(window.dtype), bias, groups=self.channels)
        return y.transpose(1, 2).contiguous()  # channels last, as all that follows has it

    def _padded(self, x: Tensor, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Moves the real tokens of each row to its front, convolves, and puts them back."""
        order = torch.argsort(~mask, dim=1, stable=True)
        front = x.masked_fill(~mask[..., None], 0).gather(1, order[..., None].expand_as(x))
        window = torch.cat([state, front], 1)
        y = self._convolve(window).gather(1, order.argsort(1)[..., None].expand_as(x))
        last = mask.sum(1, keepdim=True) + torch.arange(self.kernel_size - 1, device=x.device)
        return y, window.gather(1, last[..., None].expand(-1, -1, self.channels))

    def _packed(self, x: Tensor, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Lays the sequences out one after the other, each behind its own state, and convolves once."""
        kept = self.kernel_size - 1
        offsets = cu_seqlens.to(x.device, torch.int64, non_blocking=True)
        token = torch.arange(x.shape[1], device=x.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)  # N for the tail
        slot = token + kept * (sequence + 1).clamp(max=len(offsets) - 1)
        state_slot = offsets[:-1, None] + kept * torch.arange(len(offsets) - 1, device=x.device)[:, None]
        state_slot = state_slot + torch.arange(kept, device=x.device)
        window = x.new_zeros(kept * (len(offsets) - 1) + x.shape[1], self.channels)
        window = window.index_copy(0, slot, x[0]).index_copy(0, state_slot.flatten(), state.flatten(0, 1))
        y = F.pad(self._convolve(window[None]), (0, 0, kept, 0))[:, slot]
        inside = (sequence < len(offsets) - 1)[:, None]
        return y.where(inside, 0), window[state_slot + (offsets[1:] - offsets[:-1])[:, None]]
