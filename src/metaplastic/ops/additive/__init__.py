"""``ops.additive``: read a decaying sum of outer products. Mathematics: :mod:`metaplastic.rules.additive`."""

from torch import Tensor

from ...rules.additive import AdditiveState
from .. import contract, dispatch
from ..contract import MemoryRead, compute_dtype


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    initial_state: AdditiveState | None = None,
    output_variance: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> MemoryRead:
    r"""Add every token to the memory and read it out, with gradients for every tensor argument.

    ``S_t = exp(g_t) S_{t-1} + v_t k_t^T``, ``output_t = S_t (scale q_t)``: linear attention (g = 0), RetNet,
    Simple GLA and Mamba2's core (g per head), GLA (g per key).

    Args:
        q, k: queries and keys ``[B, T, H, K]``.
        v: values ``[B, T, H, V]``. ``v = g = 0`` makes a token an exact identity.
        g: log decay ``[B, T, H]`` or ``[B, T, H, K]``, <= 0 (-inf forgets everything).
        initial_state: :class:`AdditiveState` of ``[N, H, V, K]`` in float32 (float64 if q is float64); N is B, or
            the number of packed sequences. None: an empty memory.
        output_variance: also return the variance ``|scale q|^2`` of the unit prior, which no write reduces.
        cu_seqlens, scale, backend: as in :func:`metaplastic.ops.palimpsa`; backends are "chunked", "reference" and,
            only by name, "fla" (flash-linear-attention on a GPU, for 16-bit inputs).

    Returns:
        :class:`MemoryRead`: output ``[B, T, H, V]`` in q's dtype, variance or None, the final :class:`AdditiveState`.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, state, offset or value; the message names the argument.
        RuntimeError: a named backend that cannot run here.
    """
    op = "additive"
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
            "g": (g, (key_size,), "[B, T, H, K]") if per_key else (g, (), "[B, T, H] or [B, T, H, K]"),
        },
    )
    rows = contract.check_packing(op, cu_seqlens, batch)
    cu_seqlens = contract.on_host(cu_seqlens)
    mean = None
    if initial_state is not None:
        contract.check_state(op, initial_state, AdditiveState, ((rows, heads, value_size, key_size),), q)
        mean = initial_state.mean
    if backend != "reference":
        contract.refuse_forward_mode(op, q, k, v, g, mean)
    run = dispatch.resolve(op, backend, q.device.type, q.dtype)
    output, mean = run(q, k, v, g, mean, cu_seqlens, contract.check_scale(op, scale))
    variance = None
    if output_variance:
        query = q.to(compute_dtype(q)) * scale
        if cu_seqlens is not None:
            inside = contract.inside_sequences(cu_seqlens, q.shape[1], q.device)
            query = query.masked_fill(~inside[None, :, None, None], 0)
        variance = query.square().sum(-1, keepdim=True).expand(v.shape)
    return MemoryRead(output, variance, AdditiveState(mean))


def check_values(g: Tensor, tokens: int | None) -> None:
    """The value check every backend makes first; ``tokens``: how many along T belong to a packed sequence."""
    contract.check_at_most("additive", "g", g if tokens is None else g[:, :tokens], 0.0, "log decay")
