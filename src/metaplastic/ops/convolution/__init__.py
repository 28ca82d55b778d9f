"""A short causal depthwise convolution with a state, and a SiLU on its output; which implementation of it runs.

    p_t = bias + sum_i weight[:, W - 1 - i] x_{t - i}    over the last W tokens; before the first one the state's
    y_t = p_t, or SiLU(p_t)                              new state: the last W - 1 inputs

x           [B, T, C]               floating point
weight      [C, W], bias [C]        floating point
state       [N, W - 1, C]           N = B, or the number of packed sequences; None: zeros
cu_seqlens  [N + 1]                 offsets of packed sequences, then B = 1; y is 0 behind the last one
returns y [B, T, C] and the new state [N, W - 1, C], both in x's dtype

``triton`` is one kernel forward and one backward, which keeps x alone; ``torch`` is PyTorch's convolution between
transposed copies. Sums are float32 or wider in both; torch rounds the weights to x's dtype first, and p once more
before SiLU. Second and forward-mode derivatives need ``torch``.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import fused
from ..contract import check_packing, full_precision, require
from . import plain

BACKENDS = ("triton", "torch")  # in order of preference
WIDEST = 8  # of the Triton kernels, which keep a window in registers
ACTIVATIONS = ("silu", None)
Optional = Tensor | None


def reason_against(backend: str, device: str, wide: bool = False) -> str | None:
    """Why ``backend`` cannot run here (``wide``: with W > WIDEST), or None if it can."""
    if backend == "torch":
        return None
    if wide:
        return f"takes weights of up to {WIDEST} tokens"
    return fused.reason_against("short_convolution", device)


def choose(backend: str, device: str, wide: bool = False) -> str:
    """The backend that ``backend`` ("auto" or a name) is on this device; raises if it cannot run."""
    if backend == "auto":
        return next(name for name in BACKENDS if reason_against(name, device, wide) is None)
    if (reason := reason_against(backend, device, wide)) is not None:
        raise RuntimeError(f"ops.convolution: backend {backend!r} {reason}")
    return backend


# torch.compile takes the answer as it is, see ``dispatch``.
choose._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def check_names(backend: str, activation: str | None) -> None:
    """Raises unless both are known (whether or not the backend can run here)."""
    for name, value, known in (("backend", backend, ("auto", *BACKENDS)), ("activation", activation, ACTIVATIONS)):
        require(value in known, f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Optional = None,
    state: Optional = None,
    *,
    cu_seqlens: Optional = None,
    activation: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """See the module's docstring."""
    check_names(backend, activation)
    _check_sizes(x, weight, bias)
    channels, width = weight.shape
    expected = (check_packing("ops.convolution", cu_seqlens, x.shape[0]), width - 1, channels)
    if state is not None:
        given = tuple(state.shape)
        require(given == expected, f"the convolution state must be {list(expected)}, got {list(given)}")
        state = state.to(x.dtype)
    # Two calls: torch.compile does not hand a comparison of symbolic sizes to what it takes as it is.
    chosen = choose(backend, x.device.type) if width <= WIDEST else choose(backend, x.device.type, wide=True)
    if chosen == "torch":
        return plain.apply(x, weight, bias, state, cu_seqlens, activation == "silu")
    if _has_tangent(x, weight, bias, state):  # which a custom op would silently drop
        raise NotImplementedError("ops.convolution: forward-mode differentiation needs backend='torch'")
    offsets = None if cu_seqlens is None else cu_seqlens.to(x.device, non_blocking=True)
    return _op(x, weight, bias, state, offsets, activation == "silu")


def _check_sizes(x: Tensor, weight: Tensor, bias: Optional) -> None:
    """What the kernels would read beyond the end of, or leave unwritten."""
    shape = list(weight.shape)
    require(weight.dim() == 2 and shape[1] > 0, f"weight must be [C, W] with W >= 1, got {shape}")
    require(x.dim() == 3 and x.shape[2] == shape[0], f"x must be [B, T, {shape[0]}], got {list(x.shape)}")
    if bias is not None:
        require(list(bias.shape) == shape[:1], f"bias must be {shape[:1]}, got {list(bias.shape)}")
    for name, given in (("x", x), ("weight", weight), ("bias", bias)):
        require(given is None or given.is_floating_point(), f"{name} must be floating point")


def _has_tangent(*tensors: Optional) -> bool:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


# Triton itself is imported when a kernel first runs.
@torch.library.custom_op("metaplastic::short_convolution", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, bias: Optional, state: Optional, cu_seqlens: Optional, silu: bool
) -> tuple[Tensor, Tensor]:
    from .launch import forward

    with full_precision(x.device):
        return forward(x, weight, bias, state, cu_seqlens, silu)


@_op.register_fake
def _(x, weight, bias, state, cu_seqlens, silu):
    channels, width = weight.shape
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((rows, width - 1, channels))


@torch.library.custom_op("metaplastic::short_convolution_backward", mutates_args=())
def _op_backward(
    dy: Tensor, d_new_state: Optional,
    x: Tensor, weight: Tensor, bias: Optional, state: Optional, cu_seqlens: Optional, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from .launch import backward

    with full_precision(x.device):
        dx, d_weight, d_bias, d_state = backward(dy, d_new_state, x, weight, bias, state, cu_seqlens, silu)
    d_bias, d_state = (x.new_empty(0) if d is None else d for d in (d_bias, d_state))
    return dx, d_weight, d_bias, d_state


@_op_backward.register_fake
def _(dy, d_new_state, x, weight, bias, state, cu_seqlens, silu):
    like = [x.new_empty(0) if z is None else z.new_empty(z.shape) for z in (bias, state)]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *like


def _setup_context(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, d_new_state):
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    if dy is None:
        dy = x.new_zeros(x.shape)
    dx, d_weight, d_bias, d_state = _op_backward(dy, d_new_state, x, weight, bias, state, cu_seqlens, ctx.silu)
    return dx, d_weight, None if bias is None else d_bias, None if state is None else d_state, None, None


_op.register_autograd(_differentiate, setup_context=_setup_context)
