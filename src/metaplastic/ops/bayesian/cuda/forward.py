"""The CUDA forward pass. The equations are in the kernels.

``scan.cu`` carries covariances and means from chunk to chunk. bf16 inputs with one decay per head have kernels for what
comes before (``prepare.cu``) and after it (``output.cu``); all others do that in batched products
(:mod:`.general`; decays per key by kernels of their own) and give the scan keys in float32. One token of every sequence
is a step of the rule (``decode.cu``).
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....rules import bayesian as rule
from ....rules.bayesian import rotate
from ... import nvrtc
from ...contract import compute_dtype
from . import general
from .backward import has_kernels
from .problem import CAREFUL_ROOMS, CHUNK, HELD, Problem, Rests, aligned, prepare, rest_rooms, room

FOLDER = Path(__file__).parent
VALUES_OF_BLOCK = 128  # mean.cuh
FILL, READ_FILL = 8, 4  # numbers after every row of what passes from kernel to kernel (shapes.cuh)
KERNEL_TYPES = {torch.bfloat16: "bf16", torch.float16: "half", torch.float32: "float"}


class Scanned(NamedTuple):
    factors: Tensor  # [n, H, G, C, C + 8]: L, its diagonal blocks inverted (matrices.cuh), and what fills the rows
    spreads: Tensor  # [n, H, G, C, K' + 8]: W
    innovations: Tensor  # [n, H, G, V', C + 8]: e^T
    reads: Tensor | None  # [n, H, G, V', C + 4]: (Q M)^T, M before every chunk
    means: Tensor | None  # [n, H, G, V', K']: M^T before every chunk
    covariances: Tensor | None  # [n, H, G, K', K']: P before every chunk
    mean: Tensor  # [N, H, K', G, V'] at the end
    covariance: Tensor


def forward(
    q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, offsets: Tensor | None, scale: float,
    output_variance: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and variance (empty unless asked for) as the operator's, final mean and covariance, and, to ``keep`` for
    the backward, of every chunk M^T and P at its entry and L^-1 (empty if not)."""
    inputs = (q, k, v, g, process_noise, observation_noise, rotation, mean, covariance)
    if q.shape[1] == 1 and offsets is None and not keep:
        return *step(*inputs, scale, output_variance), mean.new_empty(0), mean.new_empty(0), mean.new_empty(0)
    problem = prepare(*inputs, offsets)
    outside = problem.cut.tokens < q.shape[0] * q.shape[1]  # tokens beyond the last sequence read zero
    output = (v.new_zeros if outside else v.new_empty)(problem.v.shape, dtype=q.dtype)
    new = problem.g.new_zeros if outside else problem.g.new_empty
    variance = new(problem.observation_noise.shape) if output_variance else problem.new(0)
    chunks = room(problem.cut.sequences, q.shape[1], offsets is not None)
    run = _plain if problem.plain else _general
    heads, groups = problem.shape[:2]
    inverses = problem.new(chunks, heads, groups, CHUNK, CHUNK) if keep else None  # L^-1
    scanned, angle = run(problem, output, variance, scale, inverses, chunks)
    final_mean = scanned.mean[:, :, : problem.keys, :, : problem.values].flatten(-2)
    final_covariance = scanned.covariance[..., : problem.keys, : problem.keys]
    if angle is not None:
        angle = angle[..., : problem.keys // 2]
        final_mean, turned = rotate(final_mean, angle), angle[:, :, None]
        final_covariance = rotate(rotate(final_covariance, turned).mT, turned)
    if angle is not None or problem.shape[2] > HELD:  # otherwise the scan has seen to it
        final_covariance = (final_covariance + final_covariance.mT) / 2
    if covariance.dim() == 4:
        final_covariance = final_covariance[:, :, 0]
    output = output[..., : problem.values].flatten(-2).contiguous()
    if output_variance and observation_noise.dim() == 3:
        variance = variance[..., 0].contiguous()
    states = final_mean.contiguous(), final_covariance.contiguous()
    if inverses is None or scanned.means is None or scanned.covariances is None:
        return output, variance, *states, problem.new(0), problem.new(0), problem.new(0)
    return output, variance, *states, scanned.means, scanned.covariances, inverses


def step(
    q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, scale: float, output_variance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token of every sequence: output, variance, mean and covariance."""
    groups = observation_noise.shape[3] if observation_noise.dim() == 4 else 1
    keys, values = q.shape[3], v.shape[3] // groups
    if rotation is not None or keys % 4 or values % 4 or not q.dtype == k.dtype == v.dtype:
        return _plain_step(
            q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, scale, output_variance
        )
    ready = [aligned(x.detach()) for x in (q, k, v)]
    ready += [aligned(x.detach().float()) for x in (g, process_noise, observation_noise, mean, covariance)]
    output, variance = torch.empty_like(ready[2]), torch.empty_like(ready[5]) if output_variance else None
    final_mean, final_covariance = torch.empty_like(ready[6]), torch.empty_like(ready[7])
    kernel = nvrtc.kernel(
        FOLDER, "decode", q.device.index or 0, KEYS=keys, INPUT=KERNEL_TYPES[q.dtype], VARIANCE=int(output_variance),
        PER_KEY_DECAY=int(g.dim() == 4), PER_KEY_NOISE=int(process_noise.dim() == 4), GROUPS=groups, VALUES=values,
    )  # fmt: skip
    if blocks := q.shape[0] * q.shape[2] * groups:
        kernel(blocks, *ready, output, variance, final_mean, final_covariance, float(scale))
    return output, final_mean.new_empty(0) if variance is None else variance, final_mean, final_covariance


def _plain_step(
    q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, scale: float, output_variance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = [x[:, 0].to(compute_dtype(q)) for x in (q, k, v, g, process_noise, observation_noise)]
    angle = None if rotation is None else rotation[:, 0].to(compute_dtype(q))
    final = rule.step(rule.GaussianState(mean, covariance), *given[1:], rotation=angle)
    final = final._replace(covariance=(final.covariance + final.covariance.mT) / 2)  # as of all other ways
    output, variance = rule.readout(final, given[0] * scale)
    variance = variance[:, None] if output_variance else variance.new_empty(0)
    return output[:, None].to(q.dtype), variance, final.mean, final.covariance


def _scan(
    problem: Problem, given: tuple, progress: Tensor, with_means: bool, with_covariances: bool, chunks: int,
    extra: int = 0,
) -> Scanned:  # fmt: skip
    """``given``: queries, keys, values, sent, known and vectors as shapes.cuh has them; ``extra``: rooms for rests."""
    p, cut = problem, problem.cut
    heads, groups, key_size, value_size = p.shape

    def of_chunks(*shape: int, count: int = cut.chunks) -> Tensor:
        return p.new(count, heads, groups, *shape)

    out = Scanned(
        of_chunks(CHUNK, CHUNK + FILL),
        of_chunks(CHUNK, key_size + FILL),
        of_chunks(value_size, CHUNK + FILL),
        of_chunks(value_size, CHUNK + READ_FILL) if p.plain else None,
        of_chunks(value_size, key_size, count=chunks) if with_means else None,
        of_chunks(key_size, key_size, count=chunks + extra) if with_covariances else None,
        torch.empty_like(p.mean),
        torch.empty_like(p.covariance),
    )
    gains = of_chunks(key_size, CHUNK + FILL)
    items = cut.sequences * heads * groups
    rooms = min(max(items, 1), CAREFUL_ROOMS)
    rests = p.new(rooms, key_size, key_size + CHUNK + FILL + 2 * CHUNK) if key_size <= HELD else None
    kept = Rests.of(out.covariances, chunks) if out.covariances is not None and extra else (None, None)
    hard = progress[2 * (items + 1) :]
    for careful in range(1 if key_size > HELD else 2):
        kernel = nvrtc.kernel(FOLDER, "scan", p.device, KEYS=key_size, FULL=int(not p.plain), CAREFUL=careful)
        if blocks := items * (1 + -(-value_size // VALUES_OF_BLOCK)):
            kernel(
                blocks, *given, cut.table, cut.first, p.covariance, p.mean, out.factors, out.spreads, gains,
                out.innovations, out.reads, out.covariances, out.means, out.covariance, out.mean, rests,
                *kept, progress[careful * (items + 1) :], hard, rooms, cut.sequences, heads, groups, value_size,
            )  # fmt: skip
    return out


def _plain(problem: Problem, output, variance, scale: float, saved: Tensor | None, chunks: int) -> tuple[Scanned, None]:
    p, cut = problem, problem.cut
    heads, groups, key_size, value_size = p.shape
    known, vectors = p.new(cut.chunks, heads, groups, CHUNK, CHUNK + FILL), p.new(cut.chunks, heads, groups, 6, CHUNK)
    progress, noises = p.progress(zero=not cut.chunks), (p.g, p.process_noise, p.observation_noise)
    if cut.chunks:
        kernel = nvrtc.kernel(FOLDER, "prepare", p.device, KEYS=key_size)
        kernel(cut.chunks * heads, p.k, *noises, cut.table, known, vectors, progress, len(progress), heads, groups)
    wanted, keep = variance.numel() > 0, saved is not None
    rested = keep and has_kernels(p.q, p.k, p.v[..., 0, :], *noises, None)
    extra = rest_rooms(chunks, key_size) if rested else 0
    scanned = _scan(p, (p.q, p.k, p.v, None, known, vectors), progress, keep, keep or wanted, chunks, extra)
    squares = p.new(cut.chunks, heads, groups, CHUNK) if wanted else None
    if cut.chunks:
        kernel = nvrtc.kernel(FOLDER, "output", p.device, KEYS=key_size, VARIANCE=int(wanted), FOR_BACKWARD=int(keep))
        kernel(
            cut.chunks * heads * groups, p.q, p.k, cut.table, vectors, scanned.factors, scanned.spreads, scanned.reads,
            scanned.innovations, output, saved, squares, heads, groups, value_size, float(scale),
        )  # fmt: skip
    if squares is not None and scanned.covariances is not None:
        q = cut.take(p.q.float())[:, :, None]
        noise, entry = vectors[..., 3, :], vectors[..., 5, :]
        spread = ((q @ scanned.covariances[: cut.chunks]) * q).sum(-1) * entry.square() + q.square().sum(-1) * noise
        cut.put(variance, (scale**2 * (spread - squares)).mT)
    return scanned, None


def _general(
    problem: Problem, output, variance, scale: float, saved: Tensor | None, chunks: int
) -> tuple[Scanned, Tensor | None]:
    p, cut = problem, problem.cut
    wanted, keep = variance.numel() > 0, saved is not None
    given = general.give(p, wanted)
    padded = (F.pad(x, (0, FILL)) for x in (given.keys, given.known))
    keys, known = (x.contiguous() for x in padded)
    ready = (None, keys, given.values.contiguous(), given.sent.contiguous(), known, given.ends)
    scanned = _scan(p, ready, p.progress(zero=True), True, keep or wanted, chunks)
    assert scanned.means is not None
    factors, spreads, innovations = (x[..., :-FILL] for x in (scanned.factors, scanned.spreads, scanned.innovations))
    means = scanned.means[: cut.chunks]
    covariances = scanned.covariances[: cut.chunks] if wanted and scanned.covariances is not None else None
    read, spread, inverse = general.read(given, factors, spreads, means, innovations, covariances)
    cut.put(output, (scale * read).to(output.dtype).transpose(2, 3))
    if spread is not None:
        cut.put(variance, (scale**2 * spread).mT)
    if saved is not None:
        saved[: cut.chunks] = inverse
    return scanned, given.angle
