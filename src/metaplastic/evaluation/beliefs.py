r"""Gaussian beliefs about a linear map, and how far apart two of them are. Rows of the map are independent.

A belief is a mean ``[..., V, K]`` and a precision ``[..., V, K, K]`` (or ``[..., 1, K, K]`` where the rows share it).

    KL(a || b) = 1/2 (tr(P_b P_a^{-1}) - K + log det P_a - log det P_b + (mu_a - mu_b)^T P_b (mu_a - mu_b))

Between two beliefs with the same mean only the first four terms remain, so for a diagonal belief ``a`` about an exact
``b`` the divergence is that of the best diagonal belief plus half the squared distance of the means.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Belief(NamedTuple):
    mean: Tensor  # [..., V, K]
    precision: Tensor  # [..., V, K, K], symmetric positive definite

    @property
    def covariance(self) -> Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky(self.precision))

    @property
    def log_determinant(self) -> Tensor:
        """Of the precision, ``[..., V]``."""
        return 2 * torch.linalg.cholesky(self.precision).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def from_information(information: Tensor, precision: Tensor) -> Belief:
    """Solves for the mean; the precision may be shared by the rows."""
    factor = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve(information[..., None], factor.expand(*information.shape, -1)).squeeze(-1)
    return Belief(mean, precision)


def diagonal(information: Tensor, precision: Tensor) -> Belief:
    """Palimpsa's belief with the same natural parameters: off-diagonals dropped, then divided."""
    importance = precision.diagonal(dim1=-2, dim2=-1)
    return Belief(information / importance, importance.diag_embed())


def weighted_posterior(keys: Tensor, values: Tensor, weights: Tensor, prior: float) -> Belief:
    """Ridge regression at once: keys [..., T, K], values [..., T, V], weight (evidence) of each token [..., T]."""
    weighted = keys * weights[..., None]
    identity = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
    precision = weighted.mT @ keys + prior * identity
    return from_information(values.mT @ weighted, precision[..., None, :, :])


def divergence(a: Belief, b: Belief) -> Tensor:
    """``KL(a || b)`` in nats, for every row ``[..., V]``."""
    away = a.mean - b.mean
    spread = (b.precision * a.covariance).sum((-2, -1)) - away.shape[-1] + a.log_determinant - b.log_determinant
    return 0.5 * (spread + (away * (b.precision @ away[..., None]).squeeze(-1)).sum(-1))


def relative_distance(mean: Tensor, reference: Tensor) -> Tensor:
    """``|mean - reference| / |reference|`` over rows and elements ``[...]``."""
    return ((mean - reference).square().sum((-2, -1)) / reference.square().sum((-2, -1))).sqrt()


def over_draws(measured: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean and standard deviation over independent draws ``[S]``, under ``name`` and ``name_sd``, to four digits."""
    found = {}
    for name, values in measured.items():
        found[name] = float(f"{values.mean().item():.4g}")
        found[f"{name}_sd"] = float(f"{values.std().item() if len(values) > 1 else 0.0:.4g}")
    return found
