r"""One chunk of the filter, exactly, as matrix products and one Cholesky factor (docs/math.md derives it).

C tokens with entry state (P0, M0). R[t, s] = exp(g_{s+1} + ... + g_t) for s <= t, entry_t = exp(g_1 + ... + g_t) and
tail_s = R[C, s], each with a key axis when g is per key. Keys and values are whitened beforehand (divided by the
standard deviation of their noise), so the noise is 1, pivots are at least 1 and a token with k = 0 changes nothing.

    N_t = sum_s R[t, s]^2 l_s^2                       process noise gathered since the entry, diagonal (+ pairs)
    Kg = entry x K,  Qg = entry x Q,  W = Kg P0,  y = N K
    A = I + sym(tril(W Kg^T) + <K, R y>) = L L^T      covariance of the chunk's observations
    B = last x W + tail x y,  e = L^-1 (V - Kg M0),  U = L^-1 B
    X = tril(Qg W^T) + <Q, R y>,  Z = tril(X L^-T)
    output = Qg M0 + Z e                              var_t = Qg_t P0 Qg_t + Q_t N_t Q_t - sum_s Z[t, s]^2
    P' = last P0 last + N_C - U^T U                   M' = last x M0 + U^T e

<x, R y>[t, s] = sum_d x_td R_d[t, s] y_sd. Decays are products of exp(g), never quotients: exact beside g = -1000,
and -inf is allowed. With rotations all of this is in a frame that turns with the keys, where N_t also
couples the two keys of a pair.

Shapes: [n, H, G, C, ...]; what groups share has G = 1. What has the same factor on the left stands side by side and is
multiplied at once, [U, e] = L^-1 [B, V - Kg M0]; keys and queries likewise. Matrices of pairs of tokens have a row for
the earlier one (X^T, Z^T). What needs no state, and what follows from the states, is done for several chunks at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .head_decay import HeadDecay
from .key_decay import KeyDecay


class Noise(NamedTuple):
    """A diagonal over keys, and what couples the two keys of each pair that turns (None: nothing)."""

    diagonal: Tensor  # [..., C, 1 or K]
    pair: Tensor | None  # [..., C, K / 2]

    def times(self, x: Tensor) -> Tensor:
        y = x * self.diagonal
        return y if self.pair is None else y + swapped(x) * self.pair.repeat_interleave(2, -1)

    def add_last(self, covariance: Tensor, rows: slice) -> None:
        """That of the last token, to ``[..., K, K]``."""
        covariance.diagonal(dim1=-2, dim2=-1).add_(self.diagonal[rows][..., -1, :])
        if self.pair is not None:
            for beside in (-1, 1):
                covariance.diagonal(beside, -2, -1)[..., ::2].add_(self.pair[rows][..., -1, :])


def swapped(x: Tensor) -> Tensor:
    """The two keys of each pair exchanged."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT).mul_(0.5)


def flat(x: Tensor) -> Tensor:
    """``[n, H, G, ...]`` as one batch of matrices."""
    return x.flatten(0, -3)


def inside(x: Tensor) -> Tensor:
    """The same, to be written to: never a copy."""
    return x.view(x.shape[:-2].numel(), *x.shape[-2:])


def decayed(covariance: Tensor, last: Tensor) -> Tensor:
    """Over a whole chunk: last P last."""
    return last.square() * covariance if last.shape[-1] == 1 else (last.mT * covariance).mul_(last)


ALL = slice(None)


class Chunk:
    """Tokens ``both`` ``[n, H, G, 2 C, K]``: the C whitened keys, and after them the C queries, which groups share; v
    ``[n, H, G, C, V / G]``. n counts the rows of one chunk or of several.

    :meth:`enter` with the states of every row, then :meth:`close`.
    """

    def __init__(self, both: Tensor, v: Tensor, decay: HeadDecay | KeyDecay, noise: Noise):
        self.both, self.v, self.decay, self.noise = both, v, decay, noise
        shape, self.length, keys, size = both.shape[:3], v.shape[-2], both.shape[-1], v.shape[-1]
        # Products with a triangle of ones: at this size several times as fast as triu.
        self.upper = torch.ones(self.length, self.length, dtype=v.dtype, device=v.device).triu_()
        self.gathered = noise.times(self.k)  # y
        self.all_entered = self.per_token(both, decay.entry)
        self.entered, self.entered_q = self.all_entered.split(self.length, -2)  # Kg, Qg
        self._crossed = decay.crossed(self.gathered, both)
        self.mean, self.covariance = v.new_empty(*shape, keys, size), v.new_empty(*shape, keys, keys)
        self.spread = v.new_empty(*shape, self.length, keys)  # W
        self.whitening = v.new_empty(*shape, self.length, self.length)
        self.parts = [keys, size]
        self.given, self.solved = v.new_empty(2, *shape, self.length, keys + size)
        self.sent, self._residual = self.given.split(self.parts, -1)  # B, V - Kg M0
        self.gain, self.innovation = self.solved.split(self.parts, -1)  # U, e
        self.weights = v.new_empty(0)  # Z^T, once it is closed

    @property
    def k(self) -> Tensor:
        return self.both[..., : self.length, :]

    @property
    def q(self) -> Tensor:
        return self.both[..., self.length :, :]

    def per_token(self, both: Tensor, x: Tensor) -> Tensor:
        """Keys and queries times ``[..., C, 1 or K]``."""
        return (both.unflatten(-2, (2, self.length)) * x[..., None, :, :]).flatten(-3, -2)

    def enter(
        self, mean: Tensor, covariance: Tensor, rows: slice = ALL, whitening: Tensor | None = None,
        *, refine: bool = False,
    ) -> None:  # fmt: skip
        """The states with which some rows begin. ``whitening``: L^-1, if it is known already, or, to ``refine``, known
        about as exactly as in float32."""
        if rows is ALL:
            self.mean, self.covariance = mean, covariance
        else:
            self.mean[rows], self.covariance[rows] = mean, covariance
        spread, entered, sent = self.spread[rows], flat(self.entered[rows]), self.sent[rows]
        torch.bmm(entered, flat(covariance), out=inside(spread))
        torch.mul(spread, self.decay.last[rows], out=sent).addcmul_(self.decay.tail[rows], self.gathered[rows])
        torch.baddbmm(flat(self.v[rows]), entered, flat(mean), alpha=-1, out=inside(self._residual[rows]))
        if whitening is None or refine:
            known = self._crossed[rows][..., : self.length]
            inside(known).baddbmm_(flat(spread), entered.mT)
            whitening = self._whitening(known, whitening)
        self.whitening[rows] = whitening
        torch.bmm(flat(self.whitening[rows]), flat(self.given[rows]), out=inside(self.solved[rows]))

    def close(self) -> None:
        """What queries have of all these states."""
        asked = self._crossed[..., self.length :]
        inside(asked).baddbmm_(flat(self.spread), flat(self.entered_q).mT)
        weights = torch.bmm(flat(self.whitening), flat(asked * self.upper)).mul_(self.upper)
        self.weights = weights.view(self.whitening.shape)
        del self._crossed

    def _whitening(self, known: Tensor, near: Tensor | None) -> Tensor:
        """L^-1 of 1 + ``known``, of which the upper triangle is read, from one that is ``near`` if there is one.

        ``known`` is overwritten.
        """
        identity = torch.eye(self.length, dtype=known.dtype, device=known.device)
        if near is None:
            known.diagonal(dim1=-2, dim2=-1).add_(1)
            factor, info = torch.linalg.cholesky_ex(known.mT)  # which reads the lower triangle
            # An observation noise below what this dtype resolves shows as NaN instead of a plausible wrong number.
            factor.diagonal(dim1=-2, dim2=-1).add_(torch.where(info == 0, 0.0, torch.nan)[..., None])
            # Its pivots are at least 1, so the inverse is safe, and products are faster than solves.
            return torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        lower = self.upper.mT
        known = known * self.upper + (known * self.upper.triu(1)).mT + identity
        half = lower - identity / 2
        for _ in range(3):  # L^-1 A L^-T = 1 + E, whose factor is 1 + E's lower triangle, the diagonal halved, to E^2
            near = near - ((near @ known @ near.mT - identity) * half) @ near
        return near

    def final(self, rows: slice = ALL) -> tuple[Tensor, Tensor]:
        """Mean and covariance after the chunk."""
        gain, last = flat(self.gain[rows]), self.decay.last[rows]
        mean, covariance = last.mT * self.mean[rows], decayed(self.covariance[rows], last)
        inside(mean).baddbmm_(gain.mT, flat(self.innovation[rows]))
        inside(covariance).baddbmm_(gain.mT, gain, alpha=-1)
        self.noise.add_last(covariance, rows)
        return mean, symmetric(covariance)

    def read(self, want_variance: bool) -> tuple[Tensor, Tensor | None]:
        """Output ``[n, H, G, C, V / G]`` and variance ``[n, H, G, C]``."""
        output = torch.bmm(flat(self.entered_q), flat(self.mean))
        output = output.baddbmm_(flat(self.weights).mT, flat(self.innovation)).view(self.v.shape)
        if not want_variance:
            return output, None
        before = torch.bmm(flat(self.entered_q), flat(self.covariance)).view(self.spread.shape)
        before = before.mul_(self.entered_q).sum(-1) + (self.q * self.noise.times(self.q)).sum(-1)
        return output, before - self.weights.square().sum(-2)
