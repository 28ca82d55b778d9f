"""The frame in which one chunk's dynamics are diagonal and its noise is 1, and the way back for gradients.

Rotations are undone before and redone after: within a chunk keys and queries are turned back by the angle gathered
since its start. Keys and values are whitened: divided by the standard deviation of their observation noise.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rules.bayesian import rotate
from .adjoint import Adjoint
from .chunk import ALL, Chunk, Noise, swapped, symmetric
from .head_decay import HeadDecay
from .key_decay import KeyDecay


class Inputs(NamedTuple):
    """One chunk of the operator's inputs, ``[n, H, G or 1, C, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # [..., C, 1 or K]
    process_noise: Tensor  # [..., C, 1 or K]
    observation_noise: Tensor  # [..., C, 1]
    rotation: Tensor | None  # [..., C, K / 2]


class Frame:
    """The frame that turns with the keys: angles gathered since the chunk's start, inclusive, or, given how far keys
    have turned ``before`` it ``[n, H, K / 2]``, since the sequence's start."""

    def __init__(self, inputs: Inputs, key_decay: type[KeyDecay] = KeyDecay, before: Tensor | None = None):
        self.given = inputs
        self.angle = None if inputs.rotation is None else inputs.rotation.cumsum(-2)
        if inputs.rotation is not None and before is not None:
            angle = inputs.rotation.double().cumsum(-2) + before[:, :, None, None]
            self.angle = angle.remainder(2 * math.pi).to(inputs.q.dtype)
        self.decay = key_decay(inputs.g) if inputs.g.shape[-1] > 1 else HeadDecay(inputs.g)
        self.white = inputs.observation_noise.rsqrt()
        self.unscaled, queries = self._back(inputs.k), self._back(inputs.q)
        length, keys = inputs.k.shape[-2:]
        both = self.white.new_empty(*self.white.shape[:3], 2 * length, keys)
        torch.mul(self.unscaled, self.white, out=both[..., :length, :])
        both[..., length:, :] = queries
        self.both, self.v = both, torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        torch.mul(inputs.v, self.white, out=self.v)
        self.step_noise = self._turned_noise()
        self.noise = Noise(
            self.decay.gathered(self.step_noise.diagonal),
            None if self.step_noise.pair is None else self._of_pairs().gathered(self.step_noise.pair),
        )

    def _of_pairs(self) -> HeadDecay | KeyDecay:
        return self.decay.of_pairs() if isinstance(self.decay, KeyDecay) else self.decay

    def _back(self, x: Tensor) -> Tensor:
        """Turned back: ``x e^{-i angle}`` on every pair."""
        return x if self.angle is None else rotate(x[..., None], -self.angle)[..., 0]

    def _turned_noise(self) -> Noise:
        """Rot^T diag(noise) Rot of the noise that one step adds."""
        noise = self.given.process_noise
        if self.angle is None or noise.shape[-1] == 1:
            return Noise(noise, None)
        return Noise(*turned_noise(noise, self.angle))

    def open(self) -> Chunk:
        """To be entered row by row."""
        return Chunk(self.both, self.v, self.decay, self.noise)

    def enter(
        self, mean: Tensor, covariance: Tensor, whitening: Tensor | None = None, *, refine: bool = False
    ) -> Chunk:
        chunk = self.open()
        chunk.enter(mean, covariance, ALL, whitening, refine=refine)
        chunk.close()
        return chunk

    def leave(self, mean: Tensor, covariance: Tensor, rows: slice = ALL) -> tuple[Tensor, Tensor]:
        """The state after the chunk, out of the frame."""
        if self.angle is None:
            return mean, covariance
        last = self.angle[rows, ..., -1, :]
        return rotate(mean, last), symmetric(rotate(rotate(covariance, last).mT, last))

    def return_to(self, mean: Tensor, covariance: Tensor, rows: slice = ALL) -> tuple[Tensor, Tensor]:
        """Gradients of the state after the chunk, into the frame."""
        if self.angle is None:
            return mean, covariance
        last = -self.angle[rows, ..., -1, :]
        return rotate(mean, last), symmetric(rotate(rotate(covariance, last).mT, last))

    def gradients(self, adjoint: Adjoint) -> list[Any]:
        """From the chunk's gradients to those of :class:`Inputs`; what groups share is summed over them."""
        noise, given, d = self.step_noise, self.given, adjoint.gradients()
        dq, dk, dv = _over_groups(d.q), _over_groups(d.k * self.white), d.v * self.white
        d_gathered = _over_groups(d.noise.diagonal)
        d_step, d_pair = self.decay.scattered(d_gathered), None
        # N_t = exp(2 g_t) N_{t-1} + noise_t
        d_decay = 2 * (self.noise.diagonal - noise.diagonal) * d_step
        if noise.pair is not None and self.noise.pair is not None and d.noise.pair is not None:
            d_pair = self._of_pairs().scattered(_over_groups(d.noise.pair))
            d_decay = d_decay + ((self.noise.pair - noise.pair) * d_pair).repeat_interleave(2, -1)
        log_decay = _over_groups(d.log_decay)
        if not self.decay.per_key:
            d_decay = d_decay.sum(-1, keepdim=True)
        d_rotation = None
        if self.angle is not None:
            queries = self.both[:, :, :1, -dq.shape[-2] :, :]  # groups share them
            d_angle = _turn(dk, self.unscaled) + _turn(dq, queries)
            if d_pair is not None:
                d_noise, d_step = self._turned_noise_gradient(d_step, d_pair)
                d_angle = d_angle + d_noise
            mean, covariance = adjoint.chunk.final()
            turned = (adjoint.d_mean * _quarter(mean)).sum(-1)
            turned = turned + 2 * (adjoint.d_covariance * _quarter(covariance)).sum(-1)
            at_end = _over_groups(turned).unflatten(-1, (-1, 2)).sum(-1)
            d_angle = torch.cat([d_angle[..., :-1, :], d_angle[..., -1:, :] + at_end[..., None, :]], -2)
            d_rotation = d_angle.flip(-2).cumsum(-2).flip(-2)
            dk, dq = (rotate(x[..., None], self.angle)[..., 0] for x in (dk, dq))
        if given.process_noise.shape[-1] == 1:
            d_step = d_step.sum(-1, keepdim=True)
        return [dq, dk, dv, log_decay + d_decay, d_step, self.white**2 * d.known[..., None], d_rotation]

    def _turned_noise_gradient(self, d_diagonal: Tensor, d_pair: Tensor) -> tuple[Tensor, Tensor]:
        """Of the angle and of the noise that one step adds, given those of its turned form."""
        noise, d = self.step_noise, d_diagonal.unflatten(-1, (-1, 2))
        assert noise.pair is not None
        assert self.angle is not None
        spread = noise.diagonal.unflatten(-1, (-1, 2))
        d_angle = 2 * noise.pair * (d[..., 0] - d[..., 1]) + d_pair * (spread[..., 1] - spread[..., 0])
        d_half = (d[..., 1] - d[..., 0]) * (2 * self.angle).cos() + d_pair * (2 * self.angle).sin()
        d_mean = d.sum(-1)
        return d_angle, torch.stack([d_mean - d_half, d_mean + d_half], -1).flatten(-2) / 2


def turned_noise(noise: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Rot^T diag(noise) Rot of the noise that one step adds: its diagonal, and what couples the keys of a pair."""
    real, imaginary = noise[..., ::2], noise[..., 1::2]
    mean, half = (real + imaginary) / 2, (imaginary - real) / 2
    cos, sin = (2 * angle).cos(), (2 * angle).sin()
    return torch.stack([mean - half * cos, mean + half * cos], -1).flatten(-2), half * sin


def turned_before(turns: Tensor, first: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """How far keys have turned since their sequence's start, wrapped: before each chunk ``[n, H, K / 2]``, and at the
    end of every sequence ``[N, H, K / 2]``.

    ``turns [n, H, K / 2]`` within each chunk, sequence after sequence; ``first [N + 1]`` chunk of each and the end;
    ``sequence [n]`` of each chunk. Sums are over all sequences together, so a NaN is counted and not added: it is its
    own sequence's alone.
    """
    wrong = ~turns.isfinite()

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        total = F.pad(x.cumsum(0), (0, 0, 0, 0, 1, 0))
        starts = total[first[:-1]]
        return total[:-1] - starts[sequence], total[first[1:]] - starts

    pairs = zip(sums(turns.where(~wrong, 0)), sums(wrong.long()), strict=True)
    before, ends = (angle.remainder(2 * math.pi).where(count == 0, math.nan) for angle, count in pairs)
    return before, ends


def _over_groups(x: Tensor) -> Tensor:
    return x if x.shape[2] == 1 else x.sum(2, keepdim=True)


def _turn(d: Tensor, x: Tensor) -> Tensor:
    """How ``x e^{-i angle}`` moves with the angle: ``[..., K / 2]``."""
    moved = swapped(x) * d
    return moved[..., ::2] - moved[..., 1::2]


def _quarter(x: Tensor) -> Tensor:
    """A quarter turn of the pairs of rows: how a turned matrix moves with the angle."""
    real, imaginary = x.unflatten(-2, (-1, 2)).unbind(-2)
    return torch.stack([-imaginary, real], -2).flatten(-3, -2)
