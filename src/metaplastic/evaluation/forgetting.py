r"""Study: how far is geometric forgetting from the sliding window it stands for?

The paper wants the posterior of the last N tokens. Removing the oldest token exactly needs that token, so it keeps the
fraction ``alpha = 1 - 1/N`` of all evidence instead (Appendix A.2). Here both are computed in a linear regression: keys
on the unit sphere of K dimensions, values ``v = S k + noise``, ``beta = 1 / noise^2``, elements of S standard normal as
the prior has it.

Worlds: *stationary*; *switch* (S drawn anew at one token); *drift* (every element a random walk pulled back to unit
variance, ``drift_time`` tokens of memory). Gates: *fixed* N; *step* (N, and N/4 for N tokens out of 2N, closing exactly
at the switch); *random* (``N_t = N exp(u.k_t sqrt(K))`` for a hidden unit direction u: input-dependent, in [N/4, 4N]).

What "the last N_t tokens" means once N_t changes:

* *asked*: the last round(N_t) tokens, dropped ones brought back when the gate opens (no recursion can);
* *kept*: ``L_t = min(L_{t-1} + 1, round(N_t))`` tokens, what a buffer that truly removes old tokens would hold;
* *counted*: round(n_t) tokens, where ``n_t = 1 + alpha_t n_{t-1}`` is the evidence that the recursion really holds.

With a fixed gate the three agree. Beliefs compared with them, all from the recursion of
:mod:`metaplastic.rules.gaussian`:

* *geometric*: the paper's alpha, full Gaussian; *palimpsa*: its diagonal;
* *matched*: ``alpha = (N - 1) / (N + 1)``, that is N' = (N + 1) / 2 in place of N: geometric weights have the effective
  sample size 2N' - 1, so this has the window's (and its mean age), but only N' tokens' worth of evidence;
* *rescaled*: the same with beta times N / N', so that evidence and sample size both match.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import results
from ..rules import gaussian
from . import study_pages
from .beliefs import Belief, diagonal, divergence, from_information, over_draws, relative_distance, weighted_posterior

F64 = torch.float64
WORLDS = ("stationary", "switch", "drift")
GATES = ("fixed", "step", "random")
WINDOWS = ("asked", "kept", "counted")
BELIEFS = ("geometric", "palimpsa", "matched", "rescaled")
EVIDENCE = ("as is", "rescaled")
Heads = Callable[[Tensor, Tensor], dict[Any, tuple[Tensor, Tensor]]]  # (N_t, beta_t) -> those of every recursion
Track = Callable[[Sequence[Any]], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class ForgettingStudy:
    windows: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    varying: tuple[int, ...] = (4, 16, 64, 256)  # those that the step and random gates run at
    draws: int = 32  # of world, keys and noise, all at once: the S of every shape
    key_size: int = 16
    value_size: int = 4
    noise: float = 0.5
    prior: float = 1.0
    drift_time: float = 256.0
    burn_in: int = 6  # windows before anything is measured
    measured: int = 24  # times per case
    course: int = 64  # the window of the time course around the switch and of the table of other settings
    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0)  # N' over N, in search of the closest
    noises: tuple[float, ...] = (0.1, 0.5, 2.0)
    key_sizes: tuple[int, ...] = (4, 16, 64)

    @staticmethod
    def quick() -> "ForgettingStudy":
        """Shows that it runs; too few draws to read anything from."""
        return ForgettingStudy(
            windows=(4, 16), varying=(4,), draws=3, key_size=4, measured=6, course=16, ratios=(0.5, 1.0),
            noises=(0.5,), key_sizes=(4, 8),
        )  # fmt: skip


def memory(kind: str, window: int, keys: Tensor, start: int, generator: torch.Generator) -> Tensor:
    """``N_t [S, T]`` of a gate; the step gate closes at ``start``."""
    batch, length, key_size = keys.shape
    if kind == "fixed":
        return torch.full((batch, length), float(window), dtype=F64)
    if kind == "step":
        closed = torch.arange(length).sub(start).remainder(2 * window) < window
        return torch.where(closed, max(1.0, window / 4), float(window)).to(F64).expand(batch, length)
    if kind == "random":
        direction = torch.randn(batch, key_size, 1, generator=generator, dtype=F64)
        score = (keys @ (direction / direction.norm(dim=1, keepdim=True))).squeeze(-1) * key_size**0.5
        return (window * score.exp()).clamp(max(1.0, window / 4), 4.0 * window)
    raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(GATES)}")


def lengths(size: Tensor) -> dict[str, Tensor]:
    """How many tokens the exact window holds at each step, by each of its three meanings: ``[S, T]``, whole numbers."""
    asked = size.round().clamp(min=1)
    kept, counted = [asked.new_ones(len(asked))], [asked.new_ones(len(asked))]
    for t in range(1, size.shape[1]):
        kept.append(torch.minimum(kept[-1] + 1, asked[:, t]))
        counted.append(1 + (1 - 1 / size[:, t]) * counted[-1])
    seen = torch.arange(1, size.shape[1] + 1, dtype=size.dtype)
    return {
        "asked": torch.minimum(asked, seen), "kept": torch.stack(kept, 1), "counted": torch.stack(counted, 1).round(),
    }  # fmt: skip


def draw_world(kind: str, study: ForgettingStudy, length: int, start: int, generator: torch.Generator):
    """Keys ``[S, T, K]``, the true map at every token ``[S, T, V, K]`` and the values it gave ``[S, T, V]``."""
    shape = (study.draws, length, study.value_size, study.key_size)
    keys = torch.randn(study.draws, length, study.key_size, generator=generator, dtype=F64)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    noise = study.noise * torch.randn(shape[:3], generator=generator, dtype=F64)
    first, second = torch.randn(2, study.draws, *shape[2:], generator=generator, dtype=F64)
    if kind == "stationary":
        truth = first[:, None].expand(shape)
    elif kind == "switch":
        after = torch.arange(length)[:, None, None] >= start
        truth = torch.where(after, second[:, None], first[:, None])
    elif kind == "drift":
        keep = 1 - 1 / study.drift_time
        path = [first]
        for _ in range(length - 1):
            move = torch.randn(first.shape, generator=generator, dtype=F64)
            path.append(keep * path[-1] + (1 - keep**2) ** 0.5 * move)
        truth = torch.stack(path, 1)
    else:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(WORLDS)}")
    return keys, truth, torch.einsum("stvk,stk->stv", truth, keys) + noise


def recursions(memories: Sequence[Tensor], evidence: Sequence[Tensor], keys: Tensor, values: Tensor, times: set[int]):
    """Runs the exact rule, one head per (N_t, beta_t); yields its state ``[S, H, V, ...]`` at the times asked for."""
    g, beta = torch.log1p(-1 / torch.stack(list(memories), -1)), torch.stack(list(evidence), -1)
    heads, value_size = g.shape[-1], values.shape[-1]
    state = gaussian.init_state(len(keys), heads, value_size, keys.shape[-1], dtype=keys.dtype)
    for t in range(max(times) + 1):
        strength = beta[:, t, :, None].expand(-1, -1, value_size)
        key = keys[:, t, None].expand(-1, heads, -1)
        state = gaussian.step(state, key, strength * values[:, t, None], strength, g[:, t])
        if t in times:
            yield t, state


def quality(belief: Belief, truth: Tensor, queries: Tensor, noise: float) -> dict[str, Tensor]:
    """Against the true map, per draw: squared error per element; squared error and claimed variance of the read-out;
    log loss of a fresh observation above that of a model that knows the map (expectation over its noise, in nats)."""
    error = belief.mean - truth
    claimed = torch.einsum("sqk,svkl,sql->svq", queries, belief.covariance, queries)
    missed = torch.einsum("sqk,svk->svq", queries, error).square()
    ratio = 1 + claimed / noise**2
    loss = 0.5 * (ratio.log() + (missed / noise**2 + 1) / ratio - 1)
    each = {"missed": missed, "claimed": claimed, "excess_loss": loss}
    return {"error": error.square().mean((-2, -1))} | {name: value.mean((-2, -1)) for name, value in each.items()}


def distance(belief: Belief, exact: Belief, prior: float) -> dict[str, Tensor]:
    """Per draw: KL(belief || exact) of a row, distance of the means, log ratio of the precisions (per key dimension,
    geometric mean over directions), ratio of the evidence (trace of the precision above the prior)."""

    def evidence(b: Belief) -> Tensor:
        return b.precision.diagonal(dim1=-2, dim2=-1).sub(prior).sum((-2, -1))

    return {
        "divergence": divergence(belief, exact).mean(-1),
        "mean_distance": relative_distance(belief.mean, exact.mean),
        "log_precision": ((belief.log_determinant - exact.log_determinant) / belief.mean.shape[-1]).mean(-1),
        "evidence": evidence(belief) / evidence(exact),
    }


def simulate(study: ForgettingStudy, world: str, gate: str, window: int, heads: Heads, times: Sequence[int] = ()):
    """Yields, at the times asked for (tokens after the switch; none: over 2N), the beliefs of the heads, the exact
    windows, the true map and queries. Worlds and gates share keys, noise and first map: they differ in nothing else."""
    start = study.burn_in * window
    times = times or [int((i + 0.5) * 2 * window / study.measured) for i in range(study.measured)]
    wanted = {start + t for t in times}
    for_world, for_gate, for_queries = (torch.Generator().manual_seed(seed) for seed in _seeds(window))
    keys, truth, values = draw_world(world, study, max(wanted) + 1, start, for_world)
    size = memory(gate, window, keys, start, for_gate)
    beta = torch.full_like(size, study.noise**-2)
    queries = torch.randn(study.draws, 64, study.key_size, generator=for_queries, dtype=F64)
    queries = queries / queries.norm(dim=-1, keepdim=True)
    held = lengths(size)
    named = heads(size, beta)
    for t, state in recursions([n for n, _ in named.values()], [b for _, b in named.values()], keys, values, wanted):
        precision = gaussian.precision(state, torch.tensor(study.prior, dtype=F64))[:, :, :1]  # rows share theirs
        natural = {name: (state.information[:, h], precision[:, h]) for h, name in enumerate(named)}
        exact = {}
        for name, count in held.items():
            inside = (torch.arange(t + 1) > t - count[:, t, None]) * beta[:, : t + 1]
            exact[name] = weighted_posterior(keys[:, : t + 1], values[:, : t + 1], inside, study.prior)
        yield natural, exact, truth[:, t], queries, {name: count[:, t] for name, count in held.items()}


def _seeds(window: int) -> list[int]:
    """Of the world, the gate and the queries."""
    return [4 * window, 4 * window + 1, 4 * window + 2]


def standard(size: Tensor, beta: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """N and beta of the three recursions that the study compares (Palimpsa is read off the first)."""
    effective = (size + 1) / 2
    return {"geometric": (size, beta), "matched": (effective, beta), "rescaled": (effective, beta * size / effective)}


def run_case(study: ForgettingStudy, world: str, gate: str, window: int, times: Sequence[int] = ()):
    """Per measured time and draw: distances ``{(belief, window): {...}}``, qualities ``{belief: {...}}``, lengths."""
    distances, qualities, tokens = [], [], []
    # With a fixed gate the three windows are one.
    meanings = WINDOWS[:1] if gate == "fixed" else WINDOWS
    for natural, exact, truth, queries, held in simulate(study, world, gate, window, standard, times):
        beliefs = {name: from_information(*parameters) for name, parameters in natural.items()}
        beliefs["palimpsa"] = diagonal(*natural["geometric"])
        distances.append({(b, w): distance(beliefs[b], exact[w], study.prior) for b in BELIEFS for w in meanings})
        everyone = {b: beliefs[b] for b in BELIEFS} | {f"window_{w}": exact[w] for w in meanings}
        qualities.append({name: quality(belief, truth, queries, study.noise) for name, belief in everyone.items()})
        tokens.append({w: held[w] for w in meanings})
    return distances, qualities, tokens


def row(cases: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Mean over measured times, then over draws; calibration is squared error over claimed variance, of the means."""
    means = {name: torch.stack([case[name] for case in cases]).mean(0) for name in cases[0]}
    if "claimed" in means:
        means["calibration"] = means.pop("missed") / means.pop("claimed")
    return over_draws(means)


def summarise(study: ForgettingStudy, world: str, gate: str, window: int) -> dict[str, list[dict[str, Any]]]:
    """One case as rows of mean and spread over draws."""
    distances, qualities, tokens = run_case(study, world, gate, window)
    where = {"world": world, "gate": gate, "N": window}
    return {
        "distances": [where | {"belief": b, "window": w} | row([d[b, w] for d in distances]) for b, w in distances[0]],
        "qualities": [where | {"belief": b} | row([q[b] for q in qualities]) for b in qualities[0]],
        "tokens_held": [where | {"window": w} | row([{"tokens": t[w]} for t in tokens]) for w in tokens[0]],
    }


def time_course(study: ForgettingStudy, gate: str) -> dict[str, list[dict[str, Any]]]:
    """Around the switch, every N/16 tokens; ``new_tokens`` counts those of the new world, 0 or less before it."""
    meaning = "asked" if gate == "fixed" else "kept"
    times = list(range(-study.course // 4, 3 * study.course, max(1, study.course // 16)))
    distances, qualities, _ = run_case(study, "switch", gate, study.course, times)
    points = [
        {"gate": gate, "N": study.course, "new_tokens": t + 1, "belief": b, "window": meaning}
        | row([q[b]])
        | (row([{"divergence": d[b, meaning]["divergence"]}]) if (b, meaning) in d else {})
        for t, d, q in zip(times, distances, qualities, strict=True)
        for b in (*BELIEFS, f"window_{meaning}")
    ]
    return {"course": points}


def search_matching(study: ForgettingStudy, window: int) -> dict[str, list[dict[str, Any]]]:
    """Which N' = ratio N comes closest to a window of N, with the evidence as it is or rescaled to the window's?"""

    def heads(size: Tensor, beta: Tensor):
        sizes = {ratio: (ratio * size).clamp(min=1) for ratio in study.ratios}
        return {(r, e): (n, beta * (size / n if e == "rescaled" else 1)) for r, n in sizes.items() for e in EVIDENCE}

    found: dict[Any, list[Tensor]] = {}
    for natural, exact, *_ in simulate(study, "stationary", "fixed", window, heads):
        for name, parameters in natural.items():
            found.setdefault(name, []).append(divergence(from_information(*parameters), exact["asked"]).mean(-1))
    return {
        "matching": [
            {"N": window, "ratio": ratio, "evidence": evidence}
            | over_draws({"divergence_per_dimension": torch.stack(values).mean(0) / study.key_size})
            | {"many_tokens": asymptotic_divergence(ratio, evidence)}
            for (ratio, evidence), values in found.items()
        ]
    }


def asymptotic_divergence(ratio: float, evidence: str = "as is") -> float:
    """KL per key dimension of geometric forgetting (N' = ratio N) from a window of N >> K tokens, stationary world.

    Both precisions are then round, their evidence in the proportion e = ratio (or 1, rescaled): (1/e - 1 + log e) / 2.
    The means are weighted averages of the same noise, with weights a (geometric) and b (flat): half of
    ``N sum (a - b)^2 = 1 / (2 ratio) + 1 - 2 (1 - exp(-1 / ratio))``.
    """
    kept = 1.0 if evidence == "rescaled" else ratio
    means = 1 / (2 * ratio) + 1 - 2 * (1 - math.exp(-1 / ratio))
    return 0.5 * means + 0.5 * (1 / kept - 1 + math.log(kept))


def other_setting(study: ForgettingStudy) -> dict[str, list[dict[str, Any]]]:
    """The stationary world at another key size or noise: distances (per key dimension) and quality of the means."""
    case = summarise(study, "stationary", "fixed", study.course)
    distances = {r["belief"]: r["divergence"] / study.key_size for r in case["distances"]}
    where = {"key_size": study.key_size, "noise": study.noise, "N": study.course}
    return {
        "other_settings": [
            where
            | {"belief": r["belief"], "divergence_per_dimension": distances.get(r["belief"], 0.0)}  # 0: the window
            | {name: r[name] for name in ("error", "calibration")}
            for r in case["qualities"]
        ]
    }


def run_forgetting(study: ForgettingStudy, output: str | Path, *, track: Track = iter) -> tuple[dict[str, Any], Path]:
    """The whole study into ``output``: results.json, plots and a page. ``track`` shows progress over its parts."""
    others = [dataclasses.replace(study, noise=n, key_size=k) for k in study.key_sizes for n in study.noises]
    jobs = [partial(summarise, study, world, "fixed", n) for world in WORLDS for n in study.windows]
    jobs += [partial(summarise, study, world, gate, n) for world in WORLDS for gate in GATES[1:] for n in study.varying]
    jobs += [partial(search_matching, study, n) for n in study.varying]
    jobs += [partial(time_course, study, gate) for gate in GATES[:2]]
    jobs += [partial(other_setting, other) for other in others]
    found: dict[str, list[dict[str, Any]]] = {}
    for job in track(jobs):
        for name, rows in job().items():
            found.setdefault(name, []).extend(rows)
    measurements = {"summary": summary(study, found)} | {name: study_pages.table(rows) for name, rows in found.items()}
    windows = sorted({*study.windows, *study.varying, study.course})
    seeds = [seed for n in windows for seed in _seeds(n)]
    quick = study == ForgettingStudy.quick()
    settings, name = dataclasses.asdict(study) | {"quick": quick}, study_pages.study_name("forgetting", quick)
    result = results.record(name, measurements, seeds=seeds, settings=settings)
    results.write_json(Path(output) / "results.json", result)
    return result, study_pages.forgetting_page(result, Path(output))


def summary(study: ForgettingStudy, found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The few numbers to remember, all with a fixed gate."""
    longest = {"world": "stationary", "gate": "fixed", "N": max(study.windows)}
    told = {}
    for belief in ("geometric", "palimpsa"):
        (row,) = (r for r in found["distances"] if r.items() >= (longest | {"belief": belief}).items())
        told[f"KL from a window of {longest['N']}, stationary: {belief}"] = row["divergence"]
    for evidence in EVIDENCE:
        tried = [r for r in found["matching"] if r["N"] == max(study.varying) and r["evidence"] == evidence]
        closest = min(tried, key=lambda r: r["divergence_per_dimension"])
        told[f"closest N'/N for a window of {closest['N']}, evidence {evidence}"] = closest["ratio"]
    for belief in ("window_asked", *BELIEFS):
        case = {"world": "drift", "gate": "fixed", "belief": belief}
        drift = [r for r in found["qualities"] if r.items() >= case.items()]
        told[f"drift, least error over N: {belief}"] = min(r["error"] for r in drift)
    return told
