"""What the memory of every layer does, measured at every evaluation through ``metaplastic.inspection``.

    layer_N_window        N_t = 1 / (1 - alpha_t), the tokens over which it forgets
    layer_N_ratio         r_t = (I_max - I_min) / I_min, how differently its elements resist change (Palimpsa)
    layer_N_uncertainty   tr(P_t) / (K p0), the variance that is left of its prior's (Bayesian Layer)

Each is the median over tokens and over heads, of the same held-out rows every time. Layers that lack a quantity lack
the number, as do those where it is infinite (a memory that forgets nothing).
"""

import math
from typing import Any

from ..inspection import Spread, memories

MEASURES = ("window", "ratio", "uncertainty")
TOKENS = 2048  # or one row: a replay of all elements costs more than the model


def memory_measures(model: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """By name, see the module's docstring. ``model`` reads ``inputs``, in the mode that it is in, without autocast."""
    found = {}
    for number, layer in enumerate(memories(model, **{name: x for name, x in inputs.items() if name != "labels"})):
        for name in MEASURES:
            if isinstance(each := layer.measures.get(name), Spread):
                value = float(each.median.flatten().median())
                if math.isfinite(value):
                    found[f"layer_{number}_{name}"] = value
    return found


def rows_to_watch(held_out: Any, block_length: int) -> list[Any]:
    """The first held-out rows, about ``TOKENS`` of them."""
    return [held_out[number] for number in range(min(max(TOKENS // block_length, 1), len(held_out)))]
