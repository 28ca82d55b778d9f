"""What mixers share: the inputs of their rules, what they carry from token to token, and key normalisation."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.contract import compute_dtype
from ..rules import AdditiveState, PalimpsaState


class AdditiveGates(NamedTuple):
    """Inputs of ``ops.additive``: q, k [B,T,H,K], v [B,T,H,V], g [B,T,H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class PalimpsaGates(NamedTuple):
    """Inputs of ``ops.palimpsa``: q, k [B,T,H,K], w, beta [B,T,H,V], g [B,T,H], prior [H]."""

    q: Tensor
    k: Tensor
    w: Tensor
    beta: Tensor
    g: Tensor
    prior: Tensor


class MixerState(NamedTuple):
    """What one layer carries from token to token."""

    convolution: Tensor  # [B, W - 1, channels], the last inputs of the short convolution
    memory: AdditiveState | PalimpsaState


def l2_normalize(x: Tensor) -> Tensor:
    """``x / |x|`` over the last axis in float32; a zero vector stays zero and has a finite gradient."""
    y = x.to(compute_dtype(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
