r"""The exact model behind Palimpsa: one full Gaussian belief per value row (arXiv 2602.09075, Sec. 2.2 and Eq. 9).

Row ``i`` of the memory ``S [V, K]`` is a Bayesian linear regression ``v_i ~ N(S_i k, 1 / beta_i)`` with prior
``N(0, Id / prior)``. Before each observation the posterior is raised to the power alpha and the prior to ``1 - alpha``:

    P_t  = alpha_t P_{t-1} + (1 - alpha_t) prior Id + beta_t k_t k_t^T              [K, K] per value row
    mu_t = P_t^{-1} (alpha_t P_{t-1} mu_{t-1} + beta_t v_t k_t)

kept, like :mod:`.palimpsa`, in natural parameters with the same inputs (``w = beta v``, ``alpha = exp(g)``):

    information       M = P mu            M_t = alpha_t M_{t-1} + w_t k_t^T
    excess precision  J = P - prior Id    J_t = alpha_t J_{t-1} + beta_t (x) k_t k_t^T
    read-out                              y_t   = (scale q_t)^T P_t^{-1} M_t
                                          var_t = (scale q_t)^T P_t^{-1} (scale q_t)

Unrolled, token s has the weight ``exp(g_{s+1} + ... + g_t)``: this is weighted ridge regression, exactly. Palimpsa
keeps the diagonal (its ``I_t`` *is* that of ``P_t``) and divides by it; with axis-aligned keys nothing is lost.
The state takes K times Palimpsa's room and a read-out costs K^3 per row: a reference to measure against, not a layer.
Where beta is the same for all rows they share one P (MesaNet's case).

Shapes: q, k [..., K]; w, beta [..., V]; g [...]; prior broadcastable to [...]; the dots are batch and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class FullGaussianState(NamedTuple):
    """Natural parameters of every row: ``[B, H, V, K]``, ``[B, H, V, K, K]`` (batch, heads, value size, key size)."""

    information: Tensor  # M = precision @ mean
    excess_precision: Tensor  # J = precision - prior Id, symmetric, positive semi-definite


State = FullGaussianState


def init_state(
    batch: int, heads: int, value_size: int, key_size: int, *, dtype: torch.dtype = torch.float32, device=None
) -> FullGaussianState:
    """The prior belief: mean 0, precision equal to the prior."""
    shape = (batch, heads, value_size, key_size)
    return FullGaussianState(
        torch.zeros(shape, dtype=dtype, device=device), torch.zeros(*shape, key_size, dtype=dtype, device=device)
    )


def step(state: FullGaussianState, k: Tensor, w: Tensor, beta: Tensor, g: Tensor) -> FullGaussianState:
    """Decay the evidence by ``exp(g)``, then write one token: k [..., K], w and beta [..., V], g [...]."""
    alpha = g.exp()[..., None, None]
    outer = k[..., :, None] * k[..., None, :]
    return FullGaussianState(
        alpha * state.information + w[..., :, None] * k[..., None, :],
        alpha[..., None] * state.excess_precision + beta[..., :, None, None] * outer[..., None, :, :],
    )


def precision(state: FullGaussianState, prior: Tensor) -> Tensor:
    """``P [..., V, K, K]`` of every value row; prior broadcastable to [...]."""
    identity = torch.eye(state.information.shape[-1], dtype=prior.dtype, device=prior.device)
    return state.excess_precision + prior[..., None, None, None] * identity


def readout(state: FullGaussianState, q: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance ``[..., V]`` of ``S q``; q [..., K], prior broadcastable to [...]."""
    factor = torch.linalg.cholesky(precision(state, prior))
    question = q[..., None, :].expand_as(state.information)
    # With P = L L^T both answers are products of L^{-1} M and L^{-1} q, so the variance cannot come out negative.
    sides = torch.stack([state.information, question], -1)
    half = torch.linalg.solve_triangular(factor, sides, upper=False)
    return (half[..., 0] * half[..., 1]).sum(-1), half[..., 1].square().sum(-1)


def scan(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor,
    prior: Tensor,
    state: State | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, State]:
    """Token by token over ``[B, T, H, ...]``: read-out mean and variance ``[B, T, H, V]`` and the final state.

    ``state`` None: nothing seen yet, in the dtype of ``q``.
    """
    if state is None:
        state = init_state(len(q), q.shape[2], w.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)
    means, variances = [torch.zeros_like(w[:, :0])], [torch.zeros_like(w[:, :0])]
    for t in range(q.shape[1]):
        state = step(state, k[:, t], w[:, t], beta[:, t], g[:, t])
        mean, variance = readout(state, q[:, t] * scale, prior)
        means.append(mean[:, None])
        variances.append(variance[:, None])
    return torch.cat(means, 1), torch.cat(variances, 1), state
