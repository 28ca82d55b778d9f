"""What mixers share: the inputs of their rules, what they carry from token to token, and the protocol itself.

The fields of every kind of gates have the names of its operator's arguments: ``op(**gates._asdict(), scale=...)``.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import ops
from ..ops import dispatch
from ..ops.contract import check_mask, check_packing, compute_dtype, inside_sequences, read_offsets, written_dtype
from ..rules import AdditiveState
from .convolution import ShortConvolution
from .options import check_range, check_sizes


class AdditiveGates(NamedTuple):
    """Inputs of ``ops.additive``: q, k [B,T,H,K], v [B,T,H,V], g [B,T,H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class PalimpsaGates(NamedTuple):
    """Inputs of ``ops.palimpsa``: q, k [B,T,H,K], w, beta [B,T,H,V], g [B,T,H], prior [H]."""

    q: Tensor
    k: Tensor
    w: Tensor
    beta: Tensor
    g: Tensor
    prior: Tensor


class DeltaGates(NamedTuple):
    """Inputs of ``ops.delta``: q, k [B,T,H,K], v [B,T,H,V], beta [B,T,H], g [B,T,H] or [B,T,H,K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


class BayesianGates(NamedTuple):
    """Inputs of ``ops.bayesian``: q, k [B,T,H,K], v [B,T,H,V], the others as that operator says."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    process_noise: Tensor
    observation_noise: Tensor
    prior_variance: Tensor
    rotation: Tensor | None


Gates = AdditiveGates | PalimpsaGates | DeltaGates | BayesianGates


class MixerState(NamedTuple):
    """What one layer carries from token to token."""

    convolution: Tensor  # [B, W - 1, channels], the last inputs of the short convolution
    memory: Any  # of class memory_type: a NamedTuple of tensors [B, ...]


class Projected(NamedTuple):
    """What a mixer makes of its activations."""

    gates: Any  # the rule's inputs
    values: Tensor  # [B, T, H, V], before the write strength: what the residual D passes on
    output_gate: Tensor  # [B, T, H * V]
    convolution: Tensor  # the new state of the short convolution


class Mixer(nn.Module):
    """Short convolution, gates, additive rule, gated read-out: the frame that the mixers fill in.

    A mixer defines ``_project`` (activations to :class:`Projected`) and ``_output`` (read-out to activations), and
    inherits calls, checks, padding, packing and states. Its rule is the additive one unless
    :class:`~metaplastic.layers.evidence.Evidence` is mixed in.
    """

    operator: str = "additive"  # its name in ``metaplastic.ops``
    memory_type: type = AdditiveState
    growing_state: bool = False  # whether it holds a slot for every token
    state_options: tuple[str, ...] = ()  # options beyond sizes on which the meaning of a state depends
    no_weight_decay: tuple[str, ...] = ("A_log", "dt_bias", "D")  # parameters that weight decay would bias
    value_expansion: int = 1  # default value_size of a language model: this many times hidden_size / num_heads
    has_residual: bool = True  # whether D times the values is added to the read-out

    conv: ShortConvolution | None
    scale: float  # multiplies q

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        decay_range: tuple[float, float],
        dt_range: tuple[float, float],
        backend: str,
        *,
        decays: int | None = None,
    ):
        """``decays``: how many a head has, None for one without an axis of its own."""
        super().__init__()
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, key_size=key_size, value_size=value_size)
        dispatch.check_name(self.operator, backend)
        self.hidden_size, self.num_heads, self.key_size, self.value_size = hidden_size, num_heads, key_size, value_size
        self.decay_range = check_range("decay_range", decay_range, 0.0)
        self.dt_range, self.backend = check_range("dt_range", dt_range, 1e-9), backend
        shape = (num_heads,) if decays is None else (num_heads, decays)
        self.A_log = nn.Parameter(torch.empty(shape))
        self.dt_bias = nn.Parameter(torch.empty(shape))
        if self.has_residual:
            self.D = nn.Parameter(torch.empty(num_heads))

    @property
    def around(self) -> str:
        """The backend of what lies around the rule (short convolution, lengths of 1, evidence): where that is the
        reference, PyTorch's operations there too."""
        return "torch" if self.backend == "reference" else "auto"

    def _init_rule(self) -> None:
        """Makes the parameters that only this rule has; mixers call it last, so that shared ones are drawn alike."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters held directly by this module (not those of its submodules)."""
        nn.init.uniform_(self.A_log, self.decay_range[0], self.decay_range[1])
        self.A_log.clamp_(min=1e-4).log_()  # A = 0 would never forget and have no gradient through exp(A_log)
        low, high = self.dt_range
        nn.init.uniform_(self.dt_bias, math.log(low), math.log(high)).exp_()
        self.dt_bias.copy_(self.dt_bias + torch.log(-torch.expm1(-self.dt_bias)))  # inverse softplus
        if self.has_residual:
            nn.init.ones_(self.D)

    def init_state(self, batch: int) -> MixerState:
        """The state before the first token, for ``batch`` sequences."""
        shape = (batch, self.num_heads, self.value_size, self.key_size)
        dtype = compute_dtype(self.A_log)
        memory = self.memory_type(*(self.A_log.new_zeros(shape, dtype=dtype) for _ in self.memory_type._fields))
        return MixerState(self._empty_convolution(batch), memory)

    def _empty_convolution(self, batch: int) -> Tensor:
        return self.A_log.new_zeros(batch, 0, 0) if self.conv is None else self.conv.init_state(batch)

    def gates(
        self,
        x: Float[Tensor, "B T D"],
        state: MixerState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, "..."] | None = None,
    ) -> Gates:
        """The inputs of this layer's rule for activations ``x``: run it with them to look at the memory.

        >>> operator = getattr(ops, layer.operator)                                     # doctest: +SKIP
        >>> operator(**layer.gates(x)._asdict(), scale=layer.scale).state               # doctest: +SKIP

        Going on from ``state``, its memory is the operator's ``initial_state``.
        """
        x, keep = enter(self, x, state, mask, cu_seqlens)
        return self._project(x, state, keep, cu_seqlens).gates

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: MixerState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, "..."] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], MixerState | None]:
        """One call for training, prefill, continuation and decoding.

        Args:
            x: activations ``[B, T, hidden_size]``.
            state: from the previous call or :meth:`init_state`; None starts afresh.
            mask: True (non-zero) at real tokens; padded tokens change nothing, give y = 0 and get zero gradient.
            cu_seqlens: ``[N + 1]`` offsets of packed sequences (then B = 1); not together with ``mask``.
            keep_state: False where no call goes on from here: None instead of the new state.

        Returns:
            y ``[B, T, hidden_size]`` and the new state (N rows when packed).

        Raises:
            ValueError, TypeError: a wrong shape, dtype, mask, state or offset; the message names the argument.
        """
        x, keep = enter(self, x, state, mask, cu_seqlens)
        gates, values, output_gate, convolution = self._project(x, state, keep, cu_seqlens)
        read = getattr(ops, self.operator)(
            **gates._asdict(),
            initial_state=None if state is None else state.memory,
            cu_seqlens=cu_seqlens,
            scale=self.scale,
            backend=self.backend,
        )
        o = read.output
        if self.has_residual:
            o = torch.addcmul(o, self.D.to(values.dtype)[:, None], values)
        y = self._output(o, output_gate)
        y = y if keep is None else y.masked_fill(~keep[..., None], 0)
        return y, MixerState(convolution, read.state) if keep_state else None

    def _project(self, x: Tensor, state: MixerState | None, keep: Tensor | None, cu_seqlens) -> Projected:
        raise NotImplementedError

    def _output(self, o: Tensor, output_gate: Tensor) -> Tensor:
        """Read-out ``[B, T, H, V]`` and gate ``[B, T, H * V]`` to ``[B, T, hidden_size]``."""
        raise NotImplementedError

    def _rule_inputs(self, x: Tensor, q: Tensor, k: Tensor, u: Tensor, strength: Tensor, g: Tensor):
        """The rule's inputs; ``strength [B, T, H, 1]`` scales the values u, and every kind of evidence."""
        return AdditiveGates(q, k, (u * strength).to(written_dtype(u, strength)), g)

    def _log_decay(self, dt: Tensor) -> Tensor:
        return -self.A_log.to(dt.dtype).exp() * dt

    def _convolve(self, x: Tensor, state: MixerState | None, keep: Tensor | None, cu_seqlens) -> tuple[Tensor, Tensor]:
        """The new state too; without a convolution x itself and an empty state."""
        if self.conv is None:
            return x, self._empty_convolution(x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        return self.conv(
            x,
            None if state is None else state.convolution,
            mask=keep if cu_seqlens is None else None,
            cu_seqlens=cu_seqlens,
        )


def enter(layer: Any, x, state, mask, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    """Checks the arguments; x with zeros at tokens that do not count, and which do ([B, T] bool; None: all)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != 3 or x.shape[-1] != layer.hidden_size:
        raise ValueError(f"x must be [B, T, {layer.hidden_size}], got {list(x.shape)}")
    if mask is not None and cu_seqlens is not None:
        raise ValueError("give mask (padded batch) or cu_seqlens (packed sequences), not both")
    check_packing(type(layer).__name__, cu_seqlens, x.shape[0])
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        read_offsets(type(layer).__name__, cu_seqlens, x.shape[1])
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


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, T, G, K]`` -> ``[B, T, heads, K]``, each of the G repeated next to itself.

    To be followed by an elementwise operation: with symbolic sizes Inductor cannot keep a bare repetition for the
    backward pass.
    """
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
