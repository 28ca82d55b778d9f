r"""Mamba2's mixer: the additive rule with write and forgetting coupled through one step size dt.

    z, xBC, dt = split(W_in x)                                  xBC: values [H, V], keys and queries [G, K] each
    u, k, q    = split(SiLU(conv4(xBC)))                        k, q repeated over the H / G heads of their group
    dt = clamp(softplus(dt + dt_bias), dt_limit),  g = -exp(A_log) dt                     [H]
    w  = u dt                                                                             [H, V]
    o  = additive(q, k, w, g; scale = 1) + D u
    y  = W_out GatedRMSNorm(o, z)                               o SiLU(z), then the norm

The mixer of Hugging Face's ``Mamba2`` with the same weights. That one (as mamba_ssm) normalises each of the G groups on
its own, the default here; ``norm_groups=1`` normalises the whole width, as Palimpsa-M is published.

dt and g are float32 at least, whatever the activations; w and Palimpsa-M's evidence are rounded once, to bfloat16 where
activations are, since kernels for 16 bits take no wider ones.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.contract import compute_dtype
from .convolution import ShortConvolution
from .mixer import Mixer, Projected, repeat_heads
from .options import check_flags, check_positive, check_range, check_sizes


class GatedRMSNorm(nn.Module):
    """``weight RMSNorm(x SiLU(gate))``, each of ``groups`` equal parts of the width normalised on its own."""

    def __init__(self, width: int, groups: int = 1, eps: float = 1e-5):
        super().__init__()
        self.width, self.groups, self.eps = width, groups, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{self.width}, groups={self.groups}, eps={self.eps}"

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate ``[..., width]``; in float32 inside, out in the weight's dtype."""
        dtype = compute_dtype(x)
        y = (x.to(dtype) * F.silu(gate.to(dtype))).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.flatten(-2).to(self.weight.dtype)


class Mamba2(Mixer):
    """Mamba2's mixer, and the ablation of Palimpsa-M.

    Args:
        hidden_size: width D of the activations.
        num_heads: heads H.
        key_size, value_size: K ("state size") and V ("head dimension"); num_heads * value_size is usually 2 D.
        num_groups: groups G that share keys and queries ("n_groups"); divides num_heads.
        norm_groups: parts of the width that the output norm treats on their own. None: num_groups; 1: whole width.
        conv_size, conv_bias: kernel of the short convolution, and whether it has a bias.
        bias: whether the projections have biases.
        decay_range: A is drawn uniformly from it.
        dt_range: dt at x = 0 is drawn log-uniformly from it.
        dt_limit: dt is clamped to it; the upper end may be infinite.
        norm_eps: of the output norm.
        backend: which implementation of the operator runs (``metaplastic.backends()``).
    """

    value_expansion = 2

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        num_groups: int = 1,
        norm_groups: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        decay_range: tuple[float, float] = (0.0, 16.0),
        dt_range: tuple[float, float] = (0.001, 0.1),
        dt_limit: tuple[float, float] = (0.0, math.inf),
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        super().__init__(hidden_size, num_heads, key_size, value_size, decay_range, dt_range, backend)
        check_sizes(num_groups=num_groups, conv_size=conv_size)
        check_flags(conv_bias=conv_bias, bias=bias)
        check_positive(norm_eps=norm_eps)
        norm_groups = num_groups if norm_groups is None else norm_groups
        check_sizes(norm_groups=norm_groups)
        if num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads = {num_heads}, got {num_groups}")
        width = num_heads * value_size
        if width % norm_groups:
            raise ValueError(f"norm_groups must divide num_heads * value_size = {width}, got {norm_groups}")
        self.dt_limit = check_range("dt_limit", dt_limit, 0.0, unbounded=True)
        self.num_groups, self.scale = num_groups, 1.0
        mixed = width + 2 * num_groups * key_size
        self.in_proj = nn.Linear(hidden_size, width + mixed + num_heads, bias=bias)
        self.conv = ShortConvolution(mixed, conv_size, bias=conv_bias, backend=self.around)
        self.norm = GatedRMSNorm(width, norm_groups, norm_eps)
        self.out_proj = nn.Linear(width, hidden_size, bias=bias)
        self._init_rule()
        self.reset_parameters()

    def _project(self, x, state, keep, cu_seqlens) -> Projected:
        width, keys = self.num_heads * self.value_size, self.num_groups * self.key_size
        output_gate, mixed, dt = self.in_proj(x).split([width, width + 2 * keys, self.num_heads], -1)
        mixed, convolution = self._convolve(mixed, state, keep, cu_seqlens)
        u, k, q = mixed.split([width, keys, keys], -1)
        q, k = (z.unflatten(-1, (self.num_groups, self.key_size)) for z in (q, k))
        q, k = (F.silu(repeat_heads(z, self.num_heads)) for z in (q, k))
        if q.dtype == torch.float16:  # unnormalised keys and queries: the read-out may exceed it before the norm
            q = q.float()
        u = F.silu(u).unflatten(-1, (self.num_heads, self.value_size))
        dtype = compute_dtype(x)  # steps and decays are at least float32, whatever the activations
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.dt_limit)
        if keep is not None:
            dt = dt.masked_fill(~keep[..., None], 0)
        gates = self._rule_inputs(x, q, k, u, dt[..., None], self._log_decay(dt))
        return Projected(gates, u, output_gate, convolution)

    def _output(self, o: Tensor, output_gate: Tensor) -> Tensor:
        return self.out_proj(self.norm(o.flatten(2), output_gate))
