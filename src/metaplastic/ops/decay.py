"""Decays within one chunk, per head or per key, and the products that contain them.

R[t, s] = exp(g_{s+1} + ... + g_t) for s <= t, else 0, with a key axis when g is per key. Masked segment sums, never
differences of cumulative sums: exact beside g = -1000, and -inf is allowed.
"""

import torch
from torch import Tensor

from .chunks import segment_sums


class Decay:
    """Decays within a chunk; g ``[..., C, d]`` with d = 1 (per head) or K (per key)."""

    def __init__(self, g: Tensor):
        self.per_key = g.shape[-1] > 1
        self.ratio = segment_sums(g.mT).exp()  # [..., d, C, C]
        self.entry = g.cumsum(-2).exp()  # [..., C, d]
        self.last = self.entry[..., -1:, :]  # [..., 1, d]
        self.tail = self.ratio[..., -1, :].mT  # [..., C, d]

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """``<x, R y> [..., C, C]``, zero above the diagonal."""
        if self.per_key:
            return torch.einsum("...tk,...sk,...kts->...ts", x, y, self.ratio)
        return (x @ y.mT) * self.ratio[..., 0, :, :]

    def over_earlier(self, m: Tensor, y: Tensor) -> Tensor:
        """``sum_s m[t, s] R[t, s] y_s``."""
        if self.per_key:
            return torch.einsum("...ts,...kts,...sk->...tk", m, self.ratio, y)
        return (m * self.ratio[..., 0, :, :]) @ y

    def over_later(self, m: Tensor, x: Tensor) -> Tensor:
        """``sum_t m[t, s] R[t, s] x_t``."""
        if self.per_key:
            return torch.einsum("...ts,...kts,...tk->...sk", m, self.ratio, x)
        return (m * self.ratio[..., 0, :, :]).mT @ x
