"""Errors for the likeliest mistakes in a design model: a number for a tensor, two dtypes, axes missing."""

from typing import Any

import torch
from torch import Tensor


def check_tensors(note: str = "", /, **tensors: Any) -> None:
    """All are floating-point tensors of the first one's dtype; ``note`` adds what may be behind another one."""
    first, dtype = "", None
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__} {x!r}, expected a floating-point tensor")
        if not x.is_floating_point():
            raise TypeError(f"{name}: got a tensor of {x.dtype}, expected floating point")
        if dtype is None:
            first, dtype = name, x.dtype
        if x.dtype != dtype:
            raise TypeError(f"{name}: got {x.dtype}, expected {dtype} as in {first}{note}")


def check_axes(name: str, x: Tensor, axes: str) -> None:
    """As many axes as ``axes`` names, as in "B, T, H"."""
    if x.dim() != len(axes.split(",")):
        raise ValueError(f"{name}: got {[*x.shape]}, expected [{axes}]")


def check_broadcast(name: str, x: Tensor, shape: tuple[int, ...], axes: str) -> None:
    try:
        fits = torch.broadcast_shapes(x.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: got {[*x.shape]}, expected what broadcasts to [{axes}] = {[*shape]}")


def check_inputs(inputs: dict[str, Any], mean: Tensor, covariance: Tensor) -> None:
    """``seen``, ``noise``, ``value`` and ``query`` of a design model, against a state with this mean [B, H, V, N]."""
    check_tensors(**inputs)
    first = {"seen": inputs["seen"], "state.mean": mean, "state.covariance": covariance}
    check_tensors(" (a first state has the dtype of init_state's prior_variance)", **first)
    batch, heads, columns, size = mean.shape
    length, number = inputs["query"].shape[1], inputs["value"].shape[-1]
    tails = {"seen": (number, size), "noise": (number, number), "value": (number,), "query": (size,)}
    for name, tail in tails.items():
        found = tuple(inputs[name].shape)
        if found not in [(batch, length, heads, n, *tail) for n in (1, columns)]:
            expected = [batch, length, heads, f"1 or {columns}", *tail]
            raise ValueError(f"{name}: got {[*found]}, expected {expected} for a state of {columns} columns of {size}")
