"""How the work is cut: warps, blocks and spans, chosen from the shapes and the device's number of processors alone."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .problem import CHUNK, KERNEL_TYPES, Problem

FOLDER = Path(__file__).parent  # of the kernels
READ, CHUNKS, LOCAL = 0, 1, 2  # jobs of recurrent.cu and states.cu
SHORT = 8  # sequences of at most this many tokens are read token by token
LEAST_SPAN = 256  # tokens below which a sequence is not cut further
LARGEST_KEYS = 256  # of the tensor-core kernels


class Layout(NamedTuple):
    rows: int  # values of a block
    resident: int  # blocks that a multiprocessor holds at once
    definitions: dict[str, Any]

    def blocks(self, problem: Problem, spans: int) -> int:
        heads, keys, values = problem.shape
        return -(-values // self.rows) * heads * spans if keys and values else 0


def on_tensor_cores(problem: Problem) -> bool:
    return problem.q.dtype == torch.bfloat16 and problem.longest > SHORT and 0 < problem.shape[1] <= LARGEST_KEYS


def real(problem: Problem) -> str:
    return KERNEL_TYPES[problem.g.dtype]


def recurrent(problem: Problem) -> Layout:
    return _by_token(problem, 32)


def decode(problem: Problem) -> Layout:
    return _by_token(problem, 8)


def _by_token(problem: Problem, rows: int) -> Layout:
    pieces = max(1, -(-problem.shape[1] // 32))
    types = {"INPUT": KERNEL_TYPES[problem.q.dtype], "REAL": real(problem)}
    return Layout(rows, 4, {**types, "KEY_PIECES": pieces})


def _tiles(keys: int, most: int) -> tuple[int, int]:
    """Tiles of 8 keys per warp (even, at most ``most``), and how many warps share a row."""
    needed = -(-keys // 8)
    parts = -(-needed // most)
    tiles = -(-needed // parts)
    return tiles + tiles % 2, parts


def _groups(values: int, parts: int, warps: int) -> tuple[int, int]:
    """Row groups of a block and blocks per multiprocessor: waste no rows, fill its ``warps``, prepare keys for many."""
    needed = -(-values // 16)

    def merit(groups: int) -> float:
        size = groups * parts
        useful, filled = needed / (-(-needed // groups) * groups), warps // size * size / warps
        return useful * filled / (1 + 0.8 / groups)

    groups = max(range(1, max(1, min(needed, warps // parts)) + 1), key=merit)
    return groups, max(1, warps // (groups * parts))


@functools.cache
def forward(keys: int, values: int) -> Layout:
    tiles, parts = _tiles(keys, 16)
    warps = 16 if tiles == 8 else 12 if tiles <= 12 else 8  # as many as registers allow, and help
    groups, resident = _groups(values, parts, warps)
    tokens = 32 if parts * tiles <= 16 and (resident == 1 or groups * tiles <= 18) else 16  # shared memory
    shape = {"KEY_TILES": tiles, "KEY_PARTS": parts, "ROW_GROUPS": groups, "TOKENS": tokens}
    return Layout(16 * groups, resident, {**shape, "BLOCKS": resident})


@functools.cache
def states(keys: int, values: int) -> Layout:
    tiles, parts = _tiles(keys, 12)
    needed = -(-values // 16)
    blocks = -(-needed // max(1, 12 // parts))
    groups = -(-needed // blocks)
    resident = max(1, (16 if tiles == 8 else 12) // (groups * parts))  # as many warps as registers allow, and help
    shape = {"KEY_TILES": tiles, "KEY_PARTS": parts, "ROW_GROUPS": groups, "BLOCKS": resident}
    return Layout(16 * groups, resident, shape)


def halved(states: Layout) -> Layout | None:
    """The same with half the values in a block, if it was alone on its multiprocessor and can be cut in two."""
    groups = states.definitions["ROW_GROUPS"]
    if groups % 2 or states.resident > 1:
        return None
    return Layout(states.rows // 2, 1, {**states.definitions, "ROW_GROUPS": groups // 2})


def span_length(problem: Problem, layout: Layout) -> int:
    """Tokens of a span: whole sequences, unless they leave multiprocessors idle; a multiple of CHUNK."""
    longest, sequences = problem.longest, len(problem.cuts) - 1
    processors = _processors(problem.q.device)
    blocks = layout.blocks(problem, sequences)
    pieces = 1
    if 0 < blocks < processors:
        pieces = max(1, min(processors * layout.resident // blocks, longest // LEAST_SPAN))
    chunks = -(-longest // (pieces * CHUNK))
    return max(1, chunks) * CHUNK


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
