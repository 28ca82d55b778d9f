"""Table 1 of Palimpsa's paper (arXiv 2602.09075): one regression with tempered forgetting, simplified in several ways.

The transition is ``belief^alpha prior^(1 - alpha)`` (``design.temper``), the write a regression with a precision beta
for each row of the memory or one for all. While the precisions stay at the prior it is ``mean <- alpha mean``.
"""

import torch
from torch import Tensor

from .. import additive, delta, gaussian, longhorn, mean_field, mesa, palimpsa
from ..approximations import ELEMENTWISE, MEAN_FIELD, PALIMPSA, both
from ..design import EXACT, Approximation, regression, temper
from .case import Answer, Inputs, SpecialCase, start
from .decay_order import decay_last, fixed, strength, undecayed_residual


def tempered(
    x: Inputs, approximation: Approximation = EXACT, *, g: Tensor | None = None, v: Tensor | None = None,
    beta: Tensor | None = None, prior: Tensor | None = None,
):  # fmt: skip
    """Forgetting with x.g, a beta per column and one prior precision per head, unless given."""
    prior = x.prior[:, None].expand_as(x.ridge) if prior is None else prior
    move = temper(x.g if g is None else g, prior)
    v, beta = x.v if v is None else v, x.beta if beta is None else beta
    return regression(move, x.q, x.k, v, 1 / beta), start(x, prior[:, None]), approximation


def rule_palimpsa(x: Inputs, w: Tensor, beta: Tensor, g: Tensor) -> Answer:
    y, variance, state = palimpsa.scan(x.q, x.k, w, beta, g, x.prior)
    precision = state.excess_precision + x.prior[:, None, None]
    return Answer(y, state.information / precision, variance, torch.diag_embed(1 / precision))


def rule_gaussian(x: Inputs) -> Answer:
    y, variance, state = gaussian.scan(x.q, x.k, x.beta * x.v, x.beta, x.g, x.prior)
    covariance = torch.linalg.inv(gaussian.precision(state, x.prior))
    return Answer(y, (covariance @ state.information[..., None])[..., 0], variance, covariance)


def rule_mean_field(x: Inputs) -> Answer:
    y, variance, state = mean_field.scan(x.q, x.k, x.beta * x.v, x.beta, x.g, x.prior)
    return Answer(y, state.mean, variance, torch.diag_embed(1 / (state.excess_precision + x.prior[:, None, None])))


def rule_mesa(x: Inputs, g: Tensor) -> Answer:
    y, variance, state = mesa.scan(x.q, x.k, x.v, x.weight, g, x.ridge)
    covariance = torch.linalg.inv(state.keys + torch.diag_embed(x.ridge))
    same = covariance[:, :, None].repeat(1, 1, y.shape[-1], 1, 1)
    return Answer(y, (covariance @ state.cross).mT, variance[..., None].expand_as(y), same)


def rule_delta(x: Inputs, g: Tensor) -> Answer:
    y, _, state = delta.scan(x.q, x.k, x.v, strength(x), g)
    return Answer(y, state.mean.mT)


def rule_longhorn(x: Inputs, approximate: bool) -> Answer:
    y, _, state = longhorn.scan(x.q, x.k, x.v, x.beta / x.prior[:, None], approximate=approximate)
    return Answer(y, state.mean.mT)


def rule_additive(x: Inputs) -> Answer:
    y, variance, state = additive.scan(x.q, x.k, x.beta * x.v / x.prior[:, None], x.g)
    covariance = torch.diag_embed((1 / x.prior)[:, None, None].expand_as(state.mean))
    return Answer(y, state.mean, variance / x.prior[:, None], covariance)


def rule_palimpsa_d(x: Inputs) -> Answer:
    s = x.weight[..., None]
    return rule_palimpsa(x, s * x.v, s * x.beta, x.g)


def rule_palimpsa_m(x: Inputs) -> Answer:
    dt = x.dt[..., None]
    return rule_palimpsa(x, dt * x.v, dt * x.beta, -x.rate * x.dt)


ROWS, SHARED, ASKED = "v_i = S_i.k + N(0, 1 / beta_i)", "v = S k + N(0, 1 / beta)", "S q"
FORGET, STILL, BETA = "S^alpha prior^(1 - alpha)", "S", "beta -> beta / (prior + beta k.k)"
CASES = [
    SpecialCase(
        "Full Gaussian (Eq. 9)", FORGET, ROWS, ASKED, "`rules.gaussian`, w = beta v", tempered, rule_gaussian
    ),
    SpecialCase(
        "Mean field (App. A.5)", FORGET, ROWS, ASKED, "`rules.mean_field`, w = beta v",
        lambda x: tempered(x, MEAN_FIELD), rule_mean_field,
    ),
    SpecialCase(
        "Palimpsa (Eq. 5)", FORGET, ROWS, ASKED, "`rules.palimpsa`, w = beta v",
        lambda x: tempered(x, PALIMPSA), lambda x: rule_palimpsa(x, x.beta * x.v, x.beta, x.g),
    ),
    SpecialCase(
        "Palimpsa-D", FORGET, "u_i / b_i = S_i.k + N(0, 1 / (s b_i))", ASKED, "`rules.palimpsa`, w = s u, beta = s b",
        lambda x: tempered(x, PALIMPSA, v=x.v / x.beta, beta=x.weight[..., None] * x.beta), rule_palimpsa_d,
    ),
    SpecialCase(
        "Palimpsa-M", "S^alpha prior^(1 - alpha), alpha = exp(-A dt)", "x_i / b_i = S_i.k + N(0, 1 / (dt b_i))", ASKED,
        "`rules.palimpsa`, w = dt x, beta = dt b, g = -A dt",
        lambda x: tempered(x, PALIMPSA, g=-x.rate * x.dt, v=x.v / x.beta, beta=x.dt[..., None] * x.beta),
        rule_palimpsa_m,
    ),
    SpecialCase(
        "Mamba2 (no evidence kept)", FORGET, ROWS, ASKED, "`rules.additive`, v -> beta v / prior",
        lambda x: tempered(x, fixed(x, "information")), rule_additive,
        "the limit beta -> 0 with the write w = beta v held; here for any beta.",
    ),
    SpecialCase(
        "Mesa", STILL, SHARED, ASKED, "`rules.mesa`, g = 0",
        lambda x: tempered(x, g=0 * x.g, beta=x.weight, prior=x.ridge), lambda x: rule_mesa(x, 0 * x.g),
    ),
    SpecialCase(
        "MesaNet", FORGET, SHARED, ASKED, "`rules.mesa`, ridge = prior of each key",
        lambda x: tempered(x, beta=x.weight, prior=x.ridge), lambda x: rule_mesa(x, x.g),
    ),
    SpecialCase(
        "DeltaNet", STILL, SHARED, ASKED, f"`rules.delta`, g = 0, {BETA}",
        lambda x: tempered(x, fixed(x, "mean"), g=0 * x.g, beta=x.weight), lambda x: rule_delta(x, 0 * x.g),
    ),
    SpecialCase(
        "Gated DeltaNet", FORGET, SHARED, ASKED, f"`rules.delta`, g per head, {BETA}",
        lambda x: tempered(x, fixed(x, "mean"), beta=x.weight), lambda x: rule_delta(x, x.g),
        "the decay meets the memory before the residual is formed, as in Gated DeltaNet itself.",
    ),
    SpecialCase(
        "Gated DeltaNet, undecayed residual", "(alpha of the token before) S + N(0, l2)", SHARED, "S (alpha q)",
        "S <- alpha S + beta' k (v - S k), beta' = alpha beta / (prior + beta k.k)", decay_last, undecayed_residual,
        "observed first, decayed afterwards, so beta' k.k < alpha. The final memory compared is that before its decay.",
    ),
    SpecialCase(
        "Longhorn, its implicit step", STILL, ROWS, ASKED, "`rules.longhorn`, beta -> beta / prior",
        lambda x: tempered(x, fixed(x, "mean"), g=0 * x.g), lambda x: rule_longhorn(x, False),
    ),
    SpecialCase(
        "Longhorn, as it runs", STILL, ROWS, ASKED, "`rules.longhorn`, beta -> beta / prior, approximate=True",
        lambda x: tempered(x, both(ELEMENTWISE, fixed(x, "mean")), g=0 * x.g), lambda x: rule_longhorn(x, True),
    ),
]  # fmt: skip
