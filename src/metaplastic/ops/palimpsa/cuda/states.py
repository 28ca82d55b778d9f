"""States at the boundaries of spans and chunks: what lets spans run side by side, and where backward starts from."""

import torch
from torch import Tensor

from ... import nvrtc
from . import layout
from .problem import CHUNK, Problem, Spans, cut, prepare


def chunk_states(k, w, beta, g, information, excess_precision, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """M and J before every chunk of 64 tokens: ``[chunks * H, V, K]`` each, float32 (float64 if k is float64).

    Of a dense batch, ``[(b * H + h) * C + c]`` with C = ceil(T / 64). Of packed sequences, each cut from its own first
    token: ``[first * H + h * C + c]``, C the sequence's own number of chunks and ``first`` that of all earlier ones.
    """
    problem = prepare(k, k, w, beta, g, g.new_ones(k.shape[2]), information, excess_precision, offsets)
    m, j = write_chunk_states(problem)
    keys, values = problem.sizes
    return m[:, :values, :keys], j[:, :values, :keys]


def write_chunk_states(problem: Problem, pieces: bool = False) -> tuple[Tensor, ...]:
    """The same for prepared inputs, K and V padded as there.

    As ``pieces``: how heads compare, int32 (the heads, those with the most tokens of steep decay first, and what else
    states.cu says), and both states in one, in pieces.
    """
    heads = problem.shape[0]
    length = layout.span_length(problem, _layout(problem, len(problem.cuts) - 1))
    spans = cut(problem.cuts, length, problem.q.device)
    entry = problem.state if spans.count == spans.sequences else entry_states(problem, spans)
    if pieces:
        ranks = torch.zeros(2 * heads + 2, dtype=torch.int32, device=problem.q.device)
        both = problem.new_state(2 * spans.chunks * heads)
        _run(problem, spans, layout.CHUNKS, *entry, both, None, None, ranks)
        return ranks, both
    m, j = (problem.new_state(spans.chunks * heads) for _ in range(2))
    _run(problem, spans, layout.CHUNKS, *entry, m, j, None)
    return m, j


def entry_states(problem: Problem, spans: Spans) -> tuple[Tensor, Tensor]:
    """M and J ``[S, H, V, K]`` before every span."""
    heads, keys, values = problem.shape
    m, j = (problem.new_state(spans.count, heads) for _ in range(2))
    decay = problem.g.new_empty(spans.count, heads)
    _run(problem, spans, layout.LOCAL, None, None, m, j, decay)
    carry = nvrtc.kernel(layout.FOLDER, "carry", problem.device, REAL=layout.real(problem))
    elements = keys * values
    blocks = -(-elements // 1024) * 2 * heads * spans.sequences
    if blocks:
        carry(blocks, spans.first, *problem.state, decay, m, j, heads, elements)
    return m, j


def _layout(problem: Problem, spans: int) -> layout.Layout:
    """Blocks of all values; of half of them where twice as many blocks fill the device and no sequence need be cut."""
    shape = layout.states(*problem.shape[1:])
    processors = layout._processors(problem.q.device)
    if not processors < 4 * shape.blocks(problem, spans) <= 2 * processors:
        return shape
    return layout.halved(shape) or shape


def _run(problem: Problem, spans: Spans, job: int, entry_m, entry_j, m: Tensor, j, decay, ranks=None):
    p, sizes, pieces = problem, problem.shape, ranks is not None
    if pieces or layout.on_tensor_cores(problem):
        shape = _layout(problem, spans.count)
        run = nvrtc.kernel(layout.FOLDER, "states", p.device, JOB=job, PIECES=int(pieces), **shape.definitions)
        arguments = (p.k, p.w, p.beta, p.g, spans.table, entry_m, entry_j, m, j, decay, ranks, *sizes)
    else:
        shape = layout.recurrent(problem)
        run = nvrtc.kernel(layout.FOLDER, "recurrent", p.device, JOB=job, VARIANCE=0, **shape.definitions)
        arguments = (
            p.q, p.k, p.w, p.beta, p.g, p.prior, spans.table, entry_m, entry_j, None, None, m, j, decay, *sizes, 1.0,
        )  # fmt: skip
    if blocks := shape.blocks(problem, spans.count):
        run(blocks, *arguments)


__all__ = ["CHUNK", "chunk_states", "entry_states", "write_chunk_states"]
