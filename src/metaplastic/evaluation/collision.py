r"""Study: two similar keys collide. Which memories keep the rarer one, and does that depend on the basis of the keys?

The deterministic collision of the Bayesian Layer's paper (arXiv 2605.31163, Sec. 2.5 and App. E). Six identities with
one-hot values: ``k_A = e_1``, ``k_B = rho e_1 + sqrt(1 - rho^2) e_2``, and four keys orthogonal to both and to one
another. Two rounds over all six, then B ``target`` times, then A ``frequent`` times. Asked for B, the answers to A and
B give ``p_AB = exp(y_B) / (exp(y_A) + exp(y_B))``: 1/2 is a tie, 0.731 a perfect answer. *Retrieved*: the right value
is the largest of all six.

Every rule reads the same tokens twice over: *aligned*, with the keys above, as in the paper, and *rotated*, all keys
turned by one of ``rotations`` random rotations, the same for all rules. That changes no inner product, only how many
elements of the memory a key touches; nothing places learnt keys on axes.

Evidence is the same for all: prior variance p, observation noise r^2, so ``beta = 1 / r^2`` and ``prior = 1 / p``. The
filter has process noise l^2. A reset writes with a fixed gain, as does linear attention. Rules that forget have the
window N (``alpha = 1 - 1/N``), KDA one for every key element, from N/4 to 4N.

Two harder checks. *Switch*: A gets a seventh value, either when its run begins or after it. *Crowd*: random keys and
values, several passes.
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
from ..rules import bayesian
from . import collision_forms as forms
from . import study_pages
from .beliefs import over_draws
from .collision_rules import F64, Settings, closed_form, follow, memories
from .drawing import readable

A, B, IDENTITIES = 0, 1, 6
SEED = 0
SHOWN = (  # in figures and sweeps; the others are variants of these
    "dense", "rank_1", "mesa", "diagonal", "mean_field", "palimpsa",
    "reset", "gated", "kda", "longhorn_elementwise", "additive",
)  # fmt: skip
UNTOLD = ("closed_p_AB_sd", "difference_sd", "retrieved_A_sd", "retrieved_B_sd", "retrieved_others_sd")
Rows = list[dict[str, Any]]
Track = Callable[[Sequence[Any]], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class CollisionStudy(Settings):
    overlaps: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.92, 0.95, 0.98, 0.99)
    repetitions: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of A
    targets: tuple[int, ...] = (4, 40)  # of B, at each of which A is repeated
    key_sizes: tuple[int, ...] = (8, 16, 32, 64)
    noises: tuple[float, ...] = (0.005, 0.05, 0.5, 5.0, 50.0)  # of observations: from strong to weak evidence
    loads: tuple[int, ...] = (16, 48, 64, 128)  # keys in the crowd
    drifts: tuple[float, ...] = (0.05, 0.005, 0.0005, 0.0001, 0.00001, 0.0)  # process noises of the filter, if changed
    rotations: int = 199
    overlap: float = 0.92
    key_size: int = 16
    target: int = 40  # writes of B
    frequent: int = 60  # writes of A, and of its changed value
    crowd_key_size: int = 64
    crowd_passes: int = 3
    crowd_draws: int = 8

    @staticmethod
    def quick() -> "CollisionStudy":
        """Shows that it runs; too few rotations to read anything from."""
        return CollisionStudy(
            overlaps=(0.0, 0.92), repetitions=(1, 8), targets=(2,), key_sizes=(8,), noises=(0.5,), loads=(6,),
            drifts=(0.0,), ranks=(1,), blocks=(4,), rotations=3, key_size=8, target=5, frequent=6, crowd_key_size=8,
            crowd_draws=2,
        )  # fmt: skip


def place_keys(overlap: float, key_size: int = 16) -> Tensor:
    """``[6, K]``, as in the paper."""
    keys = torch.eye(key_size, dtype=F64)[:IDENTITIES].clone()
    keys[B, A], keys[B, B] = overlap, math.sqrt(1 - overlap**2)
    return keys


def rotate(keys: Tensor, rotations: int, generator: torch.Generator) -> Tensor:
    """``[1 + rotations, I, K]``: as they are, then turned by uniformly random orthogonal matrices."""
    size = keys.shape[-1]
    turn, triangle = torch.linalg.qr(torch.randn(rotations, size, size, dtype=F64, generator=generator))
    turn = turn * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform only with this choice of signs
    return torch.cat([keys[None], keys @ turn])


def draw_keys(study: CollisionStudy, overlap: float | None = None, key_size: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)  # the same rotations for every rule and overlap
    keys = place_keys(study.overlap if overlap is None else overlap, key_size or study.key_size)
    return rotate(keys, study.rotations, generator)


def schedule(target: int = 40, frequent: int = 60) -> list[tuple[int, int]]:
    """Runs (identity, writes)."""
    return [(i, 1) for i in range(IDENTITIES)] * 2 + [(B, target), (A, frequent)]


def tokens(runs: forms.Runs) -> list[int]:
    return [identity for identity, writes in runs for _ in range(writes)]


def recall(answers: Tensor) -> dict[str, Tensor]:
    """From ``answers [..., 6, V]``, whose first six columns are the identities' values."""
    right = answers[..., :IDENTITIES].argmax(-1) == torch.arange(IDENTITIES)
    return {
        "p_AB": torch.sigmoid(answers[..., B, B] - answers[..., B, A]),
        "retrieved_A": right[..., A].to(F64),
        "retrieved_B": right[..., B].to(F64),
        "retrieved_others": right[..., 2:].to(F64).mean(-1),
    }


def by_keys(measured: dict[str, Tensor], **where: Any) -> Rows:
    """Rows for the aligned keys, draw 0, and over the rotated ones, all others; of differences the largest."""
    rows = []
    for keys, part in (("aligned", slice(0, 1)), ("rotated", slice(1, None))):
        row = over_draws({name: each[part] for name, each in measured.items()})
        if "difference" in measured:
            row["difference"] = float(f"{measured['difference'][part].max().item():.2g}")
        told = {name: each for name, each in row.items() if name not in UNTOLD}
        rows.append(where | {"keys": keys} | told)
    return rows


def collide(study: CollisionStudy, rule: str, keys: Tensor, target: int, numbers: Sequence[int], **where: Any) -> Rows:
    """Recall after each number of writes of A, simulated and, where it is known, in closed form."""
    start, most = len(tokens(schedule(target, 0))), max(numbers)
    at = [start + n for n in numbers]
    values = torch.eye(IDENTITIES, dtype=F64)
    simulated = follow(memories(study)[rule], keys, values, tokens(schedule(target, most)), at)
    rows = []
    for n, answers in zip(numbers, simulated, strict=True):
        measured = recall(answers)
        expected = closed_form(rule, study, keys, schedule(target, n))
        if expected is not None:
            measured["closed_p_AB"] = recall(expected)["p_AB"]
            measured["difference"] = (answers - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
        rows += by_keys(measured, rule=rule, target=target, frequent=n, **where)
    return rows


def course(study: CollisionStudy, rule: str) -> Rows:
    """p_AB after every token."""
    order = tokens(schedule(study.target, study.frequent))
    values, steps = torch.eye(IDENTITIES, dtype=F64), range(1, len(order) + 1)
    answers = follow(memories(study)[rule], draw_keys(study), values, order, steps)
    found = recall(answers)["p_AB"]
    return [row for t in steps for row in by_keys({"p_AB": found[t - 1]}, rule=rule, step=t)]


def final(study: CollisionStudy, rule: str) -> Rows:
    return collide(study, rule, draw_keys(study), study.target, [0, study.frequent])


def overlaps(study: CollisionStudy, rule: str) -> Rows:
    return [
        row
        for rho in study.overlaps
        for row in collide(study, rule, draw_keys(study, rho), study.target, [study.frequent], overlap=rho)
    ]


def repetitions(study: CollisionStudy, rule: str) -> Rows:
    keys = draw_keys(study)
    return [row for target in study.targets for row in collide(study, rule, keys, target, study.repetitions)]


def other_sizes(study: CollisionStudy, rule: str) -> Rows:
    """Key sizes, and how strong the evidence is."""
    rows = []
    for size in study.key_sizes:
        keys = draw_keys(study, key_size=size)
        rows += collide(study, rule, keys, study.target, [study.frequent], key_size=size, noise=study.observation_noise)
    for noise in study.noises:
        other = dataclasses.replace(study, observation_noise=noise)
        where = {"key_size": study.key_size, "noise": noise}
        rows += collide(other, rule, draw_keys(study), study.target, [study.frequent], **where)
    return rows


def switch(study: CollisionStudy, rule: str) -> Rows:
    """A's value changes, before or after its long run: distance of the answers from A's new value and from B's."""
    values, keys, rows = torch.eye(IDENTITIES + 1, dtype=F64), draw_keys(study), []
    for when, frequent in (("first", 0), ("late", study.frequent)):
        runs = schedule(study.target, frequent)
        start, order = len(tokens(runs)), tokens([*runs, (IDENTITIES, study.frequent)])
        steps = sorted({n for n in study.repetitions if n < study.frequent} | {study.frequent})
        answers = follow(memories(study)[rule], keys, values, order, [start + t for t in steps])
        wanted = values[[IDENTITIES, *range(1, IDENTITIES)]]
        missed = (answers - wanted).norm(dim=-1)
        for t, each in zip(steps, missed, strict=True):
            measured = {"error_A": each[:, A], "error_B": each[:, B], "error_others": each[:, 2:].mean(-1)}
            rows += by_keys(measured, rule=rule, when=when, step=t)
    return rows


def crowd(study: CollisionStudy, rule: str) -> Rows:
    """Random unit keys with random values: relative error of the answers, and the nearest stored value by angle."""
    rows = []
    for load in study.loads:
        generator = torch.Generator().manual_seed(SEED)
        keys = torch.randn(study.crowd_draws, load, study.crowd_key_size, dtype=F64, generator=generator)
        keys = keys / keys.norm(dim=-1, keepdim=True)
        values = torch.randn(load, study.crowd_key_size, dtype=F64, generator=generator)
        order = tokens([(i, 1) for i in range(load)] * study.crowd_passes)
        (answers,) = follow(memories(study)[rule], keys, values, order, [len(order)])
        nearest = (answers @ torch.nn.functional.normalize(values, dim=-1).mT).argmax(-1)
        measured = {
            "error": ((answers - values).square().sum((1, 2)) / values.square().sum()).sqrt(),
            "retrieved": (nearest == torch.arange(load)).to(F64).mean(-1),
        }
        rows.append({"rule": rule, "load": load} | over_draws(measured))
    return rows


def by_drift(part: Callable[[CollisionStudy, str], Rows], study: CollisionStudy, rule: str) -> Rows:
    """One of the two checks above with other process noises; without any, the dense filter is Mesa."""
    others = [dataclasses.replace(study, process_noise=noise) for noise in study.drifts]
    return [{"process_noise": other.process_noise} | row for other in others for row in part(other, rule)]


def published(study: CollisionStudy) -> Rows:
    """p_AB for the paper's keys to six digits, before and after the run of A, in closed form and simulated."""
    keys, rows = place_keys(study.overlap, study.key_size)[None], []
    for rule in ("dense", "reset", "additive"):
        for frequent in (0, study.frequent):
            runs = schedule(study.target, frequent)
            order, values = tokens(runs), torch.eye(IDENTITIES, dtype=F64)
            (simulated,) = follow(memories(study)[rule], keys, values, order, [len(order)])
            expected = closed_form(rule, study, keys, runs)
            assert expected is not None
            closed, found = (round(recall(each)["p_AB"].item(), 6) for each in (expected, simulated))
            rows.append({"rule": rule, "step": len(order), "closed": closed, "simulated": found})
    return rows


def protection(study: CollisionStudy) -> Rows:
    """The filter's gain, in closed form and simulated, and the overlap it makes of rho, as A's run begins and after."""
    settled = forms.settled_variance(study.process_noise, study.observation_noise)
    rows, memory = [], memories(study)["dense"]
    for rho in study.overlaps:
        keys = place_keys(rho, study.key_size)
        for when, frequent in (("first", 0), ("late", study.frequent)):
            runs = schedule(study.target, frequent)
            noises = study.prior_variance, study.process_noise, study.observation_noise
            _, ahead = forms.bayesian(keys @ keys.mT, runs, *noises)
            state = memory.start(1, 1, IDENTITIES, study.key_size)
            for i in tokens(runs):
                state = memory.step(state, keys[i][None, None], torch.zeros(IDENTITIES, dtype=F64))
            zero = torch.zeros(1, 1, dtype=F64)
            after = bayesian.predict(state, zero, zero + study.process_noise).covariance[0, 0]
            known, simulated = ahead[A, A].item(), (keys[A] @ after @ keys[A]).item()
            reached = forms.effective_overlap(keys @ keys.mT, ahead, B, A, settled).item()
            rows.append({
                "overlap": rho, "when": when, "effective_overlap": round(reached, 6),
                "gain": round(known / (study.observation_noise + known), 6),
                "simulated_gain": round(simulated / (study.observation_noise + simulated), 6),
            })  # fmt: skip
    return rows


def run_collision(study: CollisionStudy, output: str | Path, *, track: Track = iter) -> tuple[dict[str, Any], Path]:
    """The whole study into ``output``: results.json, plots and a page. ``track`` shows progress over the cases."""
    every = list(memories(study))
    parts = {
        "final": (final, every), "course": (course, SHOWN), "overlaps": (overlaps, SHOWN),
        "repetitions": (repetitions, SHOWN), "other_sizes": (other_sizes, SHOWN), "crowd": (crowd, every),
        "switch": (switch, (*SHOWN, "mesa_forgetting")), "switch_by_drift": (partial(by_drift, switch), ("dense",)),
        "crowd_by_drift": (partial(by_drift, crowd), ("dense",)),
    }  # fmt: skip
    found: dict[str, Rows] = {name: [] for name in parts}
    for name, rule in track([(name, rule) for name, (_, rules) in parts.items() for rule in rules]):
        found[name] += parts[name][0](study, rule)
    found |= {"published": published(study), "protection": protection(study)}
    measurements = {"summary": summary(study, found), **{name: study_pages.table(rows) for name, rows in found.items()}}
    quick = study == CollisionStudy.quick()
    settings, name = dataclasses.asdict(study) | {"quick": quick}, study_pages.study_name("collision", quick)
    result = results.record(name, measurements, seeds=[SEED], settings=settings)
    results.write_json(Path(output) / "results.json", result)
    return result, study_pages.collision_page(result, Path(output))


def summary(study: CollisionStudy, found: dict[str, Rows]) -> dict[str, float]:
    """The few numbers to remember: p_AB at the end, and how well the closed forms fit."""
    told = {
        f"p_AB, {row['keys']}: {readable(row['rule'])}": row["p_AB"]
        for row in found["final"]
        if row["rule"] in SHOWN and row["frequent"] == study.frequent
    }
    told["largest relative difference from a closed form"] = max(
        row.get("difference", 0.0) for name in ("final", "overlaps", "repetitions") for row in found[name]
    )
    return told
