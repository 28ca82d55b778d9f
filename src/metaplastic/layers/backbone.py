"""The DeltaNet-style backbone that several mixers share: normalised queries and keys, gated read-out per head.

q, k = L2-normalise(act(conv(W_q x))), same for k                   [H, K]
v    = act(conv(W_v x))                                             [H, V]  act: SiLU; without convolution identity
y    = W_o (RMSNorm_per_head(o) SiLU(W_g x))
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import ShortConvolution
from .mixer import Mixer, MixerState, repeat_heads
from .norms import l2_normalize
from .options import check_positive, check_sizes


class DeltaNetBackbone(Mixer):
    """What a mixer's constructor calls, in this order, its own projections between the two, so that draws agree."""

    def _init_inputs(self, num_key_heads: int | None, conv_size: int | None) -> None:
        """Projections of q, k and v and their convolution (None: none); key heads are repeated over the heads."""
        num_key_heads = self.num_heads if num_key_heads is None else num_key_heads
        check_sizes(num_key_heads=num_key_heads, conv_size=1 if conv_size is None else conv_size)
        if self.num_heads % num_key_heads:
            raise ValueError(f"num_key_heads must divide num_heads = {self.num_heads}, got {num_key_heads}")
        self.num_key_heads = num_key_heads
        keys, values = num_key_heads * self.key_size, self.num_heads * self.value_size
        self.q_proj = nn.Linear(self.hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, values, bias=False)
        self.conv = None
        if conv_size is not None:
            self.conv = ShortConvolution(2 * keys + values, conv_size, activation="silu", backend=self.around)

    def _init_output(self, norm_eps: float) -> None:
        check_positive(norm_eps=norm_eps)
        values = self.num_heads * self.value_size
        self.gate_proj = nn.Linear(self.hidden_size, values, bias=False)
        self.o_norm = nn.RMSNorm(self.value_size, eps=norm_eps)
        self.o_proj = nn.Linear(values, self.hidden_size, bias=False)

    def _queries_keys_values(
        self, x: Tensor, state: MixerState | None, keep: Tensor | None, cu_seqlens
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k ``[B, T, H, K]``, v ``[B, T, H, V]`` and the new state of the convolution."""
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        mixed, convolution = self._convolve(projected, state, keep, cu_seqlens)
        keys, values = self.num_key_heads * self.key_size, self.num_heads * self.value_size
        q, k, v = mixed.split([keys, keys, values], -1)
        q, k = (z.unflatten(-1, (self.num_key_heads, self.key_size)) for z in (q, k))
        q, k = (l2_normalize(repeat_heads(z, self.num_heads), self.around) for z in (q, k))
        return q, k, v.unflatten(-1, (self.num_heads, self.value_size)), convolution

    def _output(self, o: Tensor, output_gate: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(o.to(self.o_norm.weight.dtype)).flatten(2) * F.silu(output_gate))
