"""What every operator promises and checks: the return type, shapes, dtypes, states, packed offsets, values.

Shapes, types and dtypes are always checked. Values (``g <= 0``, ``prior > 0``, ...) are checked on CPU tensors; on
an accelerator only under :func:`debug_checks`, because reading a value there stalls the device.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class MemoryRead(NamedTuple):
    """What an operator returns: read-out, its posterior variance (None unless asked for), the final state."""

    output: Tensor
    variance: Tensor | None
    state: Any


_debug_checks = False


def debug_checks(enabled: bool) -> None:
    """Check values on accelerators too (``g <= 0``, ``prior > 0``, offsets). Costs a device sync per call."""
    global _debug_checks
    _debug_checks = bool(enabled)


def compute_dtype(q: Tensor) -> torch.dtype:
    """States, variances and decays live in float32, or float64 when q is float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def written_dtype(values: Tensor, strength: Tensor) -> torch.dtype:
    """Of values times a strength that may be in float32: bfloat16 stays, which has its range, so that kernels for
    16-bit inputs run; else the wider of the two."""
    if values.dtype == torch.bfloat16:
        return values.dtype
    return torch.promote_types(values.dtype, strength.dtype)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_tensors(op: str, batch_shape: torch.Size, device: torch.device, shapes: dict[str, tuple]) -> None:
    """``shapes``: argument name -> (tensor, expected trailing shape, words for it). All lead with ``batch_shape``."""
    for name, (x, trailing, words) in shapes.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor {words}, got {type(x).__name__}")
        expected = (*batch_shape, *trailing)
        require(tuple(x.shape) == expected, f"{op}: {name} must be {words} = {list(expected)}, got {list(x.shape)}")
        require(x.is_floating_point(), f"{op}: {name} must be floating point, got {x.dtype}")
        require(x.device == device, f"{op}: {name} must be on {device} like q, got {x.device}")


def check_query(op: str, q: Tensor) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"{op}: q must be a tensor [B, T, H, K], got {type(q).__name__}")
    require(q.dim() == 4, f"{op}: q must be [B, T, H, K] (4 dimensions), got {list(q.shape)}")
    require(q.is_floating_point(), f"{op}: q must be floating point, got {q.dtype}")


def check_scale(op: str, scale: Any) -> float:
    """A finite number. A tensor is refused: it would get no gradient, and reading it would stall a device."""
    if isinstance(scale, Tensor):
        raise TypeError(f"{op}: scale must be a number (a tensor would get no gradient: multiply q), got a tensor")
    try:
        number = float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: scale must be a number, got {scale!r}") from None
    require(abs(number) < float("inf"), f"{op}: scale must be finite, got {number}")
    return number


def check_packing(op: str, cu_seqlens: Tensor | None, batch: int) -> int:
    """Checks type and shape of ``cu_seqlens``, on any device; returns the number of sequences (= rows of the state)."""
    if cu_seqlens is None:
        return batch
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{op}: cu_seqlens must be an int32 or int64 tensor [N + 1], got {type(cu_seqlens).__name__}")
    require(
        cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1 and cu_seqlens.dtype in (torch.int32, torch.int64),
        f"{op}: cu_seqlens must be an int32 or int64 tensor [N + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}",
    )
    require(batch == 1, f"{op}: with cu_seqlens the batch size must be 1 (sequences packed along T), got {batch}")
    return cu_seqlens.shape[0] - 1


def on_host(cu_seqlens: Tensor | None) -> Tensor | None:
    """``cu_seqlens`` on the CPU, where every backend reads it: copied back once a call; if given there, not at all."""
    return cu_seqlens if cu_seqlens is None or cu_seqlens.device.type in ("cpu", "meta") else cu_seqlens.cpu()


def inside_sequences(cu_seqlens: Tensor, length: int, device: torch.device) -> Tensor:
    """Which of ``length`` packed tokens belong to a sequence: ``[T]`` bool, False in the tail."""
    end = cu_seqlens[-1]  # on the CPU it is a number like any other: nothing is copied
    return torch.arange(length, device=device) < (end if end.device.type == "cpu" else end.to(device))


def check_mask(name: str, mask: Any) -> None:
    """A mask is a tensor that is non-zero at real tokens; additive masks (0 and -inf) would be read inverted."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, non-zero at real tokens, got {type(mask).__name__}")
    if mask.is_complex():
        raise TypeError(f"{name} must be bool, integer or floating point, got {mask.dtype}")
    if torch.compiler.is_compiling():  # values cannot be looked at
        require(not mask.is_floating_point(), f"{name} must be bool or integer under torch.compile, got {mask.dtype}")
    elif mask.dtype != torch.bool:
        check_at_least(name, "values", mask, 0.0, "non-zero at real tokens; additive masks are not taken")


def refuse_forward_mode(op: str, *tensors: Any) -> None:
    """Custom ops have no forward-mode derivative and would silently drop the tangent."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{op}: forward-mode differentiation needs backend='reference'")


def full_precision(device: torch.device) -> torch.autocast:
    """Inside an operator everything is at least float32, whatever autocast says outside."""
    return torch.autocast(device.type, enabled=False)


def check_state(op: str, state: Any, kind: type, shapes: tuple[tuple[int, ...], ...], like: Tensor) -> None:
    """``state`` must be exactly of class ``kind`` with these shapes, in the compute dtype and on the device of q."""
    if not isinstance(state, kind):
        raise TypeError(f"{op}: initial_state must be a {kind.__name__}, got {type(state).__name__}")
    dtype = compute_dtype(like)
    for name, x, shape in zip(kind._fields, state, shapes, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: initial_state.{name} must be a tensor, got {type(x).__name__}")
        require(
            tuple(x.shape) == shape and x.dtype == dtype and x.device == like.device,
            f"{op}: initial_state.{name} must be {dtype} {list(shape)} on {like.device}, "
            f"got {x.dtype} {list(x.shape)} on {x.device}",
        )


def readable(x: Tensor) -> bool:
    """Whether looking at values is possible and stalls no device."""
    if torch.compiler.is_compiling() or x.numel() == 0 or x.device.type == "meta":
        return False
    return x.device.type == "cpu" or _debug_checks


def check_at_most(op: str, name: str, x: Tensor, bound: float, meaning: str) -> None:
    """Every value must be <= bound; NaN fails too. Skipped where reading a value would stall the device."""
    if readable(x) and not (largest := x.detach().max().item()) <= bound:
        raise ValueError(f"{op}: {name} must be <= {bound:g} ({meaning}), got a value of {largest:g}")


def check_at_least(op: str, name: str, x: Tensor, bound: float, meaning: str, *, strictly: bool = False) -> None:
    """Every value must be >= bound (> bound if ``strictly``); NaN fails too. Skipped as in :func:`check_at_most`."""
    if readable(x):
        smallest = x.detach().min().item()
        if not (smallest > bound if strictly else smallest >= bound):
            sign = ">" if strictly else ">="
            raise ValueError(f"{op}: {name} must be {sign} {bound:g} ({meaning}), got a value of {smallest:g}")


def check_finite(op: str, name: str, x: Tensor) -> None:
    """No NaN and no infinity. Skipped as in :func:`check_at_most`."""
    if readable(x) and not bool(x.detach().isfinite().all()):
        raise ValueError(f"{op}: {name} must be finite, got NaN or infinity")


def read_offsets(op: str, cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """``cu_seqlens`` as an int64 CPU tensor, its values checked: how the work is cut follows from them."""
    if cu_seqlens is None:
        return None
    offsets = cu_seqlens.detach().to("cpu", torch.int64)
    values = offsets.tolist()
    require(values[0] == 0, f"{op}: cu_seqlens must start at 0, got {values[0]}")
    for n, (start, end) in enumerate(itertools.pairwise(values)):
        require(start <= end, f"{op}: cu_seqlens must never decrease, got {start} then {end} at position {n + 1}")
    require(values[-1] <= length, f"{op}: cu_seqlens must end at T = {length} or earlier, got {values[-1]}")
    return offsets
