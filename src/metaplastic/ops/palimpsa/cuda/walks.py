"""How the backward pass is cut: which kernel, by what warps, how many sequences at once, in how many turns.

All of it follows from shapes, the device's number of processors and its shared memory alone.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch

from .problem import CHUNK, KERNEL_TYPES

LEAST_SPAN = 512  # tokens of a piece of a sequence
SHARED_BYTES = 227 << 10  # of a block, most devices less; a multiprocessor has 1 KB more, a block takes 1 KB beside
BLOCK = 16  # keys or values that a tensor-core product takes
WARPS = 12  # of a multiprocessor: as many as have the registers they need
STREAMED = 6  # blocks of keys of a warp whose gradients may lie in the cache: more would not fit into registers
LONGEST = 1.4  # times as long as others a block may take
TURNS = 5  # in which spans are walked that are too many to be walked side by side, half of what is left in each,
MOST_ROUNDS = 3  # but not so many that it evens out by itself


class Walk(NamedTuple):
    """A kernel, how it cuts the values, and what it takes beside inputs and outputs."""

    name: str
    rows: int  # values of a block
    shared_bytes: int
    most: int  # blocks that a multiprocessor can hold
    scratch: int  # bytes of a state that a block at work keeps
    definitions: dict[str, Any]
    apart: int = 16  # tokens from one state of a chunk to the next, at least


@functools.cache
def tensor_walks(keys: int, values: int, room: int = SHARED_BYTES) -> tuple[Walk, ...]:
    """Warps of 16 values and some blocks of 16 keys: every such cut that a multiprocessor can hold."""
    found = []
    key_blocks, row_groups = keys // BLOCK, values // BLOCK
    for parts, groups in itertools.product(range(1, key_blocks + 1), range(1, row_groups + 1)):
        if key_blocks % parts or row_groups % groups or parts * groups > WARPS:
            continue
        warps, of_warp, rows = parts * groups, key_blocks // parts, BLOCK * groups
        row = keys // 2 + 4  # this and what follows as in backward_layout.cuh
        for stream in (0, 1) if parts == 1 and of_warp <= STREAMED else (0,):
            words = warps * (3 if stream else of_warp + 1) * 512 + 64 * (row + rows + 8)
            words += 8 * (key_blocks * 68 + groups * 64) + 8 * (keys + rows) // 2 + 3 * 64 + 13
            sums = warps * (of_warp * 128 + 12) + (parts - 1) * groups * 256
            least, near = (4 * (words + 4 * max(apart * row + sums // 4, (64 - apart) * row)) for apart in (16, 8))
            if most := _resident(least, warps, room):
                definitions = {
                    "KEY_BLOCKS": of_warp, "KEY_PARTS": parts, "ROW_GROUPS": groups,
                    "VALUE_BLOCKS": row_groups // groups, "STREAM": stream,
                }  # fmt: skip
                apart, size = (8, max(least, near)) if _resident(near, warps, room) == most else (16, least)
                found.append(Walk("backward_tensor", rows, size, most, warps * of_warp * 2048, definitions, apart))
                break  # gradients stay in shared memory where they fit
    return tuple(found)


def _resident(size: int, warps: int, room: int) -> int:
    """How many blocks with so many bytes of shared memory a multiprocessor holds, of ``room`` for one."""
    return min((room + 1024) // (size + 1024), WARPS // warps) if size <= room else 0


@functools.cache
def tensor_walk(
    keys: int, values: int, items: int, longest: int, processors: int, room: int = SHARED_BYTES
) -> Walk | None:
    """The fastest for ``items`` heads of sequences of ``longest`` tokens.

    A warp takes a tile of tokens for one block of keys after the other and waits for its own results most of that time,
    so that warps hardly hold each other up, and what a tile costs besides is that of about two blocks of keys (1.7, 9.4
    warps until it shows, and 1.15 where gradients wait in the cache: fitted to three layouts, and two, on an H200).
    """

    def cost(walk: Walk) -> tuple[float, int]:
        shape = walk.definitions
        blocks = max(1, items * shape["VALUE_BLOCKS"])
        pieces = max(1, min(processors * walk.most // blocks, longest // LEAST_SPAN)) if blocks < processors else 1
        resident = min(walk.most, -(-blocks * pieces // processors))
        slots = processors * resident
        whole = rounds(blocks * pieces, slots, turns_of(blocks * pieces, slots, longest))
        crowd = max(1.0, resident * shape["KEY_PARTS"] * shape["ROW_GROUPS"] / 9.4)
        passes = 1.6 if pieces > 1 else 1.0  # what pieces add to each other is found first
        slower = crowd * passes * (1.15 if shape["STREAM"] else 1.0)
        return whole * -(-longest // pieces) * (1.7 + shape["KEY_BLOCKS"]) * slower, shape["VALUE_BLOCKS"]

    return min(tensor_walks(keys, values, room), key=cost, default=None)


@functools.cache
def plain_walk(keys: int, real: torch.dtype, variance: bool, room: int = SHARED_BYTES) -> Walk | None:
    lane_keys = -(-keys // 32)
    rows = 4 if lane_keys <= 4 else 2
    for warps in (8, 4, 2):
        words = 64 * (64 * lane_keys + warps * rows * (3 + variance) + 1) + warps * 4 * (1 + 64 * lane_keys)
        if 0 < lane_keys <= 8 and words * real.itemsize <= room:
            shape = {"LANE_KEYS": lane_keys, "ROWS": rows, "WARPS": warps}
            definitions = {**shape, "VARIANCE": int(variance), "REAL": KERNEL_TYPES[real]}
            return Walk("backward", warps * rows, words * real.itemsize, 1, 0, definitions)
    return None


def shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED_BYTES
    return min(SHARED_BYTES, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def fitting(states: int, scratch: int, blocks: int, slots: int, budget: int) -> int:
    """Spans of so many blocks whose bytes of states and scratch stay within the budget.

    Of blocks that take turns only those at work have a scratch; of more than that each has its own, which with short
    sequences is more than the states.
    """
    few = MOST_ROUNDS * slots // max(1, blocks)
    return min(budget // max(1, states), max(few, budget // max(1, states + blocks * scratch)))


@functools.cache
def group_size(spans: int, blocks: int, slots: int, longest: int, most: int) -> int:
    """Spans at once, at most ``most``: fewest rounds of ``slots`` blocks over all groups, then the smallest groups.

    Every group also waits for its slowest block, which takes up to LONGEST times as long as others, the less the more
    parts they come in.
    """

    def of_group(size: int) -> float:
        turns = turns_of(size * blocks, slots, longest)
        parts = max(turns, size * blocks // slots)
        return rounds(size * blocks, slots, turns) + (LONGEST - 1) / parts if size else 0.0

    def of_all(size: int) -> float:
        whole, rest = divmod(spans, size)
        return whole * of_group(size) + of_group(rest)

    return min(range(1, max(1, min(spans, most)) + 1), key=lambda size: (of_all(size), size))


def turns_of(blocks: int, slots: int, longest: int) -> int:
    chunks = -(-longest // CHUNK)
    return max(1, min(TURNS, chunks.bit_length())) if slots < blocks <= MOST_ROUNDS * slots else 1


def rounds(blocks: int, slots: int, turns: int) -> float:
    """How long blocks take, in the time of one: as if turns were of equal length."""
    return -(-turns * blocks // slots) / turns if blocks > slots else 1.0
