r"""Study: what Palimpsa loses as keys grow correlated.

Four rules read the same tokens ``(k_t, v_t)`` with the same evidence ``beta = 1 / noise^2`` and prior 1:

* *exact*: a full Gaussian per value row (:mod:`metaplastic.rules.gaussian`);
* *mean_field*: the best diagonal belief after every token, whose mean solves the coupled system;
* *palimpsa*: the same precision, off-diagonals dropped after solving, so that its mean does not see them;
* *additive*: the limit without evidence, the sum of ``beta v k^T`` over the prior.

Keys lie on the unit sphere of K dimensions. *shared*: ``sqrt(rho) c + sqrt(1 - rho) z_t`` with one direction c for all
(cosine of any two about rho); *neighbouring*: ``k_t = rho k_{t-1} + sqrt(1 - rho^2) z_t`` (first-order autoregressive);
*repeated*: independent keys, each seen ``repeats`` times in random order; *activated*: ``SiLU(scale z_t)``, the step
before the published layer's normalisation, which leaves a shared direction because little of it is negative.

Values: *map*, ``v = S k + noise`` with S standard normal, for which the exact rule is the right model; *random*,
independent of the key, as in associative recall (a repeated key repeats its value). Load: distinct keys per key
dimension. Forgetting: none, or N half of the tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import results
from ..rules import additive, gaussian, mean_field, palimpsa
from . import study_pages
from .beliefs import Belief, divergence, from_information, over_draws, relative_distance

F64 = torch.float64
RULES = ("exact", "mean_field", "palimpsa", "additive")
KEYS = ("shared", "neighbouring", "repeated", "activated")
VALUES = ("map", "random")
SEED = 0
Track = Callable[[Sequence[Any]], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class CorrelationStudy:
    correlations: tuple[float, ...] = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99)
    repeats: tuple[int, ...] = (1, 2, 4, 8, 16)
    scales: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)  # of what goes through SiLU
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    draws: int = 32  # of keys, values and noise, all at once: the S of every shape
    key_size: int = 16
    value_size: int = 16
    noise: float = 0.5
    load: float = 1.0  # at which these are tried:
    other_noises: tuple[float, ...] = (2.0,)
    forgetting: tuple[float, ...] = (0.5,)  # N over the number of tokens

    def degrees(self) -> list[tuple[str, float]]:
        """Every kind of key at every degree of correlation."""
        of = {"repeated": self.repeats, "activated": self.scales}
        return [(kind, degree) for kind in KEYS for degree in of.get(kind, self.correlations)]

    @staticmethod
    def quick() -> "CorrelationStudy":
        """Shows that it runs; too few draws to read anything from."""
        return CorrelationStudy(
            correlations=(0.0, 0.9), repeats=(1, 4), scales=(1.0,), loads=(1.0,), draws=3, key_size=4, value_size=4
        )  # fmt: skip


def draw_keys(kind: str, degree: float, study: CorrelationStudy, load: float, generator: torch.Generator):
    """Unit keys ``[S, T, K]`` and, for each token, the number of the distinct key it shows ``[S, T]``."""
    distinct = max(1, round(load * study.key_size))
    noise = torch.randn(study.draws, distinct, study.key_size, generator=generator, dtype=F64)
    order = torch.arange(distinct).expand(study.draws, distinct)
    if kind == "shared":
        common = torch.randn(study.draws, 1, study.key_size, generator=generator, dtype=F64)
        keys = degree**0.5 * common + (1 - degree) ** 0.5 * noise
    elif kind == "neighbouring":
        chain = [noise[:, 0]]
        for t in range(1, distinct):
            chain.append(degree * chain[-1] + (1 - degree**2) ** 0.5 * noise[:, t])
        keys = torch.stack(chain, 1)
    elif kind == "repeated":
        shuffled = torch.rand(study.draws, distinct * round(degree), generator=generator).argsort(1)
        order = shuffled % distinct
        keys = noise
    elif kind == "activated":
        keys = torch.nn.functional.silu(degree * noise)
    else:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KEYS)}")
    keys = keys / keys.norm(dim=-1, keepdim=True)
    return keys.gather(1, order[..., None].expand(-1, -1, study.key_size)), order


def draw_values(kind: str, keys: Tensor, order: Tensor, study: CorrelationStudy, generator: torch.Generator):
    """Values ``[S, T, V]`` and, for *map*, the map ``[S, V, K]`` behind them."""
    if kind == "random":
        shape = (study.draws, int(order.max()) + 1, study.value_size)
        pool = torch.randn(shape, generator=generator, dtype=F64)
        return pool.gather(1, order[..., None].expand(-1, -1, study.value_size)), None
    truth = torch.randn(study.draws, study.value_size, study.key_size, generator=generator, dtype=F64)
    noise = torch.randn(*keys.shape[:2], study.value_size, generator=generator, dtype=F64)
    return keys @ truth.mT + study.noise * noise, truth


def remember(keys: Tensor, values: Tensor, beta: float, window: float = math.inf) -> dict[str, Belief]:
    """Each rule over the tokens, forgetting at N = window; beliefs ``[S, V, ...]`` with prior 1."""
    value_size, key_size = values.shape[-1], keys.shape[-1]
    g = torch.full((len(keys),), -1 / window, dtype=F64).log1p()[:, None]
    strength, prior = torch.full((len(keys), 1, value_size), beta, dtype=F64), torch.ones(1, dtype=F64)
    sizes = (len(keys), 1, value_size, key_size)
    exact, field = gaussian.init_state(*sizes, dtype=F64), mean_field.init_state(*sizes, dtype=F64)
    kept, summed = palimpsa.init_state(*sizes, dtype=F64), additive.init_state(*sizes, dtype=F64)
    for t in range(keys.shape[1]):
        k, w = keys[:, t, None], beta * values[:, t, None]
        exact = gaussian.step(exact, k, w, strength, g)
        field = mean_field.step(field, k, w, strength, g, prior)
        kept = palimpsa.step(kept, k, w, strength, g)
        summed = additive.step(summed, k, w, g)
    importance = kept.excess_precision + 1
    beliefs = {
        "exact": from_information(exact.information, gaussian.precision(exact, prior)),
        "mean_field": Belief(field.mean, (field.excess_precision + 1).diag_embed()),
        "palimpsa": Belief(kept.information / importance, importance.diag_embed()),
        "additive": Belief(summed.mean, torch.ones_like(importance).diag_embed()),
    }
    return {name: Belief(belief.mean[:, 0], belief.precision[:, 0]) for name, belief in beliefs.items()}


def measure(belief: Belief, exact: Belief, keys: Tensor, values: Tensor, order: Tensor) -> dict[str, Tensor]:
    """Per draw: recall of every stored token, and the distance from the exact belief."""
    read = keys @ belief.mean.mT
    size, product = values.square().sum((-2, -1)), (read * values).sum((-2, -1))
    nearest = (read @ torch.nn.functional.normalize(values, dim=-1).mT).argmax(-1)  # of all stored values, by angle
    return {
        "recall_error": (read - values).square().sum((-2, -1)) / size,
        # With the one factor on all answers that suits them best.
        "recall_error_rescaled": 1 - product.square() / (read.square().sum((-2, -1)) * size),
        "recall_cosine": torch.nn.functional.cosine_similarity(read, values, dim=-1).mean(-1),
        "retrieved": (order.gather(1, nearest) == order).to(F64).mean(-1),
        "mean_distance": relative_distance(belief.mean, exact.mean),
        "divergence": divergence(belief, exact).mean(-1),
        # What would be left of it with the exact mean.
        "divergence_of_spread": divergence(Belief(exact.mean, belief.precision), exact).mean(-1),
    }


def calibrate(belief: Belief, truth: Tensor, queries: Tensor) -> Tensor:
    """Squared error of the read-out over the variance that the belief claims for it, per draw; 1 is calibrated."""
    missed = torch.einsum("svk,sqk->svq", belief.mean - truth, queries).square()
    claimed = torch.einsum("sqk,svkl,sql->svq", queries, belief.covariance, queries)
    return missed.mean((-2, -1)) / claimed.mean((-2, -1))


def run_case(study: CorrelationStudy, kind: str, degree: float, load: float, forgetting: float) -> list[dict[str, Any]]:
    """Both kinds of values on the same keys: a row for each and for each rule."""
    generator = torch.Generator().manual_seed(SEED)  # the same noise behind keys of every degree
    keys, order = draw_keys(kind, degree, study, load, generator)
    fresh = torch.randn(study.draws, 64, study.key_size, generator=generator, dtype=F64)
    fresh = fresh / fresh.norm(dim=-1, keepdim=True)
    window = forgetting * keys.shape[1]
    where: dict[str, Any] = {"keys": kind, "degree": degree, "load": load, "noise": study.noise}
    where["N"] = window if window < math.inf else None
    first = keys.shape[1] // 2
    where["key_cosine"] = float(f"{(keys[:, :first] @ keys[:, first:].mT).mean().item():.4g}")
    rows = []
    for values_kind in VALUES:
        values, truth = draw_values(values_kind, keys, order, study, generator)
        beliefs = remember(keys, values, study.noise**-2, window)
        for rule, belief in beliefs.items():
            measured = measure(belief, beliefs["exact"], keys, values, order)
            if truth is not None:
                measured["calibration_stored"] = calibrate(belief, truth, keys)
                measured["calibration_fresh"] = calibrate(belief, truth, fresh)
            rows.append(where | {"values": values_kind, "rule": rule} | over_draws(measured))
    return rows


def overshoot(repeats: int, beta: float, key_size: int) -> tuple[float, float]:
    """Palimpsa's and the exact answer, as shares of the value, for one flat unit key seen ``repeats`` times (prior 1).

    Every element alone explains the value: ``r beta / (1 + r beta / K)`` against ``r beta / (1 + r beta)``, so K times
    too much once the evidence is strong.
    """
    evidence = repeats * beta
    return evidence / (1 + evidence / key_size), evidence / (1 + evidence)


def run_correlation(study: CorrelationStudy, output: str | Path, *, track: Track = iter) -> tuple[dict[str, Any], Path]:
    """The whole study into ``output``: results.json, plots and a page. ``track`` shows progress over the cases."""
    degrees = study.degrees()
    cases = [(study, kind, d, load, math.inf) for kind, d in degrees for load in study.loads]
    for noise in study.other_noises:
        other = dataclasses.replace(study, noise=noise)
        cases += [(other, kind, d, study.load, math.inf) for kind, d in degrees]
    cases += [(study, kind, d, study.load, share) for kind, d in degrees for share in study.forgetting]
    rows = [row for case in track(cases) for row in run_case(*case)]
    overshoots = [
        {"repeats": r, "beta": n**-2, "palimpsa": share[0], "exact": share[1]}
        for n in (study.noise, *study.other_noises)
        for r in study.repeats
        for share in [overshoot(r, n**-2, study.key_size)]
    ]
    measurements = {
        "summary": summary(study, rows), "cases": study_pages.table(rows), "overshoot": study_pages.table(overshoots),
    }  # fmt: skip
    quick = study == CorrelationStudy.quick()
    settings, name = dataclasses.asdict(study) | {"quick": quick}, study_pages.study_name("correlation", quick)
    result = results.record(name, measurements, seeds=[SEED], settings=settings)
    results.write_json(Path(output) / "results.json", result)
    return result, study_pages.correlation_page(result, Path(output))


def summary(study: CorrelationStudy, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The few numbers to remember: shared keys of the least and the most correlation, no forgetting."""
    told = {}
    for degree in (min(study.correlations), max(study.correlations)):
        where = {"keys": "shared", "degree": degree, "load": study.load, "noise": study.noise, "N": None}
        for rule in RULES:
            for values, name in (("random", "retrieved"), ("map", "calibration_stored")):
                (row,) = (r for r in rows if r.items() >= (where | {"rule": rule, "values": values}).items())
                told[f"rho {degree:g}, {name.replace('_', ' ')}: {rule}"] = row[name]
    return told
