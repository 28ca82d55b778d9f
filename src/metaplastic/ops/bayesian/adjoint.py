"""The adjoint of one chunk of the filter (:mod:`.chunk`), or of several that were entered together.

What depends on the outputs' gradients alone comes first, for all rows; then, row by row if need be, what the gradients
of final states add (:meth:`Adjoint.enter`), and those of the entry states; then the gradients of the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk import ALL, Chunk, Noise, decayed, flat, inside, swapped, symmetric


class Gradients(NamedTuple):
    """Of one chunk's inputs. dk and dv are of the whitened ones; noises are gathered ones (N)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor  # [..., C, 1 or K], without what passes through the noise
    known: Tensor  # of A's diagonal, which alone has a token's observation noise in it
    noise: Noise


class Adjoint:
    """The Cholesky factor and the solves need no gradient of L itself.

    For lower-triangular L, tril(L^T tril(L^-T H)) = tril(H), so all of them together send H, the sum of the products of
    each solution with its gradient, to A.
    """

    def __init__(self, chunk: Chunk, d_output: Tensor, d_variance: Tensor | None):
        self.chunk, self.d_output, self.d_variance = chunk, flat(d_output), d_variance
        length, upper = chunk.length, chunk.upper
        self.half = torch.eye(length, dtype=upper.dtype, device=upper.device) / 4 - upper.mT / 2
        weights, entered = flat(chunk.weights), flat(chunk.entered_q)
        self.d_solved, self.d_given = torch.empty_like(chunk.solved), torch.empty_like(chunk.solved)
        self.d_gain, self.d_innovation = self.d_solved.split(chunk.parts, -1)
        self.d_sent, self.d_residual = self.d_given.split(chunk.parts, -1)  # dB, dV
        self.d_mean, self.d_covariance = torch.empty_like(chunk.mean), torch.empty_like(chunk.covariance)
        torch.bmm(weights, self.d_output, out=inside(self.d_innovation))
        d_weights = torch.bmm(flat(chunk.innovation), self.d_output.mT)
        self.weighted = None
        if d_variance is not None:
            d_weights.addcmul_(weights, d_variance.flatten(0, -2)[:, None, :], value=-2)
            self.weighted = flat(d_variance[..., None] * chunk.entered_q)
        d_weights.mul_(upper)
        self.products = torch.bmm(d_weights, weights.mT)
        self.d_crossed = upper.new_empty(*chunk.both.shape[:3], length, 2 * length)
        self.d_known, d_asked = self.d_crossed.split(length, -1)  # of A, dX^T
        torch.mul(torch.bmm(flat(chunk.whitening).mT, d_weights), upper, out=inside(d_asked))
        self.d_spread = torch.bmm(flat(d_asked), entered).view(chunk.spread.shape)

    def enter(self, d_mean: Tensor, d_covariance: Tensor, rows: slice = ALL) -> None:
        """Gradients of some rows' final states; that of the covariance is symmetric."""
        chunk = self.chunk
        if rows is ALL:
            self.d_mean, self.d_covariance = d_mean, d_covariance
        else:
            self.d_mean[rows], self.d_covariance[rows] = d_mean, d_covariance
        gain, inverse = flat(chunk.gain[rows]), flat(chunk.whitening[rows])
        d_gain, d_innovation = inside(self.d_gain[rows]), inside(self.d_innovation[rows])
        torch.bmm(flat(chunk.innovation[rows]), flat(d_mean).mT, out=d_gain)
        d_gain.baddbmm_(gain, flat(d_covariance), alpha=-2)
        d_innovation.baddbmm_(gain, flat(d_mean))
        d_solved = flat(self.d_solved[rows])
        products = self.products.view(*chunk.both.shape[:3], *self.products.shape[1:])[rows]
        products = inside(products).baddbmm_(d_solved, flat(chunk.solved[rows]).mT).mul_(self.half)
        # Minus half of H, as the sum of a matrix and its mirror image.
        products = torch.bmm(torch.bmm(inverse.mT, products), inverse)
        d_known = inside(self.d_known[rows])
        torch.add(products, products.mT, out=d_known)
        torch.bmm(inverse.mT, d_solved, out=inside(self.d_given[rows]))
        d_spread = self.d_spread[rows]
        inside(d_spread).baddbmm_(d_known, flat(chunk.entered[rows]))
        d_spread.addcmul_(chunk.decay.last[rows], self.d_sent[rows])

    def entry(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Gradients of these rows' entry states, once those of the final ones are there."""
        chunk, last = self.chunk, self.chunk.decay.last[rows]
        entered, entered_q = flat(chunk.entered[rows]), flat(chunk.entered_q[rows])
        mean, covariance = last.mT * self.d_mean[rows], decayed(self.d_covariance[rows], last)
        d_output = self.d_output.unflatten(0, chunk.both.shape[:3])[rows].flatten(0, 2)
        inside(mean).baddbmm_(entered_q.mT, d_output)
        inside(mean).baddbmm_(entered.mT, flat(self.d_residual[rows]), alpha=-1)
        inside(covariance).baddbmm_(entered.mT, flat(self.d_spread[rows]))
        if self.weighted is not None:
            weighted = self.weighted.unflatten(0, chunk.both.shape[:3])[rows].flatten(0, 2)
            inside(covariance).baddbmm_(entered_q.mT, weighted)
        return mean, symmetric(covariance)

    def gradients(self) -> Gradients:
        """Of the inputs of all rows, once every row was entered."""
        chunk, length = self.chunk, self.chunk.length
        mean, covariance = flat(chunk.mean), flat(chunk.covariance)
        d_entered = torch.bmm(flat(self.d_crossed).mT, flat(chunk.spread))
        d_entered[:, :length].baddbmm_(flat(self.d_spread), covariance)
        d_entered[:, :length].baddbmm_(flat(self.d_residual), mean.mT, alpha=-1)
        d_entered[:, length:].baddbmm_(self.d_output, mean.mT)
        if self.weighted is not None:
            d_entered[:, length:].baddbmm_(self.weighted, covariance, alpha=2)
        known = self.d_known.diagonal(dim1=-2, dim2=-1).clone()
        self.d_known.mul_(1 + chunk.upper.triu(1))  # of a pair and its mirror image
        d_gathered, d_both = chunk.decay.crossed_gradients(self.d_crossed, chunk.gathered, chunk.both)
        d_gathered.addcmul_(chunk.decay.tail, self.d_sent)
        d_both += chunk.per_token(d_entered.view(chunk.both.shape), chunk.decay.entry)
        log_decay = self._log_decay(d_both, d_gathered)
        dk, dq = d_both.split(length, -2)
        dk += chunk.noise.times(d_gathered)
        reads = None
        if self.d_variance is not None:
            reads = self.d_variance[..., None] * chunk.q
            dq += 2 * chunk.noise.times(reads)
        return Gradients(dq, dk, self.d_residual, log_decay, known, self._noise(d_gathered, reads))

    def _log_decay(self, d_both: Tensor, d_gathered: Tensor) -> Tensor:
        """Without what passes through the noise; ``d_both``: of keys and queries, likewise."""
        chunk, last = self.chunk, self.chunk.decay.last
        of_covariance = (self.d_covariance * chunk.covariance).mul_(last).sum(-1)
        ends = (self.d_sent * chunk.sent).sum(-2)
        ends += last[..., 0, :] * (2 * of_covariance + (self.d_mean * chunk.mean).sum(-1))
        later, asked = (d_both * chunk.both).split(chunk.length, -2)
        each = (later + asked).addcmul_(chunk.gathered, d_gathered, value=-1)
        if not chunk.decay.per_key:
            each, ends = each.sum(-1, keepdim=True), ends.sum(-1, keepdim=True)
        each[..., -1, :] += ends
        return each.flip(-2).cumsum(-2).flip(-2)

    def _noise(self, d_gathered: Tensor, reads: Tensor | None) -> Noise:
        """Of N: through y = N K, through the variance's Q N Q, and through the final covariance."""
        chunk = self.chunk
        diagonal = chunk.k * d_gathered
        if reads is not None:
            diagonal.addcmul_(reads, chunk.q)
        ends = self.d_covariance.diagonal(dim1=-2, dim2=-1)
        if chunk.noise.diagonal.shape[-1] == 1:
            diagonal, ends = diagonal.sum(-1, keepdim=True), ends.sum(-1, keepdim=True)
        diagonal[..., -1, :] += ends
        if chunk.noise.pair is None:
            return Noise(diagonal, None)
        pair = chunk.k * swapped(d_gathered)
        if reads is not None:
            pair.addcmul_(reads, swapped(chunk.q))
        pair = pair.unflatten(-1, (-1, 2)).sum(-1)
        for beside in (-1, 1):
            pair[..., -1, :] += self.d_covariance.diagonal(beside, -2, -1)[..., ::2]
        return Noise(diagonal, pair)
