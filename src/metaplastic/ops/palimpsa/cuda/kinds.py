"""Which compiled kernels a head of K x V runs: the name under which ``metaplastic doctor`` blocks them.

Heads of different sizes that run the very same code share a name: what is wrong for one is wrong for the other.
"""

import functools

import torch

from . import layout
from .problem import MULTIPLE
from .walks import BLOCK, plain_walk, tensor_walk

# Heads per multiprocessor: the backward of few is cut otherwise than that of many.
LOADS = (0.02, 0.1, 0.5, 0.75, 1.0, 1.5, 4.0)


@functools.cache
def kernels(dtype: torch.dtype, keys: int, values: int) -> str:
    """The kernels and their definitions, e.g. ``forward 12x1x6x32x1, states ..., recurrent 3, backward 3x4x8``."""
    keys, values = (-(-size // MULTIPLE) * MULTIPLE for size in (keys, values))
    names = []
    if dtype == torch.bfloat16 and 0 < keys <= layout.LARGEST_KEYS and values:
        names += [_name("forward", layout.forward(keys, values).definitions)]
        of_states = layout.states(keys, values)
        names += [_name("states", shape.definitions) for shape in (of_states, layout.halved(of_states)) if shape]
        sizes = [-(-size // BLOCK) * BLOCK for size in (keys, values)]
        walks = (tensor_walk(*sizes, int(100 * load), 2048, 100) for load in LOADS)
        names += dict.fromkeys(_name("backward_tensor", walk.definitions) for walk in walks if walk)
    names += [f"recurrent {max(1, -(-keys // 32))}"]
    plain = plain_walk(keys, torch.float64 if dtype == torch.float64 else torch.float32, False)
    names += [_name("backward", {n: plain.definitions[n] for n in ("LANE_KEYS", "ROWS", "WARPS")})] if plain else []
    return ", ".join(names)


def _name(kernel: str, definitions: dict[str, int]) -> str:
    return f"{kernel} {'x'.join(map(str, definitions.values()))}"
