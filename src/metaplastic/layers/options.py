"""Checks of a mixer's options: they come from a shell or a JSON file and may be anything."""

import math
import sys
from typing import Any


def check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def check_positive(**numbers: Any) -> None:
    for name, x in numbers.items():
        if not _is_number(x) or not 0 < x <= sys.float_info.max:
            raise ValueError(f"{name} must be > 0 and finite, got {x!r}")


def check_range(name: str, given: Any, least: float, *, unbounded: bool = False) -> tuple[float, float]:
    """``given`` as (low, high) with least <= low <= high, high finite unless ``unbounded``."""
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or not all(map(_is_number, pair)) or not least <= pair[0] <= pair[1]:
        raise ValueError(f"{name} must be (low, high) with {least:g} <= low <= high, got {given!r}")
    if not unbounded and pair[1] == math.inf:
        raise ValueError(f"{name} must be finite, got {given!r}")
    return pair


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
