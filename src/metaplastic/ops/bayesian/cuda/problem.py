"""What the kernels are given: padded inputs, and every sequence cut into chunks.

Chunks of all sequences are counted one after another, so that dense batches and packed sequences look the same; tokens
are counted along B and T together. Tokens beyond a sequence's end are zero, which is an identity.
"""

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
MULTIPLE = 16  # K and the values of a noise group are padded to whole multiples
HELD = 128  # keys of which P fits into a multiprocessor's registers
ALIGNMENT = 16  # bytes that the kernels load at once
CAREFUL_ROOMS = 256  # for heads that are scanned with care, more than run at once


class Cut(NamedTuple):
    """Sequences cut into chunks: ``table`` int64 ``[n, 2]`` (first token, tokens), ``first`` int64 ``[N + 1]``.

    ``places`` int64 ``[tokens]``: where a token stands among the ``n * CHUNK`` of all chunks; None where it just does.
    ``backwards`` int64 ``[n]``: the chunks as recursions from the ends of all sequences reach them.
    """

    table: Tensor
    first: Tensor
    places: Tensor | None
    backwards: Tensor
    chunks: int
    sequences: int
    tokens: int

    def take(self, x: Tensor) -> Tensor:
        """``x [B, T, H, ...]`` -> ``[n, H, CHUNK, ...]``, zero beyond the end of a sequence."""
        rows = x.flatten(0, 1)
        if self.places is not None:
            padded = rows.new_zeros(self.chunks * CHUNK, *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows[: self.tokens])
        return rows[: self.chunks * CHUNK].unflatten(0, (self.chunks, CHUNK)).transpose(1, 2)

    def put(self, out: Tensor, value: Tensor) -> None:
        """Writes ``value`` (as :meth:`take` gives it) to its place in ``out [B, T, H, ...]``."""
        rows = value.transpose(1, 2).flatten(0, 1)
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        out.flatten(0, 1)[: self.tokens] = rows


@functools.lru_cache(maxsize=64)
def cut(cuts: tuple[int, ...], device: torch.device) -> Cut:
    """Sequences ``[cuts[n], cuts[n + 1])``; nothing makes the host wait for the device."""
    table, first, places, from_end = [], [0], [], []
    for start, end in itertools.pairwise(cuts):
        for at in range(start, end, CHUNK):
            places.append(torch.arange(min(CHUNK, end - at)) + CHUNK * len(table))
            table.append((at, min(CHUNK, end - at)))
        from_end.extend(range(len(table) - first[-1] - 1, -1, -1))
        first.append(len(table))
    tokens = cuts[-1]
    rows = torch.tensor(table, dtype=torch.int64).reshape(-1, 2)
    where = None
    if tokens != CHUNK * len(table):
        where = torch.cat(places).to(device, non_blocking=True)
    backwards = torch.tensor(from_end, dtype=torch.int64).argsort(stable=True)
    table_here, first_here, backwards_here = (
        x.to(device, non_blocking=True) for x in (rows, torch.tensor(first), backwards)
    )
    return Cut(table_here, first_here, where, backwards_here, len(table), len(first) - 1, tokens)


def room(rows: int, length: int, packed: bool) -> int:
    """Chunks of all sequences, or, of packed ones, as many as there may be: known from shapes alone."""
    return length // CHUNK + rows if packed else rows * -(-length // CHUNK)


class Rests(NamedTuple):
    """What float32 leaves of the entry covariances of careful chunks, behind all covariances in their tensor."""

    rests: Tensor  # int8 [chunks, H, G, K', K'], rest.cuh
    careful: Tensor  # int32 [chunks * H * G]: whether there is a rest

    @classmethod
    def of(cls, covariances: Tensor, chunks: int) -> "Rests":
        tail, shape = covariances[chunks:].flatten(), (chunks, *covariances.shape[1:])
        words, slots = covariances[:chunks].numel() // 4, shape[0] * shape[1] * shape[2]
        return cls(tail[:words].view(torch.int8).view(shape), tail[words : words + slots].view(torch.int32))


def rest_rooms(chunks: int, keys: int) -> int:
    """By how many chunks a tensor of covariances is longer for their rests."""
    if keys > HELD:
        return 0
    return -(-chunks * (keys * keys // 4 + 1) // (keys * keys))


def padded(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def padded_keys(size: int) -> int:
    return padded(size) if size <= HELD else -(-size // 64) * 64


class Problem(NamedTuple):
    """The inputs as the kernels take them: contiguous, aligned, K and the values of a group padded with zeros."""

    q: Tensor  # [B, T, H, K']
    k: Tensor
    v: Tensor  # [B, T, H, G, V']
    g: Tensor  # [B, T, H] or [B, T, H, K'], float32 as all below
    process_noise: Tensor  # [B, T, H] or [B, T, H, K']
    observation_noise: Tensor  # [B, T, H, G]
    rotation: Tensor | None  # [B, T, H, K' / 2]
    mean: Tensor  # [N, H, K', G, V']
    covariance: Tensor  # [N, H, G, K', K']
    cut: Cut
    keys: int  # as given
    values: int  # of a group, as given

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """H, G, and K and the values of a group, padded."""
        return self.v.shape[2], self.v.shape[3], self.q.shape[3], self.v.shape[4]

    @property
    def plain(self) -> bool:
        """Whether keys go to the kernels as they are (see shapes.cuh)."""
        half = all(x.dtype == torch.bfloat16 for x in (self.q, self.k, self.v))
        return half and self.g.dim() == 3 and self.process_noise.dim() == 3 and self.rotation is None

    @property
    def device(self) -> int:
        return self.q.device.index or 0

    def new(self, *shape: int) -> Tensor:
        return self.g.new_empty(shape)

    def progress(self, *, zero: bool) -> Tensor:
        """For the scan, twice: how much of its work is drawn, and of every head how many chunks are done; and of every
        head whether the second time is for it; and who has left each room of the second time."""
        make = torch.zeros if zero else torch.empty
        items = self.covariance.shape[:3].numel()
        return make(2 * (items + 1) + items + CAREFUL_ROOMS, dtype=torch.int32, device=self.q.device)


def prepare(
    q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, offsets: Tensor | None
) -> Problem:
    batch, length, _, keys = q.shape
    noise = observation_noise if observation_noise.dim() == 4 else observation_noise[..., None]
    groups = noise.shape[3]
    values = v.shape[3] // groups
    more, extra = padded_keys(keys) - keys, padded(values) - values
    if rotation is not None and g.dim() == 4:
        g = g.repeat_interleave(2, -1)
    if covariance.dim() == 4:
        covariance = covariance[:, :, None]
    if offsets is None:
        cuts = tuple(range(0, batch * length + 1, length)) if length else (0,) * (batch + 1)
    else:
        cuts = tuple(offsets.tolist())
    return Problem(
        q=_ready(q, (0, more)),
        k=_ready(k, (0, more)),
        v=_ready(v.unflatten(-1, (groups, values)), (0, extra)),
        g=_ready(g.float(), (0, more) if g.dim() == 4 else ()),
        process_noise=_ready(process_noise.float(), (0, more) if process_noise.dim() == 4 else ()),
        observation_noise=_ready(noise.float(), ()),
        rotation=None if rotation is None else _ready(rotation.float(), (0, more // 2)),
        mean=_ready(mean.float().unflatten(-1, (groups, values)), (0, extra, 0, 0, 0, more)),
        covariance=_ready(covariance.float(), (0, more, 0, more)),
        cut=cut(cuts, q.device),
        keys=keys,
        values=values,
    )


def _ready(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    return aligned(F.pad(x, padding) if any(padding) else x)


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from an address on that the kernels may load from."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
