r"""Palimpsa-D: the metaplastic layer on a DeltaNet-style backbone, and its ablation (arXiv 2602.09075, App. A.1).

    q, k = L2-normalise(SiLU(conv4(W_q x))), same for k                 [H, K]
    u    = SiLU(conv4(W_v x))                                           [H, V]
    s    = sigmoid(W_s x)                                               [H]     input strength
    w    = u s                                                          [H, V]  write
    beta = sigmoid(W_b2 W_b1 x) softplus(b_scale) s                     [H, V]  evidence (layers/evidence.py)
    dt   = softplus(W_dt x + dt_bias),  g = -exp(A_log) dt              [H]     log decay
    o    = palimpsa(q, k, w, beta, g, prior; scale = K^-1/2) + D u
    y    = W_o (RMSNorm_per_head(o) SiLU(W_g x))

``PalimpsaDAdditive`` ("without metaplasticity") is the same layer with the additive rule on (q, k, w, g); ``PalimpsaD``
adds the evidence and the prior to it, so the weights of the former load into the latter.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.contract import compute_dtype
from .backbone import DeltaNetBackbone
from .evidence import Evidence
from .mixer import Projected
from .options import check_sizes


class PalimpsaDAdditive(DeltaNetBackbone):
    """Palimpsa-D without metaplasticity: the same projections and gates, the additive rule.

    Args:
        hidden_size: width D of the activations.
        num_heads: value heads H.
        key_size, value_size: K and V of one head.
        num_key_heads: heads of q and k; divides num_heads, each is repeated. None: num_heads.
        conv_size: kernel of the short convolution over q, k and v.
        decay_range: A is drawn uniformly from it ((0, 16) for language, (0.01, 0.16) for MQAR).
        dt_range: dt at x = 0 is drawn log-uniformly from it.
        norm_eps: of the RMS norm of the read-out.
        backend: which implementation of the operator runs (``metaplastic.backends()``).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        num_key_heads: int | None = None,
        conv_size: int = 4,
        decay_range: tuple[float, float] = (0.0, 16.0),
        dt_range: tuple[float, float] = (0.001, 0.1),
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        super().__init__(hidden_size, num_heads, key_size, value_size, decay_range, dt_range, backend)
        self.scale = key_size**-0.5
        check_sizes(conv_size=conv_size)  # always one here
        self._init_inputs(num_key_heads, conv_size)
        self.strength_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self._init_output(norm_eps)
        self._init_rule()
        self.reset_parameters()

    def _project(self, x, state, keep, cu_seqlens) -> Projected:
        q, k, u, convolution = self._queries_keys_values(x, state, keep, cu_seqlens)
        strength = torch.sigmoid(self.strength_proj(x))[..., None]
        dtype = compute_dtype(x)  # decays are at least float32, whatever the activations
        g = self._log_decay(F.softplus(self.dt_proj(x).to(dtype) + self.dt_bias.to(dtype)))
        if keep is not None:
            strength, g = strength.masked_fill(~keep[..., None, None], 0), g.masked_fill(~keep[..., None], 0)
        return Projected(self._rule_inputs(x, q, k, u, strength, g), u, self.gate_proj(x), convolution)


class PalimpsaD(Evidence, PalimpsaDAdditive):
    """Palimpsa-D: every memory element carries a precision; important elements resist change.

    Args: those of :class:`PalimpsaDAdditive` and of :class:`~metaplastic.layers.evidence.Evidence`.
    """
