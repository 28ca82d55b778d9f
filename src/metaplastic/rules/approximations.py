r"""What a cheaper memory keeps of a belief: the approximations that turn a design model's filter into a known rule.

A belief can be written as mean m and covariance P or as information ``P^{-1} m`` and precision ``P^{-1}``. Simplifying
the second of a pair while the first is kept gives most rules:

                                    the mean kept                       the information kept
    nothing simplified              the exact filter                    the same
    diagonal of the covariance      the diagonal Bayesian Layer         -
    diagonal of the precision       mean field                          Palimpsa
    back to the prior               the delta rules                     the additive rules

The mean is what the next token's residual is formed with; keeping the information instead loses the residual, and with
it the correction of what was already known (:mod:`.mean_field`).
"""

import torch
from torch import Tensor

from .checks import check_axes, check_tensors
from .design import Approximation, Belief


def information(belief: Belief) -> tuple[Tensor, Tensor]:
    """``P^{-1} m`` and ``P^{-1}``."""
    precision = torch.linalg.inv(belief.covariance)
    return (precision @ belief.mean[..., None])[..., 0], precision


def _diagonal(matrix: Tensor) -> Tensor:
    return torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def _palimpsa(predicted: Belief, updated: Belief) -> Belief:
    kept, precision = information(updated)
    variance = 1 / precision.diagonal(dim1=-2, dim2=-1)
    return Belief(variance * kept, torch.diag_embed(variance))


def _elementwise(predicted: Belief, updated: Belief) -> Belief:
    mixed = (updated.covariance - _diagonal(updated.covariance)) @ information(predicted)[0][..., None]
    return Belief(updated.mean - mixed[..., 0], updated.covariance)


DIAGONAL = Approximation(
    "mean kept, covariance made diagonal", after=lambda _, new: Belief(new.mean, _diagonal(new.covariance))
)
MEAN_FIELD = Approximation(
    "mean kept, precision made diagonal",
    after=lambda _, new: Belief(new.mean, torch.linalg.inv(_diagonal(information(new)[1]))),
)
PALIMPSA = Approximation("information kept, precision made diagonal", after=_palimpsa)
# The mean of an update is P (old information + evidence); here the old information meets only the diagonal of P.
ELEMENTWISE = Approximation("old memory kept elementwise", after=_elementwise)


def both(first: Approximation, second: Approximation) -> Approximation:
    """One after the other."""
    return Approximation(
        f"{first.name}; {second.name}",
        lambda t, predicted: second.before(t, first.before(t, predicted)),
        lambda predicted, updated: second.after(predicted, first.after(predicted, updated)),
    )


def reset(variance: Tensor) -> Approximation:
    """Before every token the covariance is variance_t I, variance [B, T, H], whatever was learnt."""
    check_tensors(variance=variance)
    check_axes("variance", variance, "B, T, H")

    def before(t: int, predicted: Belief) -> Belief:
        identity = torch.eye(predicted.mean.shape[-1], dtype=variance.dtype, device=variance.device)
        fixed = variance[:, t, :, None, None, None] * identity
        return Belief(predicted.mean, fixed.expand_as(predicted.covariance))

    return Approximation("covariance reset to lambda I", before=before)


def restore(prior: Tensor, keep: str) -> Approximation:
    """After every token the precisions are the prior's [H, N]; ``keep``: "mean" (delta) or "information" (additive)."""
    if keep not in ("mean", "information"):
        raise ValueError(f'keep: got {keep!r}, expected "mean" or "information"')
    check_tensors(prior=prior)
    check_axes("prior", prior, "H, N")

    def after(predicted: Belief, updated: Belief) -> Belief:
        variance = (1 / prior)[:, None].expand_as(updated.mean)
        mean = updated.mean if keep == "mean" else variance * information(updated)[0]
        return Belief(mean, torch.diag_embed(variance))

    return Approximation(f"{keep} kept, precision put back to the prior", after=after)
