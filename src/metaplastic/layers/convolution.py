"""A short causal depthwise convolution that keeps its last inputs as a state, and never looks through padding."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..ops.convolution import check_names, short_convolution


class ShortConvolution(nn.Module):
    """``y_t = act(sum_i weight[:, W - 1 - i] x_{t - i} + bias)`` over the last W real tokens, per channel.

    The state is the last W - 1 real inputs, ``[B, W - 1, C]`` (``[N, W - 1, C]`` for packed sequences). Padded tokens
    are skipped, wherever they stand: what a real token sees and what the state holds are as if they were not there.
    ``activation`` is "silu" or None; ``backend`` names one of ``ops.convolution``.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 4,
        *,
        bias: bool = False,
        activation: str | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        check_names(backend, activation)
        for name, size in (("channels", channels), ("kernel_size", kernel_size)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        self.channels, self.kernel_size, self.activation, self.backend = channels, kernel_size, activation, backend
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.kernel_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        options = f"bias={self.bias is not None}, activation={self.activation!r}"
        return f"{self.channels}, kernel_size={self.kernel_size}, {options}"

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
        if mask is None or cu_seqlens is not None:
            return self._convolve(x, state, cu_seqlens)
        state = self.init_state(x.shape[0]) if state is None else state
        return self._padded(x, state.to(x.dtype), mask)

    def _padded(self, x: Tensor, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Moves the real tokens of each row to its front, convolves, and puts them back."""
        order = torch.argsort(~mask, dim=1, stable=True)
        front = x.masked_fill(~mask[..., None], 0).gather(1, order[..., None].expand_as(x))
        y = self._convolve(front, state)[0].gather(1, order.argsort(1)[..., None].expand_as(x))
        last = mask.sum(1, keepdim=True) + torch.arange(self.kernel_size - 1, device=x.device)
        return y, torch.cat([state, front], 1).gather(1, last[..., None].expand(-1, -1, self.channels))

    def _convolve(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return short_convolution(
            x,
            self.weight,
            self.bias,
            state,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            backend=self.backend,
        )
