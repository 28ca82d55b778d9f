r"""Gated DeltaNet: the delta rule on the backbone that the Bayesian Layer shares (arXiv 2412.06464).

    q, k = L2-normalise(SiLU(conv4(W_q x))), same for k                 [H, K]
    v    = SiLU(conv4(W_v x))                                           [H, V]
    beta = sigmoid(W_b x)                                               [H]     write strength
    g    = -exp(A_log) softplus(W_dt x + dt_bias)                       [H]     log decay
    o    = delta(q, k, v, beta, g; scale = K^-1/2)
    y    = W_o (RMSNorm_per_head(o) SiLU(W_g x))

It corrects what it answers wrongly, but every write goes along the key itself, whatever was learnt before.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.contract import compute_dtype
from ..rules import DeltaState
from .backbone import DeltaNetBackbone
from .mixer import DeltaGates, MixerState, Projected
from .options import check_flags, check_sizes


class GatedDeltaNet(DeltaNetBackbone):
    """Gated DeltaNet's mixer.

    Args:
        hidden_size: width D of the activations.
        num_heads: value heads H.
        key_size, value_size: K and V of one head.
        num_key_heads: heads of q and k; divides num_heads, each is repeated. None: num_heads.
        conv_size: kernel of the short convolution over q, k and v.
        negative_eigenvalues: beta = 2 sigmoid(.), with which a write can overshoot its residual.
        decay_range: A is drawn uniformly from it.
        dt_range: dt at x = 0 is drawn log-uniformly from it.
        norm_eps: of the RMS norm of the read-out.
        backend: which implementation of the operator runs (``metaplastic.backends()``).
    """

    operator = "delta"
    memory_type = DeltaState
    no_weight_decay = ("A_log", "dt_bias")
    has_residual = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        num_key_heads: int | None = None,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        decay_range: tuple[float, float] = (0.0, 16.0),
        dt_range: tuple[float, float] = (0.001, 0.1),
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        super().__init__(hidden_size, num_heads, key_size, value_size, decay_range, dt_range, backend)
        check_flags(negative_eigenvalues=negative_eigenvalues)
        self.scale, self.negative_eigenvalues = key_size**-0.5, negative_eigenvalues
        check_sizes(conv_size=conv_size)  # always one here
        self._init_inputs(num_key_heads, conv_size)
        self.beta_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self._init_output(norm_eps)
        self._init_rule()
        self.reset_parameters()

    def init_state(self, batch: int) -> MixerState:
        shape = (batch, self.num_heads, self.key_size, self.value_size)
        mean = self.A_log.new_zeros(shape, dtype=compute_dtype(self.A_log))
        return MixerState(self._empty_convolution(batch), DeltaState(mean))

    def _project(self, x, state, keep, cu_seqlens) -> Projected:
        q, k, v, convolution = self._queries_keys_values(x, state, keep, cu_seqlens)
        dtype = compute_dtype(x)  # strengths and decays are at least float32, whatever the activations
        beta = torch.sigmoid(self.beta_proj(x).to(dtype)) * (2 if self.negative_eigenvalues else 1)
        g = self._log_decay(F.softplus(self.dt_proj(x).to(dtype) + self.dt_bias.to(dtype)))
        if keep is not None:
            beta, g = beta.masked_fill(~keep[..., None], 0), g.masked_fill(~keep[..., None], 0)
        return Projected(DeltaGates(q, k, v, beta, g), v, self.gate_proj(x), convolution)
