"""``ops.bayesian``: an exact Kalman filter with a dense key covariance. Mathematics: ``metaplastic.rules.bayesian``."""

import torch
from torch import Tensor

from ...rules.bayesian import GaussianState
from .. import contract, dispatch
from ..contract import MemoryRead, compute_dtype


def bayesian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    process_noise: Tensor,
    observation_noise: Tensor,
    *,
    prior_variance: Tensor | None = None,
    rotation: Tensor | None = None,
    initial_state: GaussianState | None = None,
    output_variance: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> MemoryRead:
    r"""Filter every token into the memory and read it out, with gradients for every tensor argument.

    ``S_t = A_t S_{t-1} + noise``, ``v_t = S_t^T k_t + noise``: the mean M and the covariance P of S, exactly
    (arXiv 2605.31163, Eqs. 9-13), and ``output_t = M_t^T (scale q_t)``.

    Args:
        q, k: queries and keys ``[B, T, H, K]``; keys should have about unit norm.
        v: values ``[B, T, H, V]``.
        g: log decay ``[B, T, H]`` or ``[B, T, H, K]``, <= 0 (with ``rotation`` ``[B, T, H, K / 2]``, one per pair).
        process_noise: variance ``[B, T, H]`` or ``[B, T, H, K]`` that every step adds to the covariance, >= 0.
        observation_noise: variance of a token ``[B, T, H]``, > 0; or ``[B, T, H, G]`` for G equal groups of value
            columns, each with a covariance of its own (G divides V). In float32 keep it above 1e-4 of the largest
            variance. ``k = g = process_noise = rotation = 0`` makes a token an exact identity.
        prior_variance: ``[H]`` (``[H, G]`` with groups), > 0: the covariance starts as this times the identity. Not
            read, and may be left out, when ``initial_state`` is given.
        rotation: ``[B, T, H, K / 2]`` radians by which a step turns the key pairs (2j, 2j + 1). None: no rotation.
        initial_state: :class:`GaussianState` of mean ``[N, H, K, V]`` and covariance ``[N, H, K, K]``
            (``[N, H, G, K, K]`` with groups), symmetric positive definite, in float32 (float64 if q is float64); N is
            B, or the number of packed sequences.
        output_variance: also return the posterior variance of the read-out, without observation noise.
        cu_seqlens, scale, backend: as in :func:`metaplastic.ops.palimpsa`; backends are "cuda" (NVIDIA GPUs from
            compute capability 9.0), "chunked" and "reference".

    Returns:
        :class:`MemoryRead`: output ``[B, T, H, V]`` in q's dtype; variance ``[B, T, H]`` (``[B, T, H, G]``) in float32
        (float64) or None; the final :class:`GaussianState`.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, state, offset or value; the message names the argument.
        RuntimeError: a named backend that cannot run here.
    """
    op = "bayesian"
    contract.check_query(op, q)
    batch, length, heads, key_size = q.shape
    value_size = v.shape[-1] if isinstance(v, Tensor) and v.dim() == 4 else -1
    groups = _groups(observation_noise, value_size)
    of_groups = () if groups is None else (groups,)

    def either(x: Tensor, size: int, words: str):
        return (x, (size,), words) if isinstance(x, Tensor) and x.dim() == 4 else (x, (), f"[B, T, H] or {words}")

    decays = (key_size, "[B, T, H, K]") if rotation is None else (key_size // 2, "[B, T, H, K / 2] (with rotation)")
    shapes = {
        "k": (k, (key_size,), "[B, T, H, K]"),
        "v": (v, (value_size,), "[B, T, H, V]"),
        "g": either(g, *decays),
        "process_noise": either(process_noise, key_size, "[B, T, H, K]"),
        "observation_noise": (observation_noise, of_groups, "[B, T, H] or [B, T, H, G]"),
    }
    if rotation is not None:
        contract.require(key_size % 2 == 0, f"{op}: rotation needs an even key size, got K = {key_size}")
        shapes["rotation"] = (rotation, (key_size // 2,), "[B, T, H, K / 2]")
    contract.check_tensors(op, q.shape[:3], q.device, shapes)
    rows = contract.check_packing(op, cu_seqlens, batch)
    cu_seqlens = contract.on_host(cu_seqlens)
    if initial_state is None:
        if prior_variance is None:
            raise ValueError(f"{op}: give prior_variance [H] or initial_state")
        words = "[H] or [H, G]" if groups is None else "[H, G]"
        contract.check_tensors(op, q.shape[2:3], q.device, {"prior_variance": (prior_variance, of_groups, words)})
        contract.check_at_least(op, "prior_variance", prior_variance, 0.0, "prior variance", strictly=True)
        contract.check_finite(op, "prior_variance", prior_variance)
        variance = prior_variance.to(compute_dtype(q))[..., None, None]
        covariance = variance * torch.eye(key_size, dtype=variance.dtype, device=q.device)
        mean = q.new_zeros((rows, heads, key_size, value_size), dtype=variance.dtype)
        covariance = covariance.expand(rows, *covariance.shape)
    else:
        square = (rows, heads, *of_groups, key_size, key_size)
        contract.check_state(op, initial_state, GaussianState, ((rows, heads, key_size, value_size), square), q)
        mean, covariance = initial_state
        contract.check_finite(op, "initial_state.mean", mean)
        _check_covariance(covariance)
        # Its gradient is symmetric, whatever the backend. A decoding step on a GPU saves itself that: all backends but
        # the reference return a covariance that is symmetric to the last bit.
        decoding = length == 1 and covariance.is_cuda and not torch.is_grad_enabled()
        if backend == "reference" or not decoding:
            covariance = (covariance + covariance.mT) / 2
    if backend != "reference":
        inputs = (q, k, v, g, process_noise, observation_noise, rotation, mean, covariance)
        contract.refuse_forward_mode(op, *inputs)
    run = dispatch.resolve(op, backend, q.device.type, q.dtype, (key_size, value_size))
    output, variance, mean, covariance = run(
        q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, cu_seqlens,
        contract.check_scale(op, scale), bool(output_variance),
    )  # fmt: skip
    return MemoryRead(output, variance if output_variance else None, GaussianState(mean, covariance))


def _groups(observation_noise: Tensor, value_size: int) -> int | None:
    if not isinstance(observation_noise, Tensor) or observation_noise.dim() != 4:
        return None
    groups = observation_noise.shape[-1]
    contract.require(
        groups >= 1 and (value_size < 0 or value_size % groups == 0),
        f"bayesian: the groups G of observation_noise must divide the value size {value_size}, got G = {groups}",
    )
    return groups


def _check_covariance(covariance: Tensor) -> None:
    """Symmetric positive definite, where values may be read (as the other value checks)."""
    if not contract.readable(covariance):
        return
    x = covariance.detach()
    contract.check_finite("bayesian", "initial_state.covariance", x)
    # A covariance that went through float32 filtering is symmetric to rounding; a wrong matrix is not.
    asymmetry = ((x - x.mT).abs().amax((-2, -1)) / x.abs().amax((-2, -1)).clamp(min=1e-30)).max().item()
    contract.require(
        asymmetry <= 1e-5,
        f"bayesian: initial_state.covariance must be symmetric, got a difference of {asymmetry:g} of a matrix's "
        "largest element to its transpose",
    )
    failed = int((torch.linalg.cholesky_ex(x).info != 0).sum())
    contract.require(
        failed == 0, f"bayesian: initial_state.covariance must be positive definite, got {failed} matrices that are not"
    )


def check_values(
    g: Tensor, process_noise: Tensor, observation_noise: Tensor, rotation: Tensor | None, tokens: int | None
) -> None:
    """The value checks every backend makes first; ``tokens``: how many along T belong to a packed sequence."""
    g, process_noise, observation_noise = (x[:, :tokens] for x in (g, process_noise, observation_noise))
    contract.check_at_most("bayesian", "g", g, 0.0, "log decay")
    contract.check_at_least("bayesian", "process_noise", process_noise, 0.0, "a variance")
    contract.check_finite("bayesian", "process_noise", process_noise)
    contract.check_at_least("bayesian", "observation_noise", observation_noise, 0.0, "a variance", strictly=True)
    if rotation is not None:
        contract.check_finite("bayesian", "rotation", rotation[:, :tokens])
