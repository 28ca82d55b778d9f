"""The other design model of Table 1 of arXiv 2605.31163 (Sec. 3.2, App. A): what is observed is the write itself.

A token adds ``k phi^T`` to the memory and observes phi, not the memory. A column of the model is (S_i, phi_i): the
transition forgets the old phi and draws a new one, noise ``lambda (k, 1) (k, 1)^T``; the token sees the last element.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import additive
from ..design import EXACT, drift, init_state, regression
from .case import Answer, Inputs, SpecialCase, scaled

WRITE, ASKED = "S gains k phi^T, phi ~ N(0, lambda); v = phi", "S^T q"


def latent(x: Inputs, g: Tensor, v: Tensor, variance: Tensor, noise: Tensor):
    batch, _, heads, size = x.k.shape
    entered = torch.cat([x.k, torch.ones_like(x.k[..., :1])], -1)
    added = variance[..., None, None] * entered[..., :, None] * entered[..., None, :]
    move = drift(pad(scaled(g, x.k), (0, 1, 0, 1)), added)
    last = pad(torch.zeros_like(x.k), (0, 1), value=1.0)
    nothing = init_state(batch, heads, v.shape[-1], size + 1, prior_variance=x.k.new_zeros(()))
    return regression(move, pad(x.q, (0, 1)), last, v, noise), nothing, EXACT


def seen_exactly(x: Inputs, g: Tensor, v: Tensor):
    return latent(x, g, v, x.variance, 0 * x.noise)


def rule(x: Inputs, g: Tensor, v: Tensor) -> Answer:
    y, _, state = additive.scan(x.q, x.k, v, g)
    return Answer(y, state.mean)


def uncertain(x: Inputs) -> Answer:
    """The rule on omega v, and the posterior covariance that its mean never needs."""
    omega = x.variance / (x.variance + x.noise)
    answer, covariance, spread = rule(x, x.g, omega[..., None] * x.v), torch.zeros_like(scaled(x.g, x.k)[:, 0]), []
    for t in range(x.k.shape[1]):
        rest = (omega * x.noise)[:, t, :, None, None] * x.k[:, t, :, :, None] * x.k[:, t, :, None, :]
        covariance = x.g[:, t, :, None, None].exp().square() * covariance + rest
        spread.append((x.q[:, t, :, None, :] @ covariance @ x.q[:, t, :, :, None])[..., 0])
    same = [1, 1, x.v.shape[-1], 1, 1]
    return answer._replace(
        variance=torch.stack(spread, 1).expand_as(x.v), covariance=covariance[:, :, None].repeat(same)
    )


def constant(x: Inputs) -> Tensor:
    return -x.rate.expand_as(x.g)


CASES = [
    SpecialCase(
        "Linear attention", "S", WRITE, ASKED, "`rules.additive`, g = 0",
        lambda x: seen_exactly(x, 0 * x.g, x.v), lambda x: rule(x, 0 * x.g, x.v),
    ),
    SpecialCase(
        "RetNet", "alpha S, alpha constant", WRITE, ASKED, "`rules.additive`, a constant g per head",
        lambda x: seen_exactly(x, constant(x), x.v), lambda x: rule(x, constant(x), x.v),
    ),
    SpecialCase(
        "GLA", "diag(alpha) S", WRITE, ASKED, "`rules.additive`, g per key",
        lambda x: seen_exactly(x, x.g_key, x.v), lambda x: rule(x, x.g_key, x.v),
    ),
    SpecialCase(
        "Mamba2", "exp(-A dt) S", "S gains k phi^T, phi ~ N(0, lambda); dt x = phi", ASKED,
        "`rules.additive`, g = -A dt, v = dt x",
        lambda x: seen_exactly(x, -x.rate * x.dt, x.dt[..., None] * x.v),
        lambda x: rule(x, -x.rate * x.dt, x.dt[..., None] * x.v),
        "a write weighs omega = lambda / (lambda + r2) <= 1, and dt may be larger: so dt scales what is observed.",
    ),
    SpecialCase(
        "Additive, with noise", "alpha S", f"{WRITE} + N(0, r2)", ASKED,
        "`rules.additive` on omega v, omega = lambda / (lambda + r2)",
        lambda x: latent(x, x.g, x.v, x.variance, x.noise), uncertain,
        "the variances compared are those of C = A C A^T + omega r2 k k^T, which the rule does not keep: the mean "
        "does not need it. It is 0 in the other additive rows, where r2 = 0.",
    ),
]  # fmt: skip
