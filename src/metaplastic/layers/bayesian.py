r"""The Bayesian Layer: an exact filter with a dense key covariance, on Gated DeltaNet's backbone (arXiv 2605.31163).

    q, k = L2-normalise(act(conv4(W_q x))), same for k                  [H, K]
    v    = act(conv4(W_v x))                                            [H, V]  act: SiLU; without convolution identity
    g    = -exp(A_log) softplus(W_dt x + dt_bias)                       [H]     log decay, or [H, K] with decay="key"
    r2   = r2_min + softplus(W_r x + b_r)                               [H]     observation noise, or [H, G]
    l2   = (1 - exp(2 g)) p_inf            process_noise="coupled"      as g
           softplus(W_l x + b_l)           process_noise="free"         [H]
    o    = bayesian(q, k, v, g, l2, r2; P_0 = p0 I, scale = 1)
    y    = W_o (RMSNorm_per_head(o) SiLU(W_g x))

p0 and p_inf are softplus of a parameter per head, r2_min = 1e-4 (p0 + p_inf): what float32 resolves. The coupled noise
keeps the covariance below max(p0, p_inf) for ever. ``rotation`` turns the key pairs by W_theta x.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.contract import compute_dtype
from ..rules import GaussianState
from ..rules import bayesian as rule
from .backbone import DeltaNetBackbone
from .mixer import BayesianGates, MixerState, Projected
from .options import check_flags, check_sizes

DECAYS, NOISES = ("head", "key"), ("coupled", "free")


class BayesianLayer(DeltaNetBackbone):
    """The Bayesian Layer's mixer.

    Args:
        hidden_size: width D of the activations.
        num_heads: heads H.
        key_size, value_size: K and V of one head; the state of a head is K V + K^2 numbers (K V + G K^2 with groups).
        conv_size: kernel of the short convolution over q, k and v. None: no convolution.
        decay: "head", or "key" for one decay per key (per key pair with ``rotation``).
        rotation: turn the key pairs by learnt angles (a complex diagonal); needs an even key_size.
        process_noise: "coupled" to the decay, or "free".
        noise_groups: groups G of value columns with an observation noise and a covariance of their own; divides
            value_size. None: one, without an axis in the state.
        decay_range: A is drawn uniformly from it ((0.01, 0.16) for a memory that starts long).
        dt_range: dt at x = 0 is drawn log-uniformly from it.
        norm_eps: of the RMS norm of the read-out.
        backend: which implementation of the operator runs (``metaplastic.backends()``).
    """

    operator = "bayesian"
    memory_type = GaussianState
    has_residual = False
    no_weight_decay = ("A_log", "dt_bias", "prior_variance", "stationary_variance", "noise_bias")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        conv_size: int | None = 4,
        decay: str = "head",
        rotation: bool = False,
        process_noise: str = "coupled",
        noise_groups: int | None = None,
        decay_range: tuple[float, float] = (0.0, 16.0),
        dt_range: tuple[float, float] = (0.001, 0.1),
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        for name, value, known in (("decay", decay, DECAYS), ("process_noise", process_noise, NOISES)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        check_flags(rotation=rotation)
        check_sizes(key_size=key_size, value_size=value_size)
        if noise_groups is not None:
            check_sizes(noise_groups=noise_groups)
        if rotation and key_size % 2:
            raise ValueError(f"key_size must be even with rotation, got {key_size}")
        if noise_groups is not None and value_size % noise_groups:
            raise ValueError(f"noise_groups must divide value_size = {value_size}, got {noise_groups}")
        decays = None if decay == "head" else key_size // 2 if rotation else key_size
        super().__init__(hidden_size, num_heads, key_size, value_size, decay_range, dt_range, backend, decays=decays)
        self.decays, self.rotation, self.noise_groups = decays, rotation, noise_groups
        self.process_noise, self.scale = process_noise, 1.0
        keys, noises = num_heads * key_size, num_heads * (noise_groups or 1)
        self._init_inputs(None, conv_size)
        self.dt_proj = nn.Linear(hidden_size, num_heads * (decays or 1), bias=False)
        self.noise_proj = nn.Linear(hidden_size, noises, bias=False)
        self.process_proj = nn.Linear(hidden_size, num_heads, bias=False) if process_noise == "free" else None
        self.angle_proj = nn.Linear(hidden_size, keys // 2, bias=False) if rotation else None
        self._init_output(norm_eps)
        per_noise = (num_heads,) if noise_groups is None else (num_heads, noise_groups)
        self.prior_variance = nn.Parameter(torch.empty(per_noise))  # p0 through softplus
        self.stationary_variance = nn.Parameter(torch.empty(num_heads))  # p_inf through softplus
        self.noise_bias = nn.Parameter(torch.empty(per_noise))
        self.process_bias = None
        if process_noise == "free":
            self.process_bias = nn.Parameter(torch.empty(num_heads))
            self.no_weight_decay = (*self.no_weight_decay, "process_bias")
        self._init_rule()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter in (self.prior_variance, self.stationary_variance, self.noise_bias):
            nn.init.constant_(parameter, _inverse_softplus(1.0))  # r2 = p0: a first gain of about a half
        if self.process_bias is not None:
            nn.init.constant_(self.process_bias, _inverse_softplus(0.01))

    def init_state(self, batch: int) -> MixerState:
        prior = F.softplus(self.prior_variance.to(compute_dtype(self.prior_variance)))
        memory = rule.init_state(batch, self.num_heads, self.value_size, self.key_size, prior_variance=prior)
        return MixerState(self._empty_convolution(batch), memory)

    def _project(self, x, state, keep, cu_seqlens) -> Projected:
        q, k, v, convolution = self._queries_keys_values(x, state, keep, cu_seqlens)
        dtype = compute_dtype(x)  # decays, noises and angles are at least float32, whatever the activations
        decays = self.dt_proj(x).to(dtype).unflatten(-1, self.A_log.shape)
        g = self._log_decay(F.softplus(decays + self.dt_bias.to(dtype)))
        prior, stationary = (F.softplus(p.to(dtype)) for p in (self.prior_variance, self.stationary_variance))
        per_noise = stationary if self.noise_groups is None else stationary[:, None]
        noise = self.noise_proj(x).to(dtype).unflatten(-1, self.noise_bias.shape) + self.noise_bias.to(dtype)
        observation = 1e-4 * (prior + per_noise) + F.softplus(noise)
        if self.process_proj is not None and self.process_bias is not None:
            process = F.softplus(self.process_proj(x).to(dtype) + self.process_bias.to(dtype))
        else:
            per_key = g.repeat_interleave(2, -1) if self.rotation and self.decays is not None else g
            process = -torch.expm1(2 * per_key) * (stationary if self.decays is None else stationary[:, None])
        angle = None
        if self.angle_proj is not None:
            # Any elementwise operation: Inductor cannot keep a bare view for the backward pass at symbolic sizes.
            angle = torch.neg(-self.angle_proj(x).to(dtype).unflatten(-1, (self.num_heads, -1)))
        if keep is not None:
            pad = ~keep[..., None]
            k, g, process = (_silent(z, pad) for z in (k, g, process))
            angle = None if angle is None else _silent(angle, pad)
        gates = BayesianGates(q, k, v, g, process, observation, prior, angle)
        return Projected(gates, v, self.gate_proj(x), convolution)


def _silent(x: Tensor, pad: Tensor) -> Tensor:
    return x.masked_fill(pad if x.dim() == 3 else pad[..., None], 0)


def _inverse_softplus(x: float) -> float:
    return x + math.log(-math.expm1(-x))
