"""What the write and its evidence are measured on (:mod:`..fused_accuracy`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..fused_accuracy import relative_errors
from . import HALVES, write_and_evidence


class Case(NamedTuple):
    batch: int
    length: int
    heads: int
    values: int
    strength: torch.dtype | None = None  # None: that of all


DTYPES = HALVES
CASES = (
    Case(2, 45, 3, 48),
    Case(1, 70, 2, 5, torch.float32),
    Case(1, 3, 2, 300),
    Case(1, 1, 1, 1),
    Case(2, 0, 2, 8),
)


def example(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[dict[str, Tensor], list[Tensor]]:
    """Inputs, and gradients of the outputs. u and that of beta are some columns of wider matrices, that of w has heads
    outside: no operator needs contiguous ones."""
    B, T, H, V, strength = case
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    wide = 3 * normal(B, T, H * (V + 2) + 8)
    u, d_beta = (x.to(dtype)[..., 8:].unflatten(-1, (H, V + 2))[..., :V] for x in (wide, wide.flip(-1)))
    e, dw = 4 * normal(B, T, H, V), normal(B, H, T, V).to(dtype).transpose(1, 2)
    strength = dtype if strength is None else strength
    s = torch.rand(B, T, H, 1, generator=draw).to(device, strength)
    if T:
        s[:, T // 2] = 0.0  # a padded token
    c = torch.rand(H, generator=draw).to(device) + 0.5
    return {"u": u, "e": e.to(dtype), "s": s, "c": c}, [dw.to(torch.promote_types(dtype, strength)), d_beta]


def results(backend: str, inputs: dict[str, Tensor], upstream: list[Tensor]) -> dict[str, Tensor]:
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    w, beta = write_and_evidence(**leaves, backend=backend)
    upstream = [d.to(w.dtype) for d in upstream]
    found = torch.autograd.grad([w, beta], list(leaves.values()), upstream)
    outputs = {"w": w.detach(), "beta": beta.detach()}
    return outputs | {f"gradient of {n}": d for n, d in zip(leaves, found, strict=True)}


def measure(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Name -> error of the kernels."""
    inputs, upstream = example(case, dtype)
    exact = results("torch", {n: x.double() for n, x in inputs.items()}, [d.double() for d in upstream])
    return relative_errors(results("triton", *example(case, dtype, device)), exact)
