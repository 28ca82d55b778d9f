"""``metaplastic bench ops``: the operators and a decode step, side by side in one run.

Times are medians over repetitions after a warm-up, taken alternately so that a slow spell of the machine hits all
sides. Memory is the growth of the process's peak resident set while the operator runs, its outputs and the gradients
(which any implementation needs) subtracted.
"""

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..models import MetaplasticConfig, MetaplasticForCausalLM

# The sizes of the published Palimpsa-D 170M (arXiv 2602.09075, Table 5).
PALIMPSA_D_170M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 19,
    "intermediate_size": 2048,
    "options": {"num_heads": 16, "key_size": 48, "value_size": 48},
}


Tell = Callable[[str, str], object]


def operator_inputs(
    op: str, batch: int, length: int, heads: int, key_size: int, value_size: int
) -> dict[str, torch.Tensor]:
    """Random arguments of ``ops.<op>`` as a plausible layer gives them, float32, requiring gradients."""
    source = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, *sizes, generator=source)

    q, k = (torch.nn.functional.normalize(draw(key_size), dim=-1) for _ in range(2))
    written, g = draw(value_size), -0.1 * draw().sigmoid()
    own = {
        "palimpsa": {"w": written, "beta": draw(value_size).sigmoid(), "prior": torch.ones(heads)},
        "additive": {"v": written},
        "delta": {"v": written, "beta": draw().sigmoid()},
        "bayesian": {
            "v": written,
            "process_noise": -torch.expm1(2 * g),  # coupled to the decay: the covariance stays below the identity
            "observation_noise": 0.5 + draw().sigmoid(),
            "prior_variance": torch.ones(heads),
        },
    }
    return {name: x.requires_grad_() for name, x in ({"q": q, "k": k, "g": g} | own[op]).items()}


def medians(sides: dict[str, Callable[[], Any]], repetitions: int, seldom: str = "") -> dict[str, float]:
    """Median seconds of each function, called in turn ``repetitions`` times after one warm-up call each.

    ``seldom`` is one that takes the first and then every third turn only.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for turn in range(repetitions):
        for name, run in sides.items():
            if name == seldom and turn % 3:
                continue
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def bench_operator(
    op: str, backends: tuple[str, ...], *, repetitions: int = 9, tell: Tell = lambda *row: None, **shape: int
) -> dict[str, Any]:
    """Backends of ``ops.<op>`` on the CPU against its token loop under autograd: same inputs, same run.

    The token loop takes every third turn: long, and what it frees slows whoever is next, which a median forgives.
    The memory is that of the first backend and of the token loop, forward and backward, beyond the floor: the outputs,
    the loss's product with them and the gradients of both and of the inputs.
    ``tell`` gets each row of :func:`operator_rows` as soon as it is measured, and before what is long a word of it.
    """
    inputs = operator_inputs(op, **shape)
    written = inputs["w" if op == "palimpsa" else "v"]
    weights = torch.randn(written.shape, generator=torch.Generator().manual_seed(1))
    operator = getattr(ops, op)

    def forward(backend: str) -> Callable[[], Any]:
        return lambda: operator(**inputs, backend=backend).output

    def both(backend: str) -> Callable[[], Any]:
        return lambda: torch.autograd.grad((forward(backend)() * weights).sum(), list(inputs.values()))

    sides = (*backends, "reference")
    floor = sum(x.numel() for x in (*inputs.values(), weights, weights, weights)) * 4
    found: dict[str, Any] = {"operator": op, "shape": shape, "threads": torch.get_num_threads()}
    told = 0

    def tell_more() -> None:
        nonlocal told
        rows = operator_rows(found)
        for row in rows[told:]:
            tell(*row)
        told = len(rows)

    tell_more()
    for part, side in {"forward": forward, "forward_backward": both}.items():
        if side is both:
            tell("forward and backward", "being timed, the token loop too, which takes longest")
        seconds = medians({n: side(n) for n in sides}, repetitions, seldom="reference")
        found |= {f"{n}_{part}_ms": s * 1e3 for n, s in seconds.items()}
        found |= {f"{n}_{part}_speedup": seconds["reference"] / seconds[n] for n in backends}
        tell_more()
    found["memory_floor_mb"] = floor / 2**20
    for n in (backends[0], "reference"):
        found[f"{n}_extra_peak_memory_mb"] = max(0.0, peak_growth(both(n)) - floor) / 2**20
    tell_more()
    return found


bench_palimpsa_cpu = partial(
    bench_operator, "palimpsa", ("cpu", "chunked"), batch=4, length=1024, heads=4, key_size=32, value_size=64
)
_square = {"batch": 2, "length": 1024, "heads": 4, "key_size": 64, "value_size": 64}
OPERATORS: dict[str, Callable[..., dict[str, Any]]] = {
    "palimpsa_cpu": bench_palimpsa_cpu,
    "bayesian_cpu": partial(bench_operator, "bayesian", ("chunked",), **_square),
    "delta_cpu": partial(bench_operator, "delta", ("chunked",), **_square),
}


def operator_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What :func:`bench_operator` measured, as a person reads it."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["shape"].items())
    rows = [("shape", sizes), ("threads", str(found["threads"]))]
    names = {"reference": "token loop", "chunked": "chunked", "cpu": "CPU kernel"}
    for part, shown in {"forward": "forward", "forward_backward": "forward and backward"}.items():
        if (loop := found.get(f"reference_{part}_ms")) is None:  # not measured yet
            continue
        for side, name in names.items():
            if (took := found.get(f"{side}_{part}_ms")) is None:
                continue
            row = f"{took:,.4g} ms"
            if side != "reference":
                row += f", {loop / took:,.3g} times the token loop's speed"
                row += " (slower: on a CPU chunks save memory, not time)" if side == "chunked" and took > loop else ""
            rows.append((f"{shown}: {name}", row))
    for side, name in names.items():
        if (memory := found.get(f"{side}_extra_peak_memory_mb")) is not None:
            beyond = f"MiB beyond the {found['memory_floor_mb']:,.4g} MiB of outputs and gradients"
            rows.append((f"{name}, extra peak memory", f"{memory:,.4g} {beyond}"))
    return rows


def decode_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What :func:`bench_decode` measured, as a person reads it."""
    steps = {k.removesuffix("_step_ms"): v for k, v in found.items() if k.endswith("_step_ms")}
    first, second = steps
    rows = [("model", found["model"]), ("threads", str(found["threads"]))]
    rows += [(f"one token: {name}", f"{took:,.4g} ms") for name, took in steps.items()]
    return [*rows, (f"{first} over {second}", f"{found['ratio']:.3f} times its time")]


def bench_decode(mixers: tuple[str, str] = ("palimpsa_d", "palimpsa_d_additive"), steps: int = 40) -> dict[str, Any]:
    """One greedy decode step of a 170M model at batch 1, with each mixer: medians of alternating steps."""
    sides: dict[str, Callable[[], Any]] = {}
    for name in mixers:
        torch.manual_seed(0)
        config = MetaplasticConfig(
            **{k: v for k, v in PALIMPSA_D_170M.items() if k != "options"},
            mixers=name,
            mixer_options={name: PALIMPSA_D_170M["options"]},
        )
        model = MetaplasticForCausalLM(config).eval()
        sides[name] = _decoder(model)
    times = medians(sides, steps)
    return {
        "model": "Palimpsa-D 170M, 19 layers, batch 1, float32",
        "threads": torch.get_num_threads(),
        **{f"{name}_step_ms": seconds * 1e3 for name, seconds in times.items()},
        "ratio": times[mixers[0]] / times[mixers[1]],
    }


def _decoder(model: MetaplasticForCausalLM) -> Callable[[], Any]:
    with torch.no_grad():
        state = model(input_ids=torch.arange(64)[None], use_cache=True)
    last = {"token": state.logits[:, -1:].argmax(-1), "cache": state.cache}

    @torch.no_grad()
    def step() -> None:
        out = model(input_ids=last["token"], cache=last["cache"], use_cache=True)
        last["token"] = out.logits[:, -1:].argmax(-1)

    return step


def peak_growth(run: Callable[[], Any]) -> float:
    """Bytes by which the resident set grows at most while ``run`` runs (warmed up); 0 where /proc does not say."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0.0
    page = 4096
    run()
    # What the warm-up freed must not be lying ready, or the growth would not show.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    peak, done = 0, threading.Event()

    def resident() -> int:
        return int(statm.read_text().split()[1]) * page

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.0005)

    base = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return float(max(0, peak - base))
