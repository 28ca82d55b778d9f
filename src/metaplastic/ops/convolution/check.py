"""What the short convolution is measured on (:mod:`..fused_accuracy`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import compute_dtype
from ..fused_accuracy import relative_errors
from . import short_convolution

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    channels: int
    width: int
    offsets: tuple[int, ...] | None = None  # packed sequences
    final: bool = True  # the new state has a gradient


PACKED = (0, 0, 1, 3, 300, 300, 520)
CASES = (  # each is a compilation of both kernels
    Case(300, 4),
    Case(300, 4, PACKED),
    Case(300, 4, final=False),
    Case(513, 3, PACKED, final=False),
    Case(64, 8, PACKED),
    Case(96, 2),
    Case(1, 1, PACKED),
)


def example(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor | None]:
    """What ``short_convolution`` takes; x is some columns of a wider matrix, as a projection may be."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)

    rows, tokens = (3, 200) if case.offsets is None else (1, PACKED[-1] + 10)
    x = normal(rows, tokens, case.channels + 8)[..., 8:]
    state = normal(rows if case.offsets is None else len(case.offsets) - 1, case.width - 1, case.channels)
    weight, bias = (normal(*shape).to(compute_dtype(x)) for shape in ((case.channels, case.width), (case.channels,)))
    cuts = None if case.offsets is None else torch.tensor(case.offsets, dtype=torch.int32, device=device)
    return {"x": x, "weight": weight, "bias": bias, "state": state, "cu_seqlens": cuts}


def results(backend: str, inputs: dict[str, Tensor | None], final: bool = True) -> dict[str, Tensor]:
    """Outputs and, through a random weighting of them, the gradients."""
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items() if x is not None and n != "cu_seqlens"}
    y, state = short_convolution(**leaves, cu_seqlens=inputs["cu_seqlens"], activation="silu", backend=backend)
    draw = torch.Generator().manual_seed(1)
    # Rounded to bf16, the weights are the same gradient in every dtype.
    of_y, of_state = (torch.randn(z.shape, generator=draw).bfloat16().to(z.device, z.dtype) for z in (y, state))
    loss = (y * of_y).double().sum() + ((state * of_state).double().sum() if final else 0)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"output": y, "state": state} | {f"gradient of {n}": d for n, d in zip(leaves, found, strict=True)}


def measure(case: Case, dtype: torch.dtype, device: str, backend: str = "triton") -> dict[str, float]:
    """Name -> error."""
    found = results(backend, example(case, dtype, device), case.final)
    inputs = example(case, dtype)
    wide = {n: x.double() if x is not None and x.is_floating_point() else x for n, x in inputs.items()}
    return relative_errors(found, results("torch", wide, case.final))
