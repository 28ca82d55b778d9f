"""What needs no state, for inputs of every kind: float32, decays and noises per key, rotations, noise groups.

All chunks at once, in PyTorch but for decays per key on a GPU (key_decays.py). The keys that the scan gets are decayed
and whitened (shapes.cuh, FULL 1):

    Kg = entry x K w,   sent = tail x N K w,   known = I + w <K, R N K> w,   Qg = entry x Q,   crossed = <Q, R N K> w

How decays enter the products is in :mod:`..key_decay` and :mod:`..head_decay`.

With rotations all is in a frame that turns with the keys, from the start of the sequence on; the angle so far is summed
in float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....rules.bayesian import rotate
from ..chunk import swapped
from ..frame import turned_before, turned_noise
from ..head_decay import HeadDecay
from ..key_decay import KeyDecay
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
            process, pair = turned_noise(process, inside)
    kind = KeyDecay if g.shape[-1] > 1 else HeadDecay
    if kind is KeyDecay and key_decays.KernelDecay.takes(g):
        kind = key_decays.KernelDecay
    decay = kind(g)
    entry, tail, noise = decay.entry, decay.tail, decay.gathered(process)
    coupling = None
    if pair is not None:
        of_pairs = decay if isinstance(decay, HeadDecay) else decay.of_pairs()
        coupling = of_pairs.gathered(pair).repeat_interleave(2, -1)

    def times_noise(x: Tensor) -> Tensor:
        return noise * x if coupling is None else noise * x + coupling * swapped(x)

    y = times_noise(k)
    white = take(problem.observation_noise.rsqrt()).mT[..., None]  # [n, H, G, CHUNK, 1]; 0 beyond a sequence's end
    identity = torch.eye(CHUNK, device=k.device)
    known, crossed = decay.crossed(y, torch.cat([k, q], -2)).mT[:, :, None].split(CHUNK, -2)

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
