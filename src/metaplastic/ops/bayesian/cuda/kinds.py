"""Which kernels a call runs, for the list of what failed its check on a machine."""

import math

import torch

from .problem import HELD, padded_keys


def kernels(dtype: torch.dtype, keys: int, values: int) -> str:
    """Where P is, and of how many keys the pieces are in which the kernels sum: the number of values is no constant."""
    if dtype == torch.float32:
        return "products of float64"
    size = padded_keys(keys)
    return f"P in {'registers' if size <= HELD else 'memory'}, {math.gcd(size, 64)} keys"
