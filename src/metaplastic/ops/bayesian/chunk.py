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

<x, R y>[t, s] = sum_d x_td R_d[t, s] y_sd. Decays are masked segment sums, never differences of cumulative sums: exact
beside g = -1000, and -inf is allowed. With rotations all of this is in a frame that turns with the keys, where N_t also
couples the two keys of a pair.

Shapes: [n, H, G, C, ...]; what groups share has G = 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..decay import Decay
from .key_decay import KeyDecay


class Noise(NamedTuple):
    """A diagonal over keys, and what couples the two keys of each pair that turns (None: nothing)."""

    diagonal: Tensor  # [..., C, 1 or K]
    pair: Tensor | None  # [..., C, K / 2]

    def times(self, x: Tensor) -> Tensor:
        y = self.diagonal * x
        return y if self.pair is None else y + self.pair.repeat_interleave(2, -1) * swapped(x)

    def last_as_matrix(self, keys: int) -> Tensor:
        """``[..., K, K]`` of the last token."""
        last = self.diagonal[..., -1, :]
        matrix = torch.diag_embed(last.expand(*last.shape[:-1], keys))
        if self.pair is not None:
            pair = self.pair[..., -1, :].repeat_interleave(2, -1)
            matrix = matrix + pair[..., :, None] * _swap_matrix(keys, pair)
        return matrix


class Gradients(NamedTuple):
    """Of one chunk's inputs. dk and dv are of the whitened ones; noises are gathered ones (N)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor  # [..., C, K], without what passes through the noise
    known: Tensor  # of A's diagonal, which alone has a token's observation noise in it
    noise: Noise
    mean: Tensor | None
    covariance: Tensor | None


def swapped(x: Tensor) -> Tensor:
    """The two keys of each pair exchanged."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _swap_matrix(keys: int, like: Tensor) -> Tensor:
    return swapped(torch.eye(keys, dtype=like.dtype, device=like.device))


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


class Chunk:
    """k ``[n, H, G, C, K]``, v ``[n, H, G, C, V / G]``, mean ``[n, H, G, K, V / G]``, covariance ``[n, H, G, K, K]``.

    Queries q ``[n, H, 1, C, K]`` are shared by the groups. ``whitening``: L^-1, if it is known already, or, to
    ``refine``, known about as exactly as in float32. The covariance may be in a wider dtype than all else; then so is
    what rounding would do lasting harm to. A key that is seen again and again leaves P k tiny beside a P that goes on
    growing: in float32 every token would write rounding errors of P along directions that no token corrects.
    """

    def __init__(
        self, k: Tensor, v: Tensor, decay: Decay | KeyDecay, noise: Noise, mean: Tensor, covariance: Tensor,
        whitening: Tensor | None = None, *, refine: bool = False,
    ):  # fmt: skip
        self.k, self.v, self.decay, self.noise, self.mean = k, v, decay, noise, mean
        self.wide, self.covariance = covariance, covariance.to(k.dtype)
        # Products with a triangle of ones: at this size several times as fast as tril.
        self.lower = torch.ones(k.shape[-2], k.shape[-2], dtype=k.dtype, device=k.device).tril()
        self.strictly_lower = self.lower.tril(-1)
        self.entered = decay.entry * k  # Kg
        spread = self.entered.to(covariance.dtype) @ covariance  # W
        self.spread = spread.to(k.dtype)
        self.gathered = noise.times(k)  # y
        if whitening is None or refine:
            known = self._mirrored(self.spread @ self.entered.mT + decay.pairs(k, self.gathered))
            whitening = self._whitening(known, whitening)
        self.whitening = whitening
        self.innovation = whitening @ (v - self.entered @ mean)  # e
        gain = whitening.to(spread.dtype) @ (decay.last * spread + decay.tail * self.gathered)  # U
        self.gain = gain.to(k.dtype)

    def _whitening(self, known: Tensor, near: Tensor | None) -> Tensor:
        """L^-1 of 1 + ``known``, from one that is ``near`` if there is one."""
        identity = torch.eye(known.shape[-1], dtype=known.dtype, device=known.device)
        if near is None:
            factor, info = torch.linalg.cholesky_ex(known + identity)
            # An observation noise below what this dtype resolves shows as NaN instead of a plausible wrong number.
            factor = factor.where((info == 0)[..., None, None], torch.nan)
            # Its pivots are at least 1, so the inverse is safe, and products are faster than solves.
            return torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        half = self.strictly_lower + identity / 2
        for _ in range(3):  # L^-1 A L^-T = 1 + E, whose factor is 1 + E's lower triangle, the diagonal halved, to E^2
            near = near - ((near @ (known + identity) @ near.mT - identity) * half) @ near
        return near

    def _mirrored(self, x: Tensor) -> Tensor:
        """The symmetric matrix with the lower triangle of x."""
        return x * self.lower + (x * self.strictly_lower).mT

    def final(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance after the chunk."""
        last = self.decay.last
        covariance = last.mT * self.wide * last + self.noise.last_as_matrix(self.k.shape[-1])
        return last.mT * self.mean + self.gain.mT @ self.innovation, symmetric(covariance - self.gain.mT @ self.gain)

    def _weights(self, entered: Tensor, q: Tensor) -> Tensor:
        """Z: how much each token's read-out takes of each earlier innovation."""
        crossed = (entered @ self.spread.mT) * self.lower + self.decay.pairs(q, self.gathered)
        return (crossed.to(self.wide.dtype) @ self.whitening.mT.to(self.wide.dtype)) * self.lower

    def read(self, q: Tensor, want_variance: bool) -> tuple[Tensor, Tensor | None]:
        """Output ``[n, H, G, C, V / G]`` and variance ``[n, H, G, C]``."""
        entered = self.decay.entry * q
        weights = self._weights(entered, q)
        output = entered @ self.mean + (weights @ self.innovation.to(weights.dtype)).to(q.dtype)
        if not want_variance:
            return output, None
        before = ((entered @ self.covariance) * entered).sum(-1) + (q * self.noise.times(q)).sum(-1)
        return output, before - weights.square().sum(-1).to(q.dtype)

    def backward(
        self, q: Tensor, d_output: Tensor, d_variance: Tensor | None, d_mean: Tensor, d_covariance: Tensor,
        *, of_states: bool = True,
    ) -> Gradients:  # fmt: skip
        """The adjoint: the Cholesky factor and the solves need no gradient of L itself.

        For lower-triangular L, tril(L^T tril(L^-T H)) = tril(H), so all of them together send H, the sum of the
        products of each solution with its gradient, to A. Without ``of_states`` entry states get none.
        """
        k, decay, whitening, gain, innovation = self.k, self.decay, self.whitening, self.gain, self.innovation
        d_covariance = symmetric(d_covariance)
        entered_q = decay.entry * q
        weights = self._weights(entered_q, q)
        d_gain = innovation @ d_mean.mT - 2 * gain @ d_covariance
        d_innovation = gain @ d_mean + weights.mT @ d_output
        d_weights = (d_output @ innovation.mT) * self.lower
        if d_variance is not None:
            d_weights = d_weights - 2 * d_variance[..., None] * weights
        products = self._mirrored(d_gain @ gain.mT + d_innovation @ innovation.mT + d_weights.mT @ weights)
        d_known = -0.5 * whitening.mT @ products @ whitening
        d_residual, d_sent = whitening.mT @ d_innovation, whitening.mT @ d_gain  # dV, dB
        d_crossed = (d_weights @ whitening) * self.lower  # dX
        d_spread = d_crossed.mT @ entered_q + decay.last * d_sent + d_known @ self.entered
        d_entered_k = d_known @ self.spread + d_spread @ self.covariance - d_residual @ self.mean.mT
        d_entered_q = d_output @ self.mean.mT + d_crossed @ self.spread
        d_entry_mean = d_entry = None
        if of_states:
            d_entry_mean = decay.last.mT * d_mean + entered_q.mT @ d_output - self.entered.mT @ d_residual
            d_entry = decay.last.mT * d_covariance * decay.last + self.entered.mT @ d_spread
        if d_variance is not None:
            weighted = d_variance[..., None] * entered_q
            d_entered_q = d_entered_q + 2 * weighted @ self.covariance
            d_entry = None if d_entry is None else d_entry + entered_q.mT @ weighted
        del d_spread, d_gain, d_innovation, d_weights, products, entered_q
        lower = d_known * (self.lower + self.strictly_lower)  # of a pair and its mirror image
        from_k, from_q = decay.over_earlier(lower, self.gathered), decay.over_earlier(d_crossed, self.gathered)
        carried = decay.tail * d_sent
        d_gathered = decay.over_later(lower, k) + decay.over_later(d_crossed, q) + carried
        dk = decay.entry * d_entered_k + from_k + self.noise.times(d_gathered)
        dq = decay.entry * d_entered_q + from_q
        reads = None
        if d_variance is not None:
            reads = d_variance[..., None] * q
            dq = dq + 2 * self.noise.times(reads)
        log_decay = (
            decay.entry * (k * d_entered_k + q * d_entered_q) + k * from_k + q * from_q - self.gathered * d_gathered
        )
        at_end = (self.gathered * carried).sum(-2) + decay.last[..., 0, :] * (
            2 * ((d_covariance * self.covariance) @ decay.last.mT.expand(*self.covariance.shape[:-1], 1))[..., 0]
            + (d_mean * self.mean).sum(-1)
            + (d_sent * self.spread).sum(-2)
        )
        log_decay = torch.cat([log_decay[..., :-1, :], log_decay[..., -1:, :] + at_end[..., None, :]], -2)
        return Gradients(
            dq,
            dk,
            d_residual,
            log_decay.flip(-2).cumsum(-2).flip(-2),
            d_known.diagonal(dim1=-2, dim2=-1),
            self._noise_gradient(q, d_gathered, reads, d_covariance),
            d_entry_mean,
            None if d_entry is None else symmetric(d_entry),
        )

    def _noise_gradient(self, q: Tensor, d_gathered: Tensor, reads: Tensor | None, d_covariance: Tensor) -> Noise:
        """Of N: through y = N K, through the variance's Q N Q, and through the final covariance."""
        diagonal = self.k * d_gathered
        if reads is not None:
            diagonal = diagonal + reads * q
        ends = d_covariance.diagonal(dim1=-2, dim2=-1)[..., None, :]
        diagonal = torch.cat([diagonal[..., :-1, :], diagonal[..., -1:, :] + ends], -2)
        if self.noise.pair is None:
            return Noise(diagonal, None)
        pair = self.k * swapped(d_gathered)
        if reads is not None:
            pair = pair + reads * swapped(q)
        ends = (d_covariance * _swap_matrix(q.shape[-1], q)).sum(-1)[..., None, :]
        pair = torch.cat([pair[..., :-1, :], pair[..., -1:, :] + ends], -2)
        return Noise(diagonal, pair.unflatten(-1, (-1, 2)).sum(-1))
