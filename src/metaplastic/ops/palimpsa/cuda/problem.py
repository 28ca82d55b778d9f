"""What the kernels are given: padded inputs, and the sequences cut into spans.

Tokens are counted along B and T together, so that dense batches and packed sequences look the same. A span is a run of
tokens of one sequence that one block walks through; a sequence is one span, or several that run side by side once
their entry states are known (:mod:`.states`).
"""

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import compute_dtype

CHUNK = 64  # tokens between the entry states that backward starts from
ALIGNMENT = 16  # bytes that the kernels load at once
MULTIPLE = 8  # K and V are padded to whole multiples

KERNEL_TYPES = {torch.bfloat16: "bf16", torch.float16: "half", torch.float32: "float", torch.float64: "double"}


class Spans(NamedTuple):
    """``table`` int64 ``[S, 6]`` (``struct Span`` in common.cuh), ``first`` int64 ``[N + 1]``: a sequence's spans."""

    table: Tensor
    first: Tensor
    chunks: int  # of CHUNK tokens, over all sequences

    @property
    def count(self) -> int:
        return self.table.shape[0]

    @property
    def sequences(self) -> int:
        return self.first.shape[0] - 1


@functools.lru_cache(maxsize=64)
def cut(cuts: tuple[int, ...], length: int, device: torch.device) -> Spans:
    """Sequences ``[cuts[n], cuts[n + 1])`` in spans of at most ``length`` tokens, a whole number of chunks."""
    table, first, chunk_base = [], [0], 0
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        chunks = -(-(end - start) // CHUNK)
        for at in range(start, max(end, start + 1), length):
            last = at + length >= end
            fields = (at, min(length, end - at), n if last else -1, chunk_base, chunks, (at - start) // CHUNK)
            table.append(fields)
        first.append(len(table))
        chunk_base += chunks
    rows = torch.tensor(table, dtype=torch.int64).reshape(-1, 6)
    # Not blocking: the host never waits for the device (what it copies from is read before the call returns).
    return Spans(rows.to(device, non_blocking=True), torch.tensor(first).to(device, non_blocking=True), chunk_base)


class Problem(NamedTuple):
    """The inputs as the kernels take them: one dtype, contiguous, aligned, K and V padded with zeros."""

    q: Tensor
    k: Tensor
    w: Tensor
    beta: Tensor
    g: Tensor
    prior: Tensor
    state: tuple[Tensor | None, Tensor | None]  # M and J [N, H, V, K]
    cuts: tuple[int, ...]  # first token of every sequence, and the end
    longest: int  # tokens of the longest sequence
    shape: tuple[int, int, int]  # H, K, V
    sizes: tuple[int, int]  # K and V before padding

    @property
    def single_tokens(self) -> bool:
        """Whether every sequence is one token: then sequences and tokens are the same list."""
        return self.longest == 1 and self.cuts[-1] == len(self.cuts) - 1

    @property
    def device(self) -> int:
        return self.q.device.index or 0

    def new_state(self, *leading: int) -> Tensor:
        _, keys, values = self.shape
        return self.g.new_empty((*leading, values, keys))


def prepare(q, k, w, beta, g, prior, information, excess_precision, offsets: Tensor | None) -> Problem:
    real = compute_dtype(q)
    dtype = q.dtype if all(x.dtype == q.dtype for x in (k, w, beta)) else real
    keys, values = -q.shape[3] % MULTIPLE, -w.shape[3] % MULTIPLE
    q, k = (_ready(x, dtype, (0, keys)) for x in (q, k))
    w, beta = (_ready(x, dtype, (0, values)) for x in (w, beta))
    g, prior = (_ready(x, real, ()) for x in (g, prior))
    state = (
        None if information is None else _ready(information, real, (0, keys, 0, values)),
        None if excess_precision is None else _ready(excess_precision, real, (0, keys, 0, values)),
    )
    if offsets is None:
        batch, longest = q.shape[:2]
        cuts = tuple(range(0, batch * longest + 1, longest)) if longest else (0,) * (batch + 1)
    else:
        cuts = tuple(offsets.tolist())
        longest = max((end - start for start, end in itertools.pairwise(cuts)), default=0)
    heads, padded_keys, padded_values = q.shape[2], q.shape[3], w.shape[3]
    sizes = (padded_keys - keys, padded_values - values)
    return Problem(q, k, w, beta, g, prior, state, cuts, longest, (heads, padded_keys, padded_values), sizes)


def _ready(x: Tensor, dtype: torch.dtype, padding: tuple[int, ...]) -> Tensor:
    x = x.detach()
    if x.dtype != dtype:
        x = x.to(dtype)
    if any(padding):
        x = F.pad(x, padding)
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
