"""Decays per key within one chunk, and the products that contain them, never with a number for every pair and key.

R[t, s] = exp(g_{s+1} + ... + g_t) for s <= t, else 0, with a key axis (:mod:`.head_decay` has none).

A chunk is halved again and again. From a token s of an earlier half to a token t of the later one decays meet in the
middle, R[t, s] = into_t x out_s, so that products between halves are matrix products:

    <x, R y> = (into x X) (out x Y)^T        sum_s m[t, s] R[t, s] y_s = into x (m (out x Y))

All factors are products of exp(g), so none exceeds 1: exact beside g = -1000, and -inf is allowed.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 2  # tokens of a half up to which sums are faster than matrix products


class Halves(NamedTuple):
    """Of every pair of halves: decays from the middle to each later token (inclusive), and from each earlier token
    (exclusive) to the middle, ``[..., pairs, half, K]``."""

    into: Tensor
    out: Tensor

    @property
    def size(self) -> int:
        return self.into.shape[-2]

    def early(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.size))[..., 0, :, :]

    def late(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.size))[..., 1, :, :]

    def blocks(self, m: Tensor) -> Tensor:
        """From early to late tokens, of a matrix ``[..., C, C]``: ``[..., pairs, half, half]``, a view."""
        tiles = m.unflatten(-2, (-1, 2, self.size)).unflatten(-1, (-1, 2, self.size)).diagonal(0, -6, -3)
        return tiles[..., 1, :, 0, :, :].movedim(-1, -3)


class KeyDecay:
    """g ``[..., C, K]``."""

    per_key = True

    @classmethod
    def takes(cls, g: Tensor) -> bool:
        """Whether these decays can be done."""
        return True

    def __init__(self, g: Tensor):
        self.length = g.shape[-2]
        size = 1 << max(0, self.length - 1).bit_length()
        self.missing = size - self.length
        entry = self._padded(g).exp()  # beyond the end nothing decays
        tail, self.levels = torch.ones_like(entry), []
        half = 1
        while half < size:
            (early, late), (before, after) = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (entry, tail))
            self.levels.append(Halves(late.clone(), before.clone()))
            before.mul_(late[..., -1:, :])
            late.mul_(early[..., -1:, :])
            half *= 2
        self.entry, self.tail = entry[..., : self.length, :], tail[..., : self.length, :]  # [..., C, K]
        self.last = entry[..., -1:, :]  # [..., 1, K]

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, self.missing)) if self.missing else x

    def _square(self, m: Tensor) -> Tensor:
        return F.pad(m, (0, self.missing, 0, self.missing)) if self.missing else m

    def _cut(self, x: Tensor) -> Tensor:
        return x[..., : self.length, :]

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """``<x, R y> [..., C, C]``, zero above the diagonal."""
        x, y = self._padded(x), self._padded(y)
        out = torch.diag_embed((x * y).sum(-1))
        for level in self.levels:
            to, source = level.into * level.late(x), level.out * level.early(y)
            if level.size <= FEW:
                block = (to[..., :, None, :] * source[..., None, :, :]).sum(-1)
            else:
                block = to @ source.mT
            level.blocks(out).copy_(block)
        return out[..., : self.length, : self.length]

    def over_earlier(self, m: Tensor, y: Tensor) -> Tensor:
        """``sum_s m[t, s] R[t, s] y_s``."""
        m, y = self._square(m), self._padded(y)
        out = m.diagonal(dim1=-2, dim2=-1)[..., None] * y
        for level in self.levels:
            level.late(out).addcmul_(level.into, level.blocks(m) @ (level.out * level.early(y)))
        return self._cut(out)

    def over_later(self, m: Tensor, x: Tensor) -> Tensor:
        """``sum_t m[t, s] R[t, s] x_t``."""
        m, x = self._square(m), self._padded(x)
        out = m.diagonal(dim1=-2, dim2=-1)[..., None] * x
        for level in self.levels:
            level.early(out).addcmul_(level.out, level.blocks(m).mT @ (level.into * level.late(x)))
        return self._cut(out)

    def crossed(self, y: Tensor, x: Tensor) -> Tensor:
        """``R[t, s] <x_t, y_s>`` at ``[..., s, t]`` of the tokens x ``[..., n C, K]`` of n chunks side by side."""
        found = y.new_empty(*y.shape[:-1], x.shape[-2])
        for out, part in zip(found.split(self.length, -1), x.split(self.length, -2), strict=True):
            out.copy_(self.pairs(part, y).mT)
        return found

    def crossed_gradients(self, d: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of y and of x, given that of what :meth:`crossed` returns."""
        parts = list(zip(d.split(self.length, -1), x.split(self.length, -2), strict=True))
        d_y = self.over_later(parts[0][0].mT, parts[0][1])
        for m, part in parts[1:]:
            d_y += self.over_later(m.mT, part)
        return d_y, torch.cat([self.over_earlier(m.mT, y) for m, _ in parts], -2)

    def gathered(self, noise: Tensor) -> Tensor:
        """``N_t = sum_s R[t, s]^2 noise_s``, noise ``[..., C, 1 or K]``."""
        out = self._padded(noise.expand(*noise.shape[:-1], self.last.shape[-1])).clone()
        for level in self.levels:
            level.late(out).addcmul_(level.into.square(), level.early(out)[..., -1:, :])
        return self._cut(out)

    def scattered(self, d_gathered: Tensor) -> Tensor:
        """The adjoint of :meth:`gathered`: ``sum_t R[t, s]^2 d_t``."""
        out = self._padded(d_gathered).clone()
        for level in self.levels:
            first = level.into[..., :1, :].square() * level.late(out)[..., :1, :]
            level.early(out).addcmul_(level.out.square(), first)
        return self._cut(out)

    def of_pairs(self) -> "KeyDecay":
        """Of every other key: where both keys of a pair decay alike."""
        half = copy.copy(self)
        half.entry, half.tail, half.last = (x[..., ::2] for x in (self.entry, self.tail, self.last))
        half.levels = [Halves(level.into[..., ::2], level.out[..., ::2]) for level in self.levels]
        return half
