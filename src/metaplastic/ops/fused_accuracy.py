"""How exact the kernels of :mod:`.fused` are: the measurement that tests and ``metaplastic doctor`` share.

An error is ``max |x - exact| / max |exact|`` over an output or a gradient, the exact one being PyTorch's operations in
float64 on the CPU, of the very same (rounded) inputs; what is allowed is what ``ops.accuracy`` allows the memories.
"""

import torch
from torch import Tensor

from .accuracy import TOLERANCES


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Name -> error, of all that is not empty."""
    errors = {}
    for name, x in exact.items():
        if x.numel():
            error = (found[name].cpu().double() - x).abs().max().item() / max(x.abs().max().item(), 1e-30)
            errors[name] = error if error == error else float("inf")
    return errors


def failures(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Those that exceed what is allowed."""
    allowed = TOLERANCES["palimpsa", "reference"][dtype]
    return {n: e for n, e in errors.items() if not e <= (allowed.gradient if n.startswith("grad") else allowed.forward)}
