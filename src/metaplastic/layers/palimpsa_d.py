r"""Palimpsa-D: the metaplastic layer on a DeltaNet-style backbone, and its ablation (arXiv 2602.09075, App. A.1).

    q, k = L2-normalise(SiLU(conv4(W_q x))), same for k                 [H, K]
    u    = SiLU(conv4(W_v x))                                           [H, V]
    s    = sigmoid(W_s x)                                               [H]     input strength
    w    = u s                                                          [H, V]  write
    beta = sigmoid(W_b2 W_b1 x) softplus(b_scale) s                     [H, V]  evidence
    dt   = softplus(W_dt x + dt_bias),  g = -exp(A_log) dt              [H]     log decay
    prior = exp(prior_log)                                              [H]     not trained by default
    o    = palimpsa(q, k, w, beta, g, prior; scale = K^-1/2) + D u
    y    = W_o (RMSNorm_per_head(o) SiLU(W_g x))

``PalimpsaDAdditive`` ("without metaplasticity") is the same layer with the additive rule on (q, k, w, g); ``PalimpsaD``
adds the evidence and the prior to it, so the weights of the former load into the latter.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import ops
from ..ops.contract import check_mask, check_packing, compute_dtype, inside_sequences
from ..rules import AdditiveState, PalimpsaState
from .convolution import ShortConvolution
from .mixer import AdditiveGates, MixerState, PalimpsaGates, l2_normalize


class PalimpsaDAdditive(nn.Module):
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

    memory_type: type = AdditiveState
    no_weight_decay = ("A_log", "dt_bias", "D")  # parameters of this module that weight decay would bias

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
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "key_size": key_size, "value_size": value_size}
        for name, size in (sizes | {"num_key_heads": num_key_heads}).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if num_heads % num_key_heads:
            raise ValueError(f"num_key_heads must divide num_heads = {num_heads}, got {num_key_heads}")
        for name, (low, high), least in (("decay_range", decay_range, 0.0), ("dt_range", dt_range, 1e-9)):
            if not least <= low <= high:
                raise ValueError(f"{name} must be (low, high) with {least:g} <= low <= high, got {(low, high)}")
        self.hidden_size, self.num_heads, self.num_key_heads = hidden_size, num_heads, num_key_heads
        self.key_size, self.value_size, self.backend = key_size, value_size, backend
        self.decay_range, self.dt_range = tuple(decay_range), tuple(dt_range)
        keys, values = num_key_heads * key_size, num_heads * value_size
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.conv = ShortConvolution(2 * keys + values, conv_size)
        self.strength_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.gate_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_norm = nn.RMSNorm(value_size, eps=norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self._init_rule()
        self.reset_parameters()

    def _init_rule(self) -> None:
        """Parameters that only this rule has."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters held directly by this module (not those of its submodules)."""
        nn.init.uniform_(self.A_log, self.decay_range[0], self.decay_range[1])
        self.A_log.clamp_(min=1e-4).log_()  # A = 0 would never forget and have no gradient through exp(A_log)
        low, high = self.dt_range
        nn.init.uniform_(self.dt_bias, math.log(low), math.log(high)).exp_()
        self.dt_bias.copy_(self.dt_bias + torch.log(-torch.expm1(-self.dt_bias)))  # inverse softplus
        nn.init.ones_(self.D)

    def init_state(self, batch: int) -> MixerState:
        """The state before the first token, for ``batch`` sequences."""
        shape = (batch, self.num_heads, self.value_size, self.key_size)
        dtype = compute_dtype(self.A_log)
        memory = self.memory_type(*(self.A_log.new_zeros(shape, dtype=dtype) for _ in self.memory_type._fields))
        return MixerState(self.conv.init_state(batch), memory)

    def gates(
        self,
        x: Float[Tensor, "B T D"],
        state: MixerState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, "..."] | None = None,
    ) -> AdditiveGates | PalimpsaGates:
        """The inputs of this layer's rule for activations ``x``: replay the rule with them to look at the memory."""
        x, keep = self._enter(x, state, mask, cu_seqlens)
        return self._project(x, state, keep, cu_seqlens)[0]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: MixerState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, "..."] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """One call for training, prefill, continuation and decoding.

        Args:
            x: activations ``[B, T, hidden_size]``.
            state: from the previous call or :meth:`init_state`; None starts afresh.
            mask: True (non-zero) at real tokens; padded tokens change nothing, give y = 0 and get zero gradient.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences (then B = 1); not together with ``mask``.

        Returns:
            y ``[B, T, hidden_size]`` and the new state (N rows when packed).
        """
        x, keep = self._enter(x, state, mask, cu_seqlens)
        gates, u, convolution = self._project(x, state, keep, cu_seqlens)
        read = self._operator(*gates, None if state is None else state.memory, cu_seqlens)
        o = read.output + self.D.to(u.dtype)[:, None] * u
        o = self.o_norm(o.to(self.o_norm.weight.dtype)).flatten(2) * F.silu(self.gate_proj(x))
        y = self.o_proj(o)
        return y if keep is None else y.masked_fill(~keep[..., None], 0), MixerState(convolution, read.state)

    def _operator(self, q, k, v, g, memory, cu_seqlens) -> ops.MemoryRead:
        return ops.additive(
            q, k, v, g, initial_state=memory, cu_seqlens=cu_seqlens, scale=self.key_size**-0.5, backend=self.backend
        )

    def _rule_inputs(self, x: Tensor, q: Tensor, k: Tensor, u: Tensor, strength: Tensor, g: Tensor):
        return AdditiveGates(q, k, u * strength, g)

    def _enter(self, x, state, mask, cu_seqlens) -> tuple[Tensor, Tensor | None]:
        """Checks the arguments; x with zeros at tokens that do not count, and which do ([B, T] bool; None: all)."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x must be [B, T, {self.hidden_size}], got {list(x.shape)}")
        if mask is not None and cu_seqlens is not None:
            raise ValueError("give mask (padded batch) or cu_seqlens (packed sequences), not both")
        check_packing(type(self).__name__, cu_seqlens, x.shape[0])
        if mask is not None:
            check_mask("mask", mask)
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"mask must be [B, T] = {list(x.shape[:2])}, got {list(mask.shape)}")
        if state is not None and not isinstance(state, MixerState):
            raise TypeError(f"state must be a MixerState from this layer, got {type(state).__name__}")
        if mask is not None:
            keep = mask.bool()
        elif cu_seqlens is not None:
            keep = inside_sequences(cu_seqlens, x.shape[1], x.device)[None]
        else:
            return x, None
        return x.masked_fill(~keep[..., None], 0), keep

    def _project(self, x, state, keep, cu_seqlens):
        """The rule's inputs, the ungated values u [B, T, H, V] and the new convolution state."""
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        mixed, convolution = self.conv(
            projected,
            None if state is None else state.convolution,
            mask=keep if cu_seqlens is None else None,
            cu_seqlens=cu_seqlens,
        )
        keys, values = self.num_key_heads * self.key_size, self.num_heads * self.value_size
        q, k, u = F.silu(mixed).split([keys, keys, values], -1)
        q, k = (l2_normalize(z.unflatten(-1, (self.num_key_heads, self.key_size))) for z in (q, k))
        if self.num_key_heads != self.num_heads:
            q, k = (z.repeat_interleave(self.num_heads // self.num_key_heads, 2) for z in (q, k))
        u = u.unflatten(-1, (self.num_heads, self.value_size))
        strength = torch.sigmoid(self.strength_proj(x))[..., None]
        dtype = compute_dtype(x)  # decays are at least float32, whatever the activations
        dt = F.softplus(self.dt_proj(x).to(dtype) + self.dt_bias.to(dtype))
        g = -self.A_log.to(dtype).exp() * dt
        if keep is not None:
            strength, g = strength.masked_fill(~keep[..., None, None], 0), g.masked_fill(~keep[..., None], 0)
        return self._rule_inputs(x, q, k, u, strength, g), u, convolution


class PalimpsaD(PalimpsaDAdditive):
    """Palimpsa-D: every memory element carries a precision; important elements resist change.

    Args (beside those of :class:`PalimpsaDAdditive`):
        beta_rank: rank of the evidence projection; None: key_size.
        beta_scale_range: the parameter b_scale (it enters through softplus) is drawn uniformly from it: (1, 1) from
            scratch, (0.1, 1) for fine-tuning an ablation; far below 0 the layer is its ablation.
        prior: the prior precision of every head; a constant unless ``train_prior``.
    """

    memory_type = PalimpsaState
    no_weight_decay = (*PalimpsaDAdditive.no_weight_decay, "b_scale", "prior_log")

    def __init__(
        self,
        *args,
        beta_rank: int | None = None,
        beta_scale_range: tuple[float, float] = (1.0, 1.0),
        prior: float = 1.0,
        train_prior: bool = False,
        **kwargs,
    ):
        if not prior > 0:
            raise ValueError(f"prior must be > 0, got {prior}")
        if beta_rank is not None and beta_rank < 1:
            raise ValueError(f"beta_rank must be >= 1, got {beta_rank}")
        if not beta_scale_range[0] <= beta_scale_range[1]:
            raise ValueError(f"beta_scale_range must be (low, high) with low <= high, got {beta_scale_range}")
        self._beta_rank, self._beta_scale_range = beta_rank, tuple(beta_scale_range)
        self._prior, self._train_prior = prior, train_prior
        super().__init__(*args, **kwargs)

    def _init_rule(self) -> None:
        rank = self.key_size if self._beta_rank is None else self._beta_rank
        self.beta_down = nn.Linear(self.hidden_size, rank, bias=False)
        self.beta_up = nn.Linear(rank, self.num_heads * self.value_size, bias=False)
        self.beta_up.uniform_range = rank**-0.5  # stays so in a language model (where other weights are normal)
        self.b_scale = nn.Parameter(torch.empty(self.num_heads))
        prior_log = torch.empty(self.num_heads)
        if self._train_prior:
            self.prior_log = nn.Parameter(prior_log)
        else:  # a buffer: loaders make every parameter trainable
            self.register_buffer("prior_log", prior_log)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.b_scale, self._beta_scale_range[0], self._beta_scale_range[1])
        nn.init.constant_(self.prior_log, math.log(self._prior))

    def _rule_inputs(self, x, q, k, u, strength, g) -> PalimpsaGates:
        evidence = torch.sigmoid(self.beta_up(self.beta_down(x))).unflatten(-1, (self.num_heads, self.value_size))
        scale = F.softplus(self.b_scale)[:, None].to(evidence.dtype)
        prior = self.prior_log.to(g.dtype).exp()
        return PalimpsaGates(q, k, u * strength, evidence * scale * strength, g, prior)

    def _operator(self, q, k, w, beta, g, prior, memory, cu_seqlens) -> ops.MemoryRead:
        return ops.palimpsa(
            q, k, w, beta, g, prior,
            initial_state=memory, cu_seqlens=cu_seqlens, scale=self.key_size**-0.5, backend=self.backend,
        )  # fmt: skip
