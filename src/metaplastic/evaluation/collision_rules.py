"""Every rule of the collision study with its settings: token by token, and in closed form where there is one."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rules import additive, bayesian, delta, gaussian, longhorn, mean_field, mesa, palimpsa
from . import collision_forms as forms

F64 = torch.float64


@dataclasses.dataclass(frozen=True)
class Settings:
    prior_variance: float = 3.0
    process_noise: float = 0.05
    observation_noise: float = 0.05
    gain: float = 0.5  # of a reset, of Longhorn on unit keys, of the additive rule's writes
    window: int = 64  # N of the rules that forget
    ranks: tuple[int, ...] = (0, 1, 2, 4, 6)
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16)

    @property
    def beta(self) -> float:
        return 1 / self.observation_noise

    @property
    def alpha(self) -> float:
        return 1 - 1 / self.window


class Memory(NamedTuple):
    """A rule with its settings. It has one head, whose state answers any number of questions."""

    start: Callable[[int, int, int, int], Any]  # batch, heads, value size, key size
    step: Callable[[Any, Tensor, Tensor], Any]  # state, k [S, 1, K], v [S, 1, V]
    answer: Callable[[Any, Tensor], Tensor]  # state, q [S, I, K] -> [S, I, V]


def blocks(covariance: Tensor, size: int) -> Tensor:
    """Forgets the correlations between blocks of key elements."""
    place = torch.arange(covariance.shape[-1]) // size
    return covariance * (place[:, None] == place)


def filter_memory(settings: Settings, project: Callable[[Tensor], Tensor] | None = None) -> Memory:
    def step(state: bayesian.GaussianState, k: Tensor, v: Tensor) -> bayesian.GaussianState:
        zero = torch.zeros_like(k[..., 0])
        state = bayesian.step(state, k, v, zero, zero + settings.process_noise, zero + settings.observation_noise)
        return state if project is None else bayesian.GaussianState(state.mean, project(state.covariance))

    prior = torch.full((1,), settings.prior_variance, dtype=F64)
    return Memory(partial(bayesian.init_state, prior_variance=prior), step, lambda s, q: bayesian.readout(s, q)[0])


def memories(settings: Settings) -> dict[str, Memory]:
    """Every rule, named as in the results."""
    prior = torch.full((1,), 1 / settings.prior_variance, dtype=F64)
    never, fade = 0.0, math.log(settings.alpha)

    def gate(k: Tensor, g: float) -> Tensor:
        return torch.full_like(k[..., 0], g)

    def precise(rule: Any, g: float, *more: Tensor) -> Memory:
        """Palimpsa, mean-field and their exact model: natural parameters, a beta per row."""

        def step(state: Any, k: Tensor, v: Tensor) -> Any:
            return rule.step(state, k, settings.beta * v, torch.full_like(v, settings.beta), gate(k, g), *more)

        def answer(state: Any, q: Tensor) -> Tensor:  # the exact model takes one question at a time
            return torch.cat([rule.readout(state, each[:, None], prior)[0] for each in q.unbind(1)], 1)

        return Memory(partial(rule.init_state, dtype=F64), step, answer)

    def solved(g: float) -> Memory:
        return Memory(
            partial(mesa.init_state, dtype=F64),
            lambda s, k, v: mesa.step(s, k, v, gate(k, settings.beta), gate(k, g)),
            lambda s, q: mesa.readout(s, q, prior)[0],
        )

    def reset(decay: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(
            partial(delta.init_state, dtype=F64),
            lambda s, k, v: delta.step(s, k, v, gate(k, settings.gain), decay(k)),
            lambda s, q: delta.readout(s, q)[0],
        )

    def per_key(k: Tensor) -> Tensor:
        windows = settings.window * torch.logspace(-1, 1, k.shape[-1], base=4, dtype=F64)
        return (-1 / windows).log1p().expand_as(k)

    def online(approximate: bool) -> Memory:
        strength = settings.gain / (1 - settings.gain)  # the step size of a unit key is then the gain
        return Memory(
            partial(longhorn.init_state, dtype=F64),
            lambda s, k, v: longhorn.step(s, k, v, torch.full_like(v, strength), approximate=approximate),
            lambda s, q: longhorn.readout(s, q)[0],
        )

    def summed(g: float) -> Memory:
        return Memory(
            partial(additive.init_state, dtype=F64),
            lambda s, k, v: additive.step(s, k, settings.gain * v, gate(k, g)),
            lambda s, q: additive.readout(s, q)[0],
        )

    return {
        "dense": filter_memory(settings),
        **{f"rank_{r}": filter_memory(settings, partial(bayesian.low_rank, rank=r)) for r in settings.ranks},
        **{f"block_{b}": filter_memory(settings, partial(blocks, size=b)) for b in settings.blocks},
        "diagonal": filter_memory(settings, bayesian.diagonal),
        "mesa": solved(never),
        "mesa_forgetting": solved(fade),
        "gaussian": precise(gaussian, never),
        "gaussian_forgetting": precise(gaussian, fade),
        "mean_field": precise(mean_field, never, prior),
        "mean_field_forgetting": precise(mean_field, fade, prior),
        "palimpsa": precise(palimpsa, never),
        "palimpsa_forgetting": precise(palimpsa, fade),
        "reset": reset(lambda k: gate(k, never)),
        "gated": reset(lambda k: gate(k, fade)),
        "kda": reset(per_key),
        "longhorn": online(False),
        "longhorn_elementwise": online(True),
        "additive": summed(never),
        "additive_forgetting": summed(fade),
    }


def follow(memory: Memory, keys: Tensor, values: Tensor, order: Sequence[int], at: Iterable[int]) -> Tensor:
    """Writes ``keys [S, I, K]`` with ``values [I, V]`` in this order; ``[len(at), S, I, V]``: all answers after ``at``.

    A number beyond the keys writes the value of that number with A's key: a changed value of A.
    """
    state, wanted, answers = memory.start(len(keys), 1, values.shape[-1], keys.shape[-1]), set(at), []
    for t, i in enumerate(order, 1):
        k = keys[:, i if i < keys.shape[1] else 0, None]
        state = memory.step(state, k, values[i].expand(len(keys), 1, -1))
        if t in wanted:
            answers.append(memory.answer(state, keys))
    return torch.stack(answers)


def closed_form(rule: str, settings: Settings, keys: Tensor, runs: forms.Runs) -> Tensor | None:
    """The answers after a schedule (identity, writes), without simulation; None where there is no closed form."""
    name = rule.removesuffix("_forgetting")
    alpha = settings.alpha if name != rule or rule == "gated" else 1.0
    gram, n = keys @ keys.mT, forms.counts(runs, keys.shape[-2], alpha)
    if name == "dense":
        noises = settings.prior_variance, settings.process_noise, settings.observation_noise
        return forms.bayesian(gram, runs, *noises)[0]
    if name in ("mesa", "gaussian"):
        return forms.mesa(gram, n, settings.beta, 1 / settings.prior_variance)
    if name == "palimpsa":
        return forms.palimpsa(keys, n, settings.beta, 1 / settings.prior_variance)
    if name in ("reset", "gated", "longhorn"):
        return forms.delta(gram, runs, settings.gain, alpha)
    if name == "longhorn_elementwise":
        return forms.elementwise_longhorn(keys, runs, settings.gain)
    if name == "additive":
        return forms.additive(gram, n, settings.gain)
    return None
