"""A decay per head within one chunk, and the products that contain it.

R[t, s] = exp(g_{s+1}) ... exp(g_t) for s <= t, else 0: products of numbers of at most 1, so it is exact beside
g = -1000, and -inf is allowed. It has a row for every earlier token s, as :mod:`.chunk` has all matrices of pairs.
"""

from functools import cached_property

import torch
from torch import Tensor


class HeadDecay:
    """g ``[..., C, 1]``."""

    per_key = False

    def __init__(self, g: Tensor):
        kept = g.exp().mT.contiguous()
        upper = torch.ones(kept.shape[-1], kept.shape[-1], dtype=g.dtype, device=g.device).triu_()
        later = upper.triu(1)
        self.ratio = torch.addcmul(1 - later, later, kept).cumprod(-1).mul_(upper)  # R[t, s] at [..., s, t]
        self.entry = kept.cumprod(-1).mT  # [..., C, 1]
        self.last = self.entry[..., -1:, :]  # [..., 1, 1]
        self.tail = self.ratio[..., -1:]  # [..., C, 1]

    @cached_property
    def _squared(self) -> Tensor:
        return self.ratio.square()

    def crossed(self, y: Tensor, x: Tensor) -> Tensor:
        """``R[t, s] <x_t, y_s>`` at ``[..., s, t]`` of the tokens x ``[..., n C, K]`` of n chunks side by side."""
        return self._times_ratio((y.flatten(0, -3) @ x.flatten(0, -3).mT).unflatten(0, y.shape[:-2]))

    def crossed_gradients(self, d: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of y and of x, given that of what :meth:`crossed` returns, which is overwritten."""
        d = self._times_ratio(d).flatten(0, -3)
        return (d @ x.flatten(0, -3)).view(y.shape), (d.mT @ y.flatten(0, -3)).view(x.shape)

    def _times_ratio(self, x: Tensor) -> Tensor:
        x.unflatten(-1, (-1, self.ratio.shape[-1])).mul_(self.ratio[..., None, :])
        return x

    def over_earlier(self, m: Tensor, y: Tensor) -> Tensor:
        """``sum_s m[t, s] R[t, s] y_s``."""
        return (m * self.ratio.mT) @ y

    def gathered(self, noise: Tensor) -> Tensor:
        """``N_t = sum_s R[t, s]^2 noise_s``, noise ``[..., C, 1 or K]``."""
        if noise.shape[-1] > 1:
            return self._squared.mT @ noise
        return (self._squared * noise).sum(-2)[..., None]

    def scattered(self, d_gathered: Tensor) -> Tensor:
        """The adjoint of :meth:`gathered`: ``sum_t R[t, s]^2 d_t``."""
        if d_gathered.shape[-1] > 1:
            return self._squared @ d_gathered
        return (self._squared * d_gathered.mT).sum(-1, keepdim=True)
