"""Table 1 of the Bayesian Layer's paper (arXiv 2605.31163) with its dynamics and noise groups (App. D)."""

import torch
from torch import Tensor

from .. import bayesian, delta, longhorn
from ..approximations import DIAGONAL, ELEMENTWISE, both, reset
from ..design import EXACT, Approximation, drift, regression
from .case import Answer, Inputs, SpecialCase, scaled, start

OBSERVED, ASKED = "v = S^T k + N(0, r2)", "S^T q"


def layer(x: Inputs, matrix: Tensor, process: Tensor, *, approximation: Approximation = EXACT):
    """The Bayesian Layer's design model with dynamics ``matrix`` and process noise per head or per key."""
    noise = torch.diag_embed((process if process.dim() == 4 else process[..., None]).expand_as(x.k))
    return regression(drift(matrix, noise), x.q, x.k, x.v, x.noise), start(x, x.prior[:, None, None]), approximation


def rule(x: Inputs, g: Tensor, process: Tensor, noise: Tensor, prior: Tensor, **options) -> Answer:
    """``rules.bayesian``, its groups (or its one covariance) written out for every column."""
    batch, _, heads, size = x.k.shape
    state = bayesian.init_state(batch, heads, x.v.shape[-1], size, prior_variance=1 / prior)
    y, variance, state = bayesian.scan(x.q, x.k, x.v, g, process, noise, state, **options)
    covariance = state.covariance if prior.dim() == 2 else state.covariance[:, :, None]
    variance = variance if prior.dim() == 2 else variance[..., None]
    each = y.shape[-1] // covariance.shape[2]
    return Answer(y, state.mean.mT, variance.repeat_interleave(each, -1), covariance.repeat_interleave(each, 2))


def groups(x: Inputs):
    each = x.v.shape[-1] // x.group_noise.shape[-1]
    noise, prior = (n.repeat_interleave(each, -1) for n in (x.group_noise, x.group_prior))
    process = torch.diag_embed(x.process[..., None].expand_as(x.k))
    return regression(drift(scaled(x.g, x.k), process), x.q, x.k, x.v, noise), start(x, prior[..., None]), EXACT


def real_rows(x: Inputs) -> Inputs:
    """Reads and process noise in the real rows only; one decay per key pair."""
    kept = x.k.new_tensor([1.0, 0.0]).repeat(x.k.shape[-1] // 2)
    return x._replace(q=x.q * kept, process_key=x.process_key * kept, g_key=x.g_key[..., ::2])


def rotating(x: Inputs):
    """A = diag(a) Rot(theta), written out as a matrix."""
    x, size = real_rows(x), x.k.shape[-1]
    swap = torch.zeros(size, size, dtype=x.k.dtype)
    even = torch.arange(0, size, 2)
    swap[even, even + 1], swap[even + 1, even] = -1.0, 1.0
    angle, decay = x.angle.repeat_interleave(2, -1), x.g_key.repeat_interleave(2, -1)
    turn = torch.diag_embed(angle.cos()) + torch.diag_embed(angle.sin()) @ swap
    return layer(x, scaled(decay, x.k) @ turn, x.process_key)


def rule_rotating(x: Inputs) -> Answer:
    x = real_rows(x)
    return rule(x, x.g_key, x.process_key, x.noise, x.prior, rotation=x.angle)


def strength(x: Inputs) -> Tensor:
    return x.variance / (x.noise + x.variance * x.k.square().sum(-1))


def rule_delta(x: Inputs, g: Tensor) -> Answer:
    y, _, state = delta.scan(x.q, x.k, x.v, strength(x), g)
    return Answer(y, state.mean.mT)


def columns(x: Inputs, *approximations: Approximation):
    """A noise lambda / beta_i per column, no dynamics."""
    noise = x.variance[..., None] / x.beta
    still = drift(scaled(0 * x.g, x.k), torch.diag_embed(x.process[..., None].expand_as(x.k)))
    chosen = reset(x.variance)
    for further in approximations:
        chosen = both(chosen, further)
    return regression(still, x.q, x.k, x.v, noise), start(x, x.prior[:, None, None]), chosen


def rule_longhorn(x: Inputs, approximate: bool) -> Answer:
    y, _, state = longhorn.scan(x.q, x.k, x.v, x.beta, approximate=approximate)
    return Answer(y, state.mean.mT)


def resetting(x: Inputs, g: Tensor) -> tuple:
    return layer(x, scaled(g, x.k), x.process, approximation=reset(x.variance))


COLUMNS = "v_i = S_i.k + N(0, lambda / beta_i)"
STRENGTH = "beta = lambda / (r2 + lambda k.k)"
CASES = [
    SpecialCase(
        "Bayesian Layer, no dynamics", "S + N(0, l2)", OBSERVED, ASKED, "`rules.bayesian`, g = 0",
        lambda x: layer(x, scaled(0 * x.g, x.k), x.process),
        lambda x: rule(x, 0 * x.g, x.process, x.noise, x.prior),
    ),
    SpecialCase(
        "Bayesian Layer, one decay", "alpha S + N(0, l2)", OBSERVED, ASKED, "`rules.bayesian`, g per head",
        lambda x: layer(x, scaled(x.g, x.k), x.process),
        lambda x: rule(x, x.g, x.process, x.noise, x.prior),
    ),
    SpecialCase(
        "Bayesian Layer, a decay per key", "diag(alpha) S + N(0, diag(l2))", OBSERVED, ASKED,
        "`rules.bayesian`, g and l2 per key",
        lambda x: layer(x, scaled(x.g_key, x.k), x.process_key),
        lambda x: rule(x, x.g_key, x.process_key, x.noise, x.prior),
    ),
    SpecialCase(
        "Bayesian Layer, damped rotations", "diag(alpha) Rot(theta) S + N(0, l2) in the real rows", OBSERVED,
        "S^T q, q in the real rows", "`rules.bayesian`, g per key pair, rotation theta", rotating, rule_rotating,
    ),
    SpecialCase(
        "Bayesian Layer, noise groups", "alpha S + N(0, l2)", "v_i = S_i.k + N(0, r2 of i's group)", ASKED,
        "`rules.bayesian`, r2 and the prior per group", groups,
        lambda x: rule(x, x.g, x.process, x.group_noise, x.group_prior),
    ),
    SpecialCase(
        "Bayesian Layer, diagonal (its ablation)", "alpha S + N(0, l2)", OBSERVED, ASKED,
        "`rules.bayesian`, project=diagonal",
        lambda x: layer(x, scaled(x.g, x.k), x.process, approximation=DIAGONAL),
        lambda x: rule(x, x.g, x.process, x.noise, x.prior, project=bayesian.diagonal),
    ),
    SpecialCase(
        "DeltaNet", "S + N(0, l2)", OBSERVED, ASKED, f"`rules.delta`, g = 0, {STRENGTH}",
        lambda x: resetting(x, 0 * x.g), lambda x: rule_delta(x, 0 * x.g),
        "beta k.k is at most 1 (r2 = 0); a larger beta is no filter.",
    ),
    SpecialCase(
        "Gated DeltaNet", "alpha S + N(0, l2)", OBSERVED, ASKED, f"`rules.delta`, g per head, {STRENGTH}",
        lambda x: resetting(x, x.g), lambda x: rule_delta(x, x.g),
    ),
    SpecialCase(
        "KDA", "diag(alpha) S + N(0, l2)", OBSERVED, ASKED, f"`rules.delta`, g per key, {STRENGTH}",
        lambda x: resetting(x, x.g_key), lambda x: rule_delta(x, x.g_key),
    ),
    SpecialCase(
        "Longhorn, its implicit step", "S + N(0, l2)", COLUMNS, ASKED, "`rules.longhorn`", columns,
        lambda x: rule_longhorn(x, False),
    ),
    SpecialCase(
        "Longhorn, as it runs", "S + N(0, l2)", COLUMNS, ASKED, "`rules.longhorn`, approximate=True",
        lambda x: columns(x, ELEMENTWISE), lambda x: rule_longhorn(x, True),
        "of the new mean P (old information + evidence), the first product keeps only the diagonal of P.",
    ),
]  # fmt: skip
