"""What needs no state, for inputs of every kind: float32, decays and noises per key, rotations, noise groups.

All chunks at once, in PyTorch but for decays per key on a GPU (key_decays.py). The keys that the scan gets are decayed
and whitened (shapes.cuh, FULL 1):

    Kg = entry x K w,   sent = tail x N K w,   known = I + w <K, R N K> w,   Qg = entry x Q,   crossed = <Q, R N K> w

Per key <x, R y>[t, s] = sum_d x_td exp(g_{s+1, d} + ... + g_td) y_sd is made of products: a block of tokens is halved,
and from its second half to its first decays meet in the middle. Every exponent is a sum of decays, so every factor is
at most 1: exact beside g = -1000, and -inf is allowed.

With rotations all is in a frame that turns with the keys, from the start of the sequence on; the angle so far is summed
in float64.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....rules.bayesian import rotate
from ...chunks import segment_sums
from ..frame import turned_before
from . import key_decays
from .problem import CHUNK, Problem


class Given(NamedTuple):
    """Every chunk's part, ``[n, H, G or 1, CHUNK, ...]``."""

    keys: Tensor  # Kg
    values: Tensor  # whitened
    sent: Tensor
    known: Tensor
    ends: Tensor  # [n, H, 3, K']: of the chunk, its whole decay, the noise gathered and what couples pairs
    queries: Tensor  # Qg
    crossed: Tensor
    spread: Tensor | None  # q N q [n, H, 1, CHUNK], for variances
    angle: Tensor | None  # [N, H, K / 2] at the end of every sequence


def turn(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Angles gathered since a sequence's start, wrapped: of tokens ``[n, H, CHUNK, K / 2]``, and of sequences' ends."""
    if problem.rotation is None:
        return None, None
    cut = problem.cut
    inside = cut.take(problem.rotation.double()).cumsum(-2)
    numbers = torch.arange(cut.sequences, device=inside.device)
    sequence = torch.repeat_interleave(numbers, cut.first.diff(), output_size=cut.chunks)
    before, ends = turned_before(inside[..., -1, :], cut.first, sequence)
    return (inside + before[:, :, None]).remainder(2 * math.pi).float(), ends.float()


def give(problem: Problem, variances: bool = True) -> Given:
    take = problem.cut.take
    q, k, g, process = (take(x.float()) for x in (problem.q, problem.k, problem.g, problem.process_noise))
    g, process = (x if x.dim() == 4 else x[..., None] for x in (g, process))
    pair = None
    inside, ends = turn(problem)
    if inside is not None:
        q, k = (rotate(x[..., None], -inside)[..., 0] for x in (q, k))
        if process.shape[-1] > 1:
            process, pair = _turned(process, inside)
    fused = key_decays.KernelDecay.takes(g) and g.shape[-1] > 1
    if fused:
        g = g.contiguous()
        entry, tail = key_decays.ends(g)
        noise = key_decays.gathered(g, process)
    else:
        entry = g.cumsum(-2).exp()
        tail = F.pad(g.flip(-2).cumsum(-2).flip(-2)[..., 1:, :], (0, 0, 0, 1)).exp()
        noise = gathered(g, process)
    coupling = None if pair is None else gathered(g[..., ::2], pair).repeat_interleave(2, -1)

    def times_noise(x: Tensor) -> Tensor:
        return noise * x if coupling is None else noise * x + coupling * _swapped(x)

    y = times_noise(k)
    white = take(problem.observation_noise).mT[..., None]  # [n, H, G, CHUNK, 1]
    white = white.where(white != 0, 1).rsqrt()  # beyond a sequence's end: 0
    identity = torch.eye(CHUNK, device=k.device)
    if fused:
        known, crossed = key_decays.pairs(torch.cat([k, q], -2), y, g).mT[:, :, None].split(CHUNK, -2)
    else:
        known, crossed = pairs(torch.stack([k, q]), y, g)[:, :, :, None]

    def wide(x: Tensor) -> Tensor:
        return x[..., -1, :].expand(*k.shape[:2], k.shape[3])

    rows = [wide(entry), wide(noise), torch.zeros_like(wide(k)) if coupling is None else wide(coupling)]
    return Given(
        (entry * k)[:, :, None] * white,
        take(problem.v.float()).transpose(2, 3) * white,
        (tail * y)[:, :, None] * white,
        known * white * white.mT + identity,
        torch.stack(rows, 2).contiguous(),
        (entry * q)[:, :, None],
        crossed * white.mT,
        (q * times_noise(q)).sum(-1)[:, :, None] if variances else None,
        ends,
    )


def gathered(g: Tensor, added: Tensor) -> Tensor:
    """``N_t = exp(2 g_t) N_{t-1} + added_t``, by doubling."""
    kept = (2 * g).exp()
    noise = added.expand(torch.broadcast_shapes(g.shape, added.shape))
    for step in (1, 2, 4, 8, 16, 32):
        noise = noise + kept * F.pad(noise[..., :-step, :], (0, 0, step, 0))
        kept = kept * F.pad(kept[..., :-step, :], (0, 0, step, 0))
    return noise


def pairs(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """``<x, R y> [..., C, C]``, zero above the diagonal; g ``[..., C, 1 or K]``."""
    if g.shape[-1] == 1:
        return (x @ y.mT) * segment_sums(g[..., 0]).exp()
    out = torch.diag_embed((x * y).sum(-1))
    for half in (32, 16, 8, 4, 2, 1):
        early, late = g.unflatten(-2, (-1, 2, half)).unbind(-3)
        before = F.pad(early.flip(-2).cumsum(-2).flip(-2)[..., 1:, :], (0, 0, 0, 1)).exp()  # from each to the middle
        to, source = x.unflatten(-2, (-1, 2, half))[..., 1, :, :], y.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        block = (late.cumsum(-2).exp() * to) @ (before * source).mT
        tiles = out.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half)).diagonal(0, -6, -3)
        tiles[..., 1, :, 0, :, :] = block.movedim(-3, -1)
    return out


def _swapped(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _turned(noise: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Rot^T diag(noise) Rot of the noise that one step adds: its diagonal, and what couples the keys of a pair."""
    real, imaginary = noise[..., ::2], noise[..., 1::2]
    mean, half = (real + imaginary) / 2, (imaginary - real) / 2
    cos, sin = (2 * angle).cos(), (2 * angle).sin()
    return torch.stack([mean - half * cos, mean + half * cos], -1).flatten(-2), half * sin


def whitening(factors: Tensor) -> Tensor:
    """L^-1 of what the scan leaves: L below the diagonal of 16 x 16 blocks, the inverses of these on it."""
    blocks = factors.unflatten(-2, (4, 16)).unflatten(-1, (4, 16))
    inverses = torch.zeros_like(factors)
    ours = inverses.unflatten(-2, (4, 16)).unflatten(-1, (4, 16))
    for J in range(4):
        ours[..., J, :, J, :] = blocks[..., J, :, J, :]
    below = inverses @ (factors - inverses)
    identity = torch.eye(CHUNK, device=factors.device)
    return (identity - below) @ (identity + below @ below) @ inverses


def read(
    given: Given, factors: Tensor, spreads: Tensor, means: Tensor, innovations: Tensor, covariances: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Outputs ``[n, H, G, CHUNK, V']``, their variances (if there are covariances), and the inverse factors."""
    inverse = whitening(factors)
    crossed = (given.queries @ spreads.mT).tril() + given.crossed
    weights = (crossed @ inverse.mT).tril()
    output = given.queries @ means.mT + weights @ innovations.mT
    if covariances is None or given.spread is None:
        return output, None, inverse
    before = ((given.queries @ covariances) * given.queries).sum(-1) + given.spread
    return output, before - weights.square().sum(-1), inverse
