"""Backend ``fla``: the Triton kernels of flash-linear-attention for ``ops.additive`` and ``ops.delta`` on a GPU.

Only for 16-bit inputs (its products are TF32 or less) and only by name: states between chunks may be rounded, and each
call leaves the graph of torch.compile. Decays below exp(-20) = 2e-9 are taken as that: far below 16-bit rounding, and
its sums of log decays, whose differences it takes, stay small enough for float32.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .additive import check_values as check_additive
from .contract import read_offsets
from .delta import check_values as check_delta

_LEAST = -20.0  # log decay
Optional = Tensor | None


def additive(q, k, v, g, mean: Optional, cu_seqlens: Optional, scale: float) -> tuple[Tensor, Tensor]:
    """Simple GLA, or GLA if the decay is per key."""
    from fla.ops.gla import chunk_gla  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore[reportMissingImports]

    check_additive(g, _tokens("additive", cu_seqlens, q))
    run = chunk_gla if g.dim() == 4 else chunk_simple_gla
    state = None if mean is None else mean.mT
    o, state = _run("additive", run, {"q": q, "k": k, "v": v, "g": g}, state, cu_seqlens, scale)
    return o, state.mT


def delta(
    q, k, v, beta, g, mean: Optional, cu_seqlens: Optional, scale: float, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, or KDA if the decay is per key; keep is the library's own choice."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    check_delta(beta, g, _tokens("delta", cu_seqlens, q))
    run = chunk_kda if g.dim() == 4 else chunk_gated_delta_rule
    return _run("delta", run, {"q": q, "k": k, "v": v, "beta": beta, "g": g}, mean, cu_seqlens, scale)


@contextlib.contextmanager
def unchecked() -> Iterator[str]:
    """For timings alone: runs backward passes that flash-linear-attention refuses here, since Triton miscompiles them.

    Gives the reason why no gradient made within may be used; empty if there is none.
    """
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]

    before, chunk_o.TRITON_ABOVE_3_7_1 = chunk_o.TRITON_ABOVE_3_7_1, True
    try:
        refused = chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not before
        yield "this version of Triton miscompiles its backward" if refused else ""
    finally:
        chunk_o.TRITON_ABOVE_3_7_1 = before


def _tokens(op: str, cu_seqlens: Optional, q: Tensor) -> int | None:
    """How many tokens belong to a packed sequence."""
    offsets = read_offsets(op, cu_seqlens, q.shape[1])
    return None if offsets is None else int(offsets[-1])


def _run(op: str, run: Callable, inputs: dict[str, Tensor], state: Optional, cu_seqlens: Optional, scale: float):
    """Output ``[B, T, H, V]`` and final state ``[N, H, K, V]``; empty sequences and the tail never reach a kernel."""
    q, v = inputs["q"], inputs["v"]
    offsets = read_offsets(op, cu_seqlens, q.shape[1])
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    if state is None:
        state = q.new_zeros(rows, q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    tokens = q.shape[1] if offsets is None else int(offsets[-1])
    if tokens == 0 or q.shape[0] == 0:
        return v.new_zeros(v.shape), state.clone()
    inputs = {n: x[:, :tokens] for n, x in inputs.items()}
    inputs["g"] = inputs["g"].float().clamp(min=_LEAST)
    options = {"scale": scale, "output_final_state": True}
    if offsets is None:
        o, final = run(**inputs, initial_state=state, **options)
        return o, final
    full = [n for n, (a, b) in enumerate(itertools.pairwise(offsets.tolist())) if b > a]
    there = torch.tensor(full, device=q.device)
    borders = torch.cat([offsets[:1], offsets[1:][full]]).to(q.device)
    o, final = run(**inputs, initial_state=state[there], cu_seqlens=borders, **options)
    return torch.cat([o, o.new_zeros(1, q.shape[1] - tokens, *o.shape[2:])], 1), state.index_copy(0, there, final)
