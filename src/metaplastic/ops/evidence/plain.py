"""The write and its evidence by PyTorch's operations."""

import torch
from torch import Tensor


def write_and_evidence(u: Tensor, e: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    evidence = torch.sigmoid(e)
    # One number per head and token first: one product of the size of w, and one sum over it in the backward.
    return u * s, evidence * (c[:, None].to(evidence.dtype) * s)
