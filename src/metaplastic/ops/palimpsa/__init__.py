"""``ops.palimpsa``: a memory whose every element carries a precision. Mathematics: ``metaplastic.rules.palimpsa``."""

from torch import Tensor

from ...rules.palimpsa import PalimpsaState
from .. import contract, dispatch
from ..contract import MemoryRead


def palimpsa(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor,
    prior: Tensor,
    *,
    initial_state: PalimpsaState | None = None,
    output_variance: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> MemoryRead:
    r"""Write every token into the memory and read it out, with gradients for every tensor argument.

    ``M_t = exp(g_t) M_{t-1} + w_t k_t^T``, ``J_t = exp(g_t) J_{t-1} + beta_t (k_t^2)^T`` and
    ``output_t = (M_t / (J_t + prior)) (scale q_t)`` (arXiv 2602.09075, Eq. 5 in natural parameters).

    Args:
        q, k: queries and keys ``[B, T, H, K]``, never normalised here.
        w: write ``[B, T, H, V]`` (``beta * v`` in the paper; finite for ``beta -> 0``).
        beta: evidence ``[B, T, H, V]``, >= 0. ``w = beta = g = 0`` makes a token an exact identity.
        g: log decay ``[B, T, H]``, <= 0 (-inf forgets everything).
        prior: prior precision ``[H]``, > 0.
        initial_state: :class:`PalimpsaState` of ``[N, H, V, K]`` tensors in float32 (float64 if q is float64);
            N is B, or the number of packed sequences. None: the prior belief.
        output_variance: also return the posterior variance of the read-out.
        cu_seqlens: int32 or int64 ``[N + 1]`` offsets of sequences packed along T (then B = 1); starts at 0, never
            decreases, ends at T or earlier. Tokens beyond its end give zero output and gradient. Best on the CPU,
            whatever the device of q: given on a device it is read back once a call, for which the host waits.
        scale: multiplies q.
        backend: "auto", "cpu" (fused, Numba), "cuda" (NVIDIA GPUs), "triton" (any GPU that Triton compiles for),
            "chunked" (any device) or "reference" (token by token).

    Returns:
        :class:`MemoryRead`: output ``[B, T, H, V]`` in q's dtype; variance ``[B, T, H, V]`` in float32 (float64) or
        None; the final :class:`PalimpsaState`. Inputs and states are never changed in place.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, state, offset or value; the message names the argument.
        RuntimeError: a named backend that cannot run here.
    """
    op = "palimpsa"
    contract.check_query(op, q)
    batch, length, heads, key_size = q.shape
    value_size = w.shape[-1] if isinstance(w, Tensor) and w.dim() == 4 else -1
    per_value = ((value_size,), "[B, T, H, V]")
    contract.check_tensors(
        op,
        q.shape[:3],
        q.device,
        {
            "k": (k, (key_size,), "[B, T, H, K]"),
            "w": (w, *per_value),
            "beta": (beta, *per_value),
            "g": (g, (), "[B, T, H]"),
        },
    )
    contract.check_tensors(op, q.shape[2:3], q.device, {"prior": (prior, (), "[H]")})
    number, rows = contract.check_scale(op, scale), contract.check_packing(op, cu_seqlens, batch)
    cu_seqlens = contract.on_host(cu_seqlens)
    information = excess_precision = None
    if initial_state is not None:
        shape = (rows, heads, value_size, key_size)
        contract.check_state(op, initial_state, PalimpsaState, (shape, shape), q)
        information, excess_precision = initial_state
    if backend != "reference":
        contract.refuse_forward_mode(op, q, k, w, beta, g, prior, information, excess_precision)
    run = dispatch.resolve(op, backend, q.device.type, q.dtype, (key_size, value_size))
    output, variance, information, excess_precision = run(
        q, k, w, beta, g, prior, information, excess_precision, cu_seqlens, number, bool(output_variance)
    )
    return MemoryRead(output, variance if output_variance else None, PalimpsaState(information, excess_precision))


def check_values(beta: Tensor, g: Tensor, prior: Tensor, initial_excess: Tensor | None, tokens: int | None) -> None:
    """The value checks every backend makes first; ``tokens``: how many along T belong to a packed sequence."""
    if tokens is not None:
        beta, g = beta[:, :tokens], g[:, :tokens]
    contract.check_at_least("palimpsa", "beta", beta, 0.0, "evidence")
    contract.check_at_most("palimpsa", "g", g, 0.0, "log decay")
    contract.check_at_least("palimpsa", "prior", prior, 0.0, "prior precision", strictly=True)
    if initial_excess is not None:
        contract.check_at_least(
            "palimpsa", "initial_state.excess_precision", initial_excess, 0.0, "precision above the prior"
        )
