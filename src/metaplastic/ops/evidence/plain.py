"""The write and its evidence by PyTorch's operations."""

import torch
from torch import Tensor

from ..contract import written_dtype


def write_and_evidence(u: Tensor, e: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    evidence = torch.sigmoid(e)
    # One number per head and token first: one product of the size of w, and one sum over it in the backward.
    w, beta = u * s, evidence * (c[:, None].to(evidence.dtype) * s)
    return w.to(written_dtype(u, s)), beta.to(written_dtype(e, s))
