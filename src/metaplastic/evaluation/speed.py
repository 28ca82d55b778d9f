"""``metaplastic bench ops``: the operators and a decode step, side by side in one run.

Times are medians over repetitions after a warm-up, taken alternately so that a slow spell of the machine hits all
sides. Memory is the growth of the process's peak resident set while the operator runs, its inputs, outputs and
gradients (which any implementation needs) subtracted.
"""

import statistics
import threading
import time
from collections.abc import Callable
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


def palimpsa_inputs(
    batch: int, length: int, heads: int, key: int, value: int, dtype=torch.float32
) -> list[torch.Tensor]:
    """Random q, k, w, beta, g, prior of a plausible layer, requiring gradients."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    q, k = (torch.nn.functional.normalize(draw(batch, length, heads, key), dim=-1) for _ in range(2))
    w, beta = draw(batch, length, heads, value), draw(batch, length, heads, value).sigmoid()
    g = -0.1 * draw(batch, length, heads).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, w, beta)] + [
        g.requires_grad_(),
        torch.ones(heads).requires_grad_(),
    ]


def medians(sides: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median seconds of each function, called in turn ``repetitions`` times after one warm-up call each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for _ in range(repetitions):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def bench_palimpsa_cpu(
    batch: int = 4, length: int = 1024, heads: int = 4, key: int = 32, value: int = 64, repetitions: int = 9
) -> dict[str, Any]:
    """The fused CPU kernel and the chunked backend against the token loop under autograd, same inputs, same run."""
    inputs = palimpsa_inputs(batch, length, heads, key, value)
    weights = torch.randn(batch, length, heads, value, generator=torch.Generator().manual_seed(1))

    def forward(backend: str) -> Callable[[], Any]:
        return lambda: ops.palimpsa(*inputs, backend=backend).output

    def both(backend: str) -> Callable[[], Any]:
        return lambda: torch.autograd.grad((ops.palimpsa(*inputs, backend=backend).output * weights).sum(), inputs)

    names = ("cpu", "chunked")
    forward_times = medians({n: forward(n) for n in names}, repetitions)
    both_times = medians({n: both(n) for n in names}, repetitions)
    few = max(1, repetitions // 3)
    reference_forward = medians({"reference": forward("reference")}, few)["reference"]
    reference_both = medians({"reference": both("reference")}, few)["reference"]
    unavoidable = sum(x.numel() for x in (*inputs, *inputs, weights, weights, weights)) * 4
    return {
        "shape": {"batch": batch, "length": length, "heads": heads, "key_size": key, "value_size": value},
        "threads": torch.get_num_threads(),
        "reference_forward_ms": reference_forward * 1e3,
        "reference_forward_backward_ms": reference_both * 1e3,
        **{f"{n}_forward_ms": forward_times[n] * 1e3 for n in names},
        **{f"{n}_forward_backward_ms": both_times[n] * 1e3 for n in names},
        "cpu_forward_speedup": reference_forward / forward_times["cpu"],
        "cpu_forward_backward_speedup": reference_both / both_times["cpu"],
        "cpu_extra_peak_memory_mb": max(0.0, peak_growth(both("cpu")) - unavoidable) / 2**20,
    }


def palimpsa_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What :func:`bench_palimpsa_cpu` measured, as a person reads it."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["shape"].items())
    rows = [("shape", sizes), ("threads", str(found["threads"]))]
    names = {"reference": "token loop", "chunked": "chunked", "cpu": "CPU kernel"}
    for part, shown in {"forward": "forward", "forward_backward": "forward and backward"}.items():
        loop = found[f"reference_{part}_ms"]
        for side, name in names.items():
            took = found[f"{side}_{part}_ms"]
            row = f"{took:,.4g} ms"
            if side != "reference":
                row += f", {loop / took:,.3g} times the token loop's speed"
                row += " (slower: on a CPU chunks save memory, not time)" if side == "chunked" and took > loop else ""
            rows.append((f"{shown}: {name}", row))
    return [
        *rows,
        (
            "CPU kernel, extra peak memory",
            f"{found['cpu_extra_peak_memory_mb']:,.3g} MiB beyond inputs, outputs, gradients",
        ),
    ]


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
