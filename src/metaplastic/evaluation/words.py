"""Numbers as people read them: so many digits, no exponent, a unit that fits."""

import math

UNITS = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3}


def digits(value: float, count: int = 3) -> str:
    """So many significant digits, without an exponent: 17,600 and 0.0123."""
    rounded = float(f"{value:.{count}g}")
    if rounded == 0 or not math.isfinite(rounded):
        return f"{rounded:g}"
    return f"{rounded:,.{max(0, count - 1 - math.floor(math.log10(abs(rounded))))}f}"


def with_unit(value: float, unit: str) -> str:
    """Three digits of a number in thousands, millions and so on: 15.5 GFLOP/s."""
    prefix = next((prefix for prefix, scale in UNITS.items() if abs(value) >= scale), "")
    return f"{digits(value / UNITS.get(prefix, 1.0))} {prefix}{unit}"
