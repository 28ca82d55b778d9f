"""``ops.delta``: write residuals instead of values. Mathematics: :mod:`metaplastic.rules.delta`."""

import torch
from torch import Tensor

from ...rules.delta import DeltaState
from .. import contract, dispatch
from ..contract import MemoryRead, compute_dtype


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    initial_state: DeltaState | None = None,
    output_variance: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> MemoryRead:
    r"""Correct the memory's answer to every key and read it out, with gradients for every tensor argument.

    ``Mb = diag(exp(g_t)) M_{t-1}``, ``M_t = Mb + beta_t k_t (v_t - Mb^T k_t)^T``, ``output_t = M_t^T (scale q_t)``:
    DeltaNet (g = 0), Gated DeltaNet (g per head), KDA (g per key).

    Args:
        q, k: queries and keys ``[B, T, H, K]``. The memory stays bounded where ``beta |k|^2 <= 2``.
        v: values ``[B, T, H, V]``.
        beta: write strength ``[B, T, H]``, >= 0. ``beta = g = 0`` makes a token an exact identity.
        g: log decay ``[B, T, H]`` or ``[B, T, H, K]``, <= 0 (-inf forgets everything).
        initial_state: :class:`DeltaState` of ``[N, H, K, V]`` in float32 (float64 if q is float64); N is B, or the
            number of packed sequences. None: an empty memory.
        output_variance: also return ``|scale q|^2``: the variance under a covariance reset to the identity.
        cu_seqlens, scale, backend: as in :func:`metaplastic.ops.palimpsa`; backends are "chunked", "reference" and,
            only by name, "fla" (flash-linear-attention on a GPU, for 16-bit inputs).

    Returns:
        :class:`MemoryRead`: output ``[B, T, H, V]`` in q's dtype, variance ``[B, T, H]`` or None, the final state.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, state, offset or value; the message names the argument.
        RuntimeError: a named backend that cannot run here.
    """
    op = "delta"
    contract.check_query(op, q)
    batch, length, heads, key_size = q.shape
    value_size = v.shape[-1] if isinstance(v, Tensor) and v.dim() == 4 else -1
    per_key = isinstance(g, Tensor) and g.dim() == 4
    contract.check_tensors(
        op,
        q.shape[:3],
        q.device,
        {
            "k": (k, (key_size,), "[B, T, H, K]"),
            "v": (v, (value_size,), "[B, T, H, V]"),
            "beta": (beta, (), "[B, T, H]"),
            "g": (g, (key_size,), "[B, T, H, K]") if per_key else (g, (), "[B, T, H] or [B, T, H, K]"),
        },
    )
    rows = contract.check_packing(op, cu_seqlens, batch)
    cu_seqlens = contract.on_host(cu_seqlens)
    mean = None
    if initial_state is not None:
        contract.check_state(op, initial_state, DeltaState, ((rows, heads, key_size, value_size),), q)
        mean = initial_state.mean
    if backend != "reference":
        contract.refuse_forward_mode(op, q, k, v, beta, g, mean)
    run = dispatch.resolve(op, backend, q.device.type, q.dtype)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, beta, g, mean))
    output, mean, *_ = run(q, k, v, beta, g, mean, cu_seqlens, contract.check_scale(op, scale), keep)
    variance = None
    if output_variance:
        query = q.to(compute_dtype(q)) * scale
        if cu_seqlens is not None:
            inside = contract.inside_sequences(cu_seqlens, q.shape[1], q.device)
            query = query.masked_fill(~inside[None, :, None, None], 0)
        variance = query.square().sum(-1)
    return MemoryRead(output, variance, DeltaState(mean))


def check_values(beta: Tensor, g: Tensor, tokens: int | None) -> None:
    """The value checks every backend makes first; ``tokens``: how many along T belong to a packed sequence."""
    contract.check_at_least("delta", "beta", beta[:, :tokens], 0.0, "write strength")
    contract.check_finite("delta", "beta", beta[:, :tokens])
    contract.check_at_most("delta", "g", g[:, :tokens], 0.0, "log decay")
