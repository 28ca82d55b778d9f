"""What a special case is: a design model and an approximation on one side, a rule of this package on the other."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..design import Approximation, Belief, DesignModel, init_state, scan


class Inputs(NamedTuple):
    """Everything that any case reads; every tensor varies along all of its axes."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor  # [B, T, H], log decay
    g_key: Tensor  # [B, T, H, K], log decay of each key
    dt: Tensor  # [B, T, H], > 0
    rate: Tensor  # [H], > 0
    angle: Tensor  # [B, T, H, K / 2]
    process: Tensor  # l^2 [B, T, H]
    process_key: Tensor  # l^2 of each key [B, T, H, K]
    noise: Tensor  # r^2 [B, T, H]
    group_noise: Tensor  # r^2 of each group of columns [B, T, H, G]
    variance: Tensor  # lambda [B, T, H]
    weight: Tensor  # one beta for all columns [B, T, H]
    beta: Tensor  # a beta for each column [B, T, H, V]
    prior: Tensor  # precision [H]
    group_prior: Tensor  # precision for each group of columns [H, G]
    ridge: Tensor  # precision of each key [H, K]


def draw(seed: int = 0, *, batch=2, length=7, heads=2, keys=4, values=6, groups=2) -> Inputs:
    """Float64 inputs: normal vectors, positive numbers between 0.3 and 1.3."""
    generator = torch.Generator().manual_seed(seed)
    token = (batch, length, heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def positive(*shape):
        return 0.3 + torch.rand(*shape, generator=generator, dtype=torch.float64)

    return Inputs(
        q=normal(*token, keys),
        k=normal(*token, keys) * keys**-0.5,
        v=normal(*token, values),
        g=-0.5 * positive(*token),
        g_key=-0.5 * positive(*token, keys),
        dt=positive(*token),
        rate=positive(heads),
        angle=normal(*token, keys // 2),
        process=positive(*token),
        process_key=positive(*token, keys),
        noise=positive(*token),
        group_noise=positive(*token, groups),
        variance=positive(*token),
        weight=positive(*token),
        beta=positive(*token, values),
        prior=positive(heads),
        group_prior=positive(heads, groups),
        ridge=positive(heads, keys),
    )


class Answer(NamedTuple):
    """What is compared; None where the rule does not say (or says something else, see the case's note)."""

    output: Tensor  # [B, T, H, V]
    mean: Tensor  # final memory [B, H, V, K]
    variance: Tensor | None = None  # of the output [B, T, H, V]
    covariance: Tensor | None = None  # of the final memory [B, H, V, K, K]


class SpecialCase(NamedTuple):
    """One row of a table, and the test of it."""

    name: str
    transition: str
    write: str
    read_out: str
    equals: str  # the rule and its arguments, in words
    model: Callable[[Inputs], tuple[DesignModel, Belief, Approximation]]
    expected: Callable[[Inputs], Answer]
    note: str = ""

    def filtered(self, inputs: Inputs, approximation: Approximation | None = None) -> Answer:
        """The filter's answer, with the case's approximation or another; latent elements beyond the keys left out."""
        model, start, own = self.model(inputs)
        output, variance, state = scan(model, start, approximation or own)
        size = inputs.k.shape[-1]
        return Answer(output, state.mean[..., :size], variance, state.covariance[..., :size, :size])


def start(inputs: Inputs, prior: Tensor) -> Belief:
    """Mean 0 and the precisions ``prior``, broadcastable to [H, V, K]."""
    batch, _, heads, size = inputs.k.shape
    return init_state(batch, heads, inputs.v.shape[-1], size, prior_variance=1 / prior)


def scaled(g: Tensor, like: Tensor) -> Tensor:
    """``diag(exp(g)) [..., K, K]`` of a log decay per head, or per key."""
    return torch.diag_embed((g if g.dim() == like.dim() else g[..., None]).exp().expand_as(like))
