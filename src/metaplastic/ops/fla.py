"""Backend ``fla``: the Triton kernels of flash-linear-attention for ``ops.additive`` and ``ops.delta`` on a GPU.

Only for 16-bit inputs (its products are TF32 or less) and only by name: states between chunks may be rounded, and each
call leaves the graph of torch.compile. Decays below exp(-20) = 2e-9 are taken as that: far below 16-bit rounding, and
its sums of log decays, whose differences it takes, stay small enough for float32. K and V are padded to whole
multiples of ``MULTIPLE`` (it refuses odd ones). Where its backward cannot be trusted there are no gradients
(:func:`no_gradients`), and a call that would need them raises.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .additive import check_values as check_additive
from .contract import read_offsets, require
from .delta import check_values as check_delta

_LEAST = -20.0  # log decay
MULTIPLE = 8
LARGEST_KEYS = 256  # of the delta rule
MESA_STEPS = 30  # of conjugate gradients: what the library's own layer takes
MESA_NOTE = (
    f"{MESA_STEPS} steps of conjugate gradients and a lambda of 1 for every key, as its layer has before training; "
    "errors against the exact solution in float64"
)
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
    size = q.shape[3]
    require(
        size <= LARGEST_KEYS,
        f"delta: q must have K of at most {LARGEST_KEYS} for backend 'fla' (its limit), got {size}",
    )
    run = chunk_kda if g.dim() == 4 else chunk_gated_delta_rule
    return _run("delta", run, {"q": q, "k": k, "v": v, "beta": beta, "g": g}, mean, cu_seqlens, scale)


def mesa(q, k, v, beta, g, ridge) -> Tensor:
    """MesaNet's output (``metaplastic.rules.mesa``, K = V up to 128): a peer for timings, no operator's backend."""
    from fla.ops.mesa_net import chunk_mesa_net  # pyright: ignore[reportMissingImports]

    return chunk_mesa_net(q=q, k=k, v=v, g=g, beta=beta, lamb=ridge, max_CG_iteration=MESA_STEPS)[0]


def no_gradients(op: str, per_key: bool) -> str | None:
    """Why there are no gradients here for a decay per head (or per key); None if there are."""
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]

    if per_key or not (chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1):
        return None
    if op == "delta" and _tilelang():  # the additive rule's backward keeps what tilelang's does not take
        return None
    instead = " or tilelang" if op == "delta" else ""
    return f"Triton 3.4.0 to 3.7.0 miscompiles its backward of a decay per head on Hopper (needs 3.7.1{instead})"


def _tilelang() -> bool:
    from fla.ops.common.backends.tilelang import CommonTileLangBackend  # pyright: ignore[reportMissingImports]

    return CommonTileLangBackend.can_use()


@contextlib.contextmanager
def unchecked() -> Iterator[str]:
    """For timings alone: runs backward passes that flash-linear-attention refuses here, since Triton miscompiles them.

    Gives the reason why no gradient made within may be used; empty if there is none.
    """
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]

    reason = no_gradients("additive", per_key=False)
    before, chunk_o.TRITON_ABOVE_3_7_1 = chunk_o.TRITON_ABOVE_3_7_1, True
    try:
        yield "" if reason is None else "this version of Triton miscompiles its backward"
    finally:
        chunk_o.TRITON_ABOVE_3_7_1 = before


def _tokens(op: str, cu_seqlens: Optional, q: Tensor) -> int | None:
    """How many tokens belong to a packed sequence."""
    offsets = read_offsets(op, cu_seqlens, q.shape[1])
    return None if offsets is None else int(offsets[-1])


def _check(op: str, inputs: dict[str, Tensor], state: Optional) -> None:
    for name in ("k", "v"):
        here, dtype = inputs[name].dtype, inputs["q"].dtype
        require(here == dtype, f"{op}: {name} must be {dtype} like q for backend 'fla', got {here}")
    leaves = [*inputs.values(), *([] if state is None else [state])]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    if wanted and (reason := no_gradients(op, inputs["g"].dim() == 4)) is not None:
        raise RuntimeError(
            f"ops.{op}: backend 'fla' has no gradients here: {reason}. "
            "Use backend='chunked', or torch.no_grad() if none are wanted"
        )


def _run(op: str, run: Callable, inputs: dict[str, Tensor], state: Optional, cu_seqlens: Optional, scale: float):
    """Output ``[B, T, H, V]`` and final state ``[N, H, K, V]``; empty sequences and the tail never reach a kernel."""
    _check(op, inputs, state)
    q, v = inputs["q"], inputs["v"]
    offsets = read_offsets(op, cu_seqlens, q.shape[1])
    rows, keys, values = q.shape[0] if offsets is None else len(offsets) - 1, q.shape[3], v.shape[3]
    if state is None:
        state = q.new_zeros(rows, q.shape[2], keys, values, dtype=torch.float32)
    tokens = q.shape[1] if offsets is None else int(offsets[-1])
    if tokens == 0 or q.numel() == 0 or v.numel() == 0:
        return v.new_zeros(v.shape), state.clone()
    inputs = {n: x[:, :tokens] for n, x in inputs.items()}
    inputs["g"] = inputs["g"].float().clamp(min=_LEAST)
    more = {"q": -keys % MULTIPLE, "k": -keys % MULTIPLE, "v": -values % MULTIPLE}
    if inputs["g"].dim() == 4:
        more["g"] = more["k"]
    inputs = {n: F.pad(x, (0, more[n])) if more.get(n) else x for n, x in inputs.items()}
    padded = F.pad(state, (0, more["v"], 0, more["k"]))
    options = {"scale": scale, "output_final_state": True}
    if offsets is None:
        o, final = run(**inputs, initial_state=padded, **options)
        return o[..., :values], final[:, :, :keys, :values]
    full = [n for n, (a, b) in enumerate(itertools.pairwise(offsets.tolist())) if b > a]
    there = torch.tensor(full).to(q.device, non_blocking=True)
    borders = torch.cat([offsets[:1], offsets[1:][full]])
    options["cu_seqlens_cpu"] = borders
    borders = borders.to(q.device, non_blocking=True)
    o, final = run(**inputs, initial_state=padded[there], cu_seqlens=borders, **options)
    o = F.pad(o[..., :values], (0, 0, 0, 0, 0, q.shape[1] - tokens))
    return o, state.index_copy(0, there, final[:, :, :keys, :values])
