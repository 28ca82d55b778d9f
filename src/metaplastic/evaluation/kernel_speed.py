"""``metaplastic bench kernels``: the kernels on a CUDA device beside their peers, their floors and float64, in one run.

The floor of a pass is the larger of two times that no implementation of the recurrence can beat on this device: the
bytes of its arguments, results and gradients over the bandwidth that a copy reaches here, and its operations per memory
element and token (``OPERATIONS``) over the multiply-adds that the device issues at its highest clock.
:mod:`.kernel_measures` says how times, memory and errors are measured.

A run may be cut off, so what matters most comes first: the Bayesian Layer, then its peers; then all else of ours, and
last what the other peers add to it. Peers' kernels are compiled by many processes at once
(:mod:`metaplastic.ops.fla_tuning`, which also says how their tuner is shortened).
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..ops import dispatch, fla, fla_tuning
from ..training.compiled import compile_blocks
from .kernel_measures import (
    as_graph,
    called_milliseconds,
    device,
    errors,
    extra_memory,
    host_milliseconds,
    mesa_in_float64,
    milliseconds,
)
from .kernel_shapes import (
    FILTER,
    FILTER_SHAPE,
    FILTER_SIDES,
    MORE_FILTERS,
    SHAPES,
    SIDES,
    STEP_BATCH,
    STEPS,
    TRAINING,
    WIDTHS,
    Shape,
    kernel_inputs,
)

# Multiply-add slots of one element and token. Forward: M, J, M / I, sum over keys (a reciprocal costs none: another
# unit). Both: M and J again, their gradients, six sums, and the products that they share.
OPERATIONS = {"forward": 4, "forward + backward": 4 + 12}
PARTS = ("bayesian", "decode", "shapes", "filter shapes", "one head", "training step")
QUICK = ("decode", "shapes")  # of which the first shape
Found = Iterator[tuple[str, dict[str, Any]]]


def bench_kernels(quick: bool = False, only: Sequence[str] = PARTS, peers: bool = True) -> Found:
    """What was measured, by name, as it is made; several of one name add up. "seconds" is how long each part took.

    ``quick``: the first shape and a decode step; ``only``: some of ``PARTS``. ValueError without CUDA.
    """
    if unknown := [part for part in only if part not in PARTS]:
        raise ValueError(f"only must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise ValueError("bench kernels measures a CUDA device, and there is none here (bench ops measures the CPU)")
    chosen = [part for part in PARTS if part in only and (not quick or part in QUICK)]
    shapes = dict(itertools.islice(SHAPES.items(), 1 if quick else None))
    yield "device", device()
    for group in (PARTS[:1], PARTS[1:]):
        yield from _group([part for part in group if part in chosen], shapes, peers)


def _group(parts: list[str], shapes: dict[str, Shape], peers: bool) -> Found:
    measured: dict[str, dict[str, Any]] = {}
    for part in parts:
        seconds = yield from _timed(_ours(part, shapes), measured)
        yield "seconds", {part: seconds}
    calls = list(dict.fromkeys(call for part in parts for call in _calls(part, shapes)))
    if not peers or not calls:
        return
    if (reason := _reason("additive", "fla")) is not None:
        yield "peers", {"not run": reason}
        return
    began = time.perf_counter()
    try:
        whole = fla_tuning.compile_all(calls)
    except RuntimeError as error:  # what a peer lacks here should not end the measurement of ours
        yield "peers", {f"of {', '.join(parts)} not run": str(error)}
        return
    taken = time.perf_counter() - began
    yield "peers", {f"of {', '.join(parts)} compiled": {"seconds": taken, "all": whole}, "tuning": fla_tuning.CHANGES}
    with fla_tuning.quick():
        for part in parts:
            if _calls(part, shapes):
                seconds = yield from _timed(_peers(part, shapes, measured), measured)
                yield "seconds", {f"{part}, peers": seconds}


def _timed(items: Found, measured: dict[str, dict[str, Any]]) -> Generator[tuple[str, dict[str, Any]], None, float]:
    """The same items, put down in ``measured`` too. Returns the seconds that making them took."""
    seconds, began = 0.0, time.perf_counter()
    for name, found in items:
        seconds += time.perf_counter() - began
        measured[name] = measured.get(name, {}) | found
        yield name, found
        began = time.perf_counter()
    return seconds + time.perf_counter() - began


def _ours(part: str, shapes: dict[str, Shape]) -> Found:
    match part:
        case "bayesian":
            yield FILTER, bench_shape(FILTER_SHAPE, FILTER_SIDES[:1])
            yield f"decode: {FILTER}, 64 sequences", bench_decode_step("bayesian", FILTER_SHAPE, "cuda")
        case "decode":
            yield "decode 760M-D, 64 sequences", bench_decode_step()
        case "shapes":
            for name, shape in shapes.items():
                yield name, bench_shape(shape, SIDES[:1])
        case "filter shapes":
            for name, shape in MORE_FILTERS.items():
                yield name, bench_shape(shape, FILTER_SIDES[:1])
        case "one head":
            yield part, {SIDES[0][0]: {str(width): bench_width(width, SIDES[0]) for width in WIDTHS}}
        case "training step":
            for name, sizes in TRAINING.items():
                yield name, bench_training_step(sizes, STEPS[:2])


def _peers(part: str, shapes: dict[str, Shape], measured: dict[str, dict[str, Any]]) -> Found:
    match part:
        case "bayesian":
            yield from _beside(FILTER, FILTER_SHAPE, FILTER_SIDES, measured)
        case "shapes":
            for name, shape in shapes.items():
                yield from _beside(name, shape, SIDES, measured)
        case "one head":
            yield part, {SIDES[1][0]: {str(width): bench_width(width, SIDES[1]) for width in WIDTHS}}
        case "training step":
            for name, sizes in TRAINING.items():
                found = measured[name] | bench_training_step(sizes, STEPS[2:])
                yield name, found | {"palimpsa over the fastest additive": _over_the_fastest(found)}
                found = bench_training_step(sizes, (STEPS[0], STEPS[2]), compiled=True)
                yield f"{name}, compiled", found | {"palimpsa over the fastest additive": _over_the_fastest(found)}


def _calls(part: str, shapes: dict[str, Shape]) -> list[fla_tuning.Call]:
    """What :func:`_peers` is going to time, the same kernels once."""

    def calls(sides: Sequence[tuple[str, str, str]], shapes: Sequence[Shape]) -> list[fla_tuning.Call]:
        return [
            fla_tuning.Call(op, s.batch, s.heads, s.key_size, s.value_size, True) for s in shapes for _, op, _ in sides
        ]

    match part:
        case "bayesian":
            return calls(FILTER_SIDES[1:], [FILTER_SHAPE])
        case "shapes":
            return calls(SIDES[1:], list(shapes.values()))
        case "one head":
            return [fla_tuning.Call("additive", 16, 1, width, width, False) for width in WIDTHS]
        case "training step":
            heads = [sizes["options"] for sizes in TRAINING.values()]
            sizes = [Shape(STEP_BATCH, 2048, x["num_heads"], x["key_size"], x["value_size"]) for x in heads]
            return calls(SIDES[1:2], sizes)
    return []


def _beside(name: str, shape: Shape, sides: Sequence[tuple[str, str, str]], measured: dict[str, Any]) -> Found:
    """Each peer, and how many times its own times ours are."""
    ours = sides[0][0]
    times = measured[name].get(ours, {})
    for side in sides[1:]:
        found = bench_shape(shape, [side])
        kinds = [f"{what}{kind}" for kind in ("", " called") for what in OPERATIONS]
        both = [kind for kind in kinds if f"{kind} ms" in times and f"{kind} ms" in found[side[0]]]
        ratios = {kind: times[f"{kind} ms"] / found[side[0]][f"{kind} ms"] for kind in both}
        yield name, found | ({f"{ours} over {side[0]}": ratios} if ratios else {})


def bench_shape(shape: Shape, sides: Sequence[tuple[str, str, str]] = SIDES) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": dataclasses.asdict(shape)}
    for label, op, backend in sides:
        if (reason := _reason(op, backend)) is not None:
            found[label] = {"not run": reason}
            continue
        inputs = kernel_inputs(op, shape)
        q = inputs["q"]
        upstream = torch.randn(*q.shape[:3], shape.value_size, device=q.device, dtype=q.dtype)
        function = _function(op, backend)
        run, both = _passes(function, inputs, upstream)
        notes = [fla.MESA_NOTE] if op == "mesa" else []
        side: dict[str, Any] = _times("forward", run)
        found[label] = side
        try:
            with _allowed(op, backend) as void:
                side |= _times("forward + backward", both) | {"extra peak GB": extra_memory(both) / 1e9}
                notes += [f"{void}: times only, gradients are not to be used"] if void else []
        except Exception as error:
            if backend != "fla":
                raise
            notes.append(f"its backward fails here: {type(error).__name__}: {f'{error}'.splitlines()[:1]}"[:200])
        if notes:
            side["note"] = "; ".join(notes)
        if backend == "fla" and (op != "mesa" or "forward + backward ms" not in side):
            continue
        exact = mesa_in_float64 if op == "mesa" else _function(op, "chunked")
        side["errors"] = errors(function, exact, inputs, upstream)
        if backend == "fla":
            continue
        first = both()
        side["20 runs equal"] = all(all(map(torch.equal, both(), first)) for _ in range(19))
        if op == "palimpsa":
            side |= _floors(shape, sum(x.nbytes for x in inputs.values()) + upstream.nbytes, side)
    return found


def _times(what: str, run: Callable[[], Any]) -> dict[str, float]:
    measures = {"": milliseconds, "host ": host_milliseconds, "called ": called_milliseconds}
    return {f"{what} {name}ms": measure(run) for name, measure in measures.items()}


def _floors(shape: Shape, traffic: int, times: dict[str, Any]) -> dict[str, float]:
    """``traffic``: bytes of arguments and upstream gradient."""
    here, found = device(), {}
    for what, bytes_moved in (("forward", traffic), ("forward + backward", 3 * traffic)):
        floor = 1e3 * max(
            bytes_moved / here["copied bytes per second"],
            OPERATIONS[what] * shape.elements / here["multiply-adds per second"],
        )
        found |= {f"{what} floor ms": floor, f"{what} floor share": floor / times[f"{what} ms"]}
    return found


def _reason(op: str, backend: str) -> str | None:
    op = "delta" if op == "mesa" else op  # needs what the library's others need
    return None if backend == "auto" else dispatch.reason_against(op, backend, "cuda", torch.bfloat16)


def _function(op: str, backend: str) -> Callable[..., Tensor]:
    """Inputs by name to the output."""
    if op == "mesa":
        return fla.mesa
    operator = partial(getattr(ops, op), backend=backend)
    return lambda **inputs: operator(**inputs).output


def _passes(
    function: Callable[..., Tensor], inputs: dict[str, Any], upstream: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]]]:
    leaves = list(inputs.values())

    @torch.no_grad()
    def forward() -> Tensor:
        return function(**inputs)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(**inputs), leaves, upstream)

    return forward, both


def _allowed(op: str, backend: str) -> contextlib.AbstractContextManager[str]:
    """Times a peer even where it refuses to run; the text says why its values are void. MesaNet never refuses."""
    return fla.unchecked() if backend == "fla" and op != "mesa" else contextlib.nullcontext("")


@torch.no_grad()
def bench_decode_step(
    op: str = "palimpsa", shape: Shape = SHAPES["760M-D"], backend: str = "auto", sequences: int = 64
) -> dict[str, float]:
    """One token for every sequence, in a CUDA graph, and a copy of the states' bytes, measured alike.

    The floor reads and writes both fields of the state once, at the rate that a copy of a gigabyte reaches.
    """
    shape = dataclasses.replace(shape, batch=sequences, length=1)
    operator = partial(getattr(ops, op), backend=backend)
    inputs = {n: x.detach() for n, x in kernel_inputs(op, shape).items()}
    state = operator(**inputs).state
    taken = milliseconds(as_graph(lambda: operator(**inputs, initial_state=state)))
    source = torch.cat([x.flatten() for x in state])
    target = torch.empty_like(source)
    copy = milliseconds(as_graph(lambda: target.copy_(source)))
    floor = 1e3 * 2 * source.nbytes / device()["copied bytes per second"]
    return {
        "ms": taken,
        "copy of the states ms": copy,
        "over the copy": taken / copy,
        "floor ms": floor,
        "over the floor": taken / floor,
    }


def bench_width(width: int, side: tuple[str, str, str]) -> float:
    """Thousand tokens per second of 16 x 2048 tokens through one head, forward (the published Fig. 7)."""
    shape, (_, op, backend) = Shape(16, 2048, 1, width, width), side
    inputs = {n: x.detach() for n, x in kernel_inputs(op, shape).items()}
    taken = milliseconds(lambda: getattr(ops, op)(**inputs, backend=backend))
    return shape.batch * shape.length / taken


def bench_training_step(
    sizes: dict[str, Any],
    steps: Sequence[tuple[str, str]],
    batch: int = STEP_BATCH,
    length: int = 2048,
    compiled: bool = False,
) -> dict[str, Any]:
    """Forward, backward and AdamW of a bf16 model with each of ``steps`` (mixer, backend); its blocks ``compiled``."""
    found: dict[str, Any] = {"batch": batch, "length": length}
    for mixer, backend in steps:
        options = {mixer: sizes["options"] | {"backend": backend}}
        plain = {name: value for name, value in sizes.items() if name != "options"}
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = MetaplasticForCausalLM(MetaplasticConfig(**plain, mixers=mixer, mixer_options=options))
        model: Any = model.to(dtype=torch.bfloat16).train()
        if compiled:
            compile_blocks(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, sizes["vocab_size"], (batch, length), device="cuda")

        def step(model=model, optimiser=optimiser, ids=ids) -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimiser.step()
            optimiser.zero_grad()

        with _allowed(mixer, backend):
            taken, host = milliseconds(step), host_milliseconds(step, calls=3)
        rate = 1e3 * batch * length / taken
        found[f"{mixer} ({backend})"] = {"ms": taken, "host ms": host, "tokens per second": rate}
        del model, optimiser
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return found


def _over_the_fastest(found: dict[str, Any]) -> float:
    steps = [x["ms"] for x in found.values() if isinstance(x, dict) and "ms" in x]
    return steps[0] / min(steps[1:])
