"""``metaplastic bench kernels``: the kernels on a CUDA device beside their peers, their floors and float64, in one run.

Times are medians by the device's clock, the L2 cache cleared before every run. The floor of a pass is the larger of
two times that no implementation of the recurrence can beat on this device: the bytes of its arguments, results and
gradients over the bandwidth that a copy reaches here, and its operations per memory element and token (``OPERATIONS``)
over the multiply-adds that the device issues at its highest clock. Memory is what a call allocates at most beyond its
arguments, results and gradients. Errors are in norm, relative to the chunked backend in float64, of two heads of the
first sequence. Our own measurements come first; the peers' kernels are compiled by many processes at once
(:mod:`metaplastic.ops.fla_tuning`, which also says how their tuner is shortened).
"""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..ops import dispatch, fla, fla_tuning
from .speed import PALIMPSA_D_170M


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    key_size: int
    value_size: int
    decays: str = "mild"  # above exp(-0.1), or "new model": from 1 to far below, a range of its own in every head

    @property
    def elements(self) -> int:
        """Memory elements times tokens."""
        return self.batch * self.length * self.heads * self.key_size * self.value_size


# One layer of the published models (arXiv 2602.09075, Tables 5 and 6) and the same work as one long sequence.
SHAPES = {
    "760M-D": Shape(16, 2048, 16, 96, 192),
    "170M-D": Shape(16, 2048, 16, 48, 48),
    "2.7B-M": Shape(8, 2048, 80, 128, 64),
    "760M-D, one long text": Shape(1, 32768, 16, 96, 192),
    "760M-D, decays of a new model": Shape(16, 2048, 16, 96, 192, "new model"),
}
# Multiply-add slots of one element and token. Forward: M, J, M / I, sum over keys (a reciprocal costs none: another
# unit). Both: M and J again, their gradients, six sums, and the products that they share.
OPERATIONS = {"forward": 4, "forward + backward": 4 + 12}
# Who stands beside whom: label, operator, backend.
SIDES = (
    ("Palimpsa", "palimpsa", "auto"),
    ("Simple GLA (flash-linear-attention)", "additive", "fla"),
    ("Gated DeltaNet (flash-linear-attention)", "delta", "fla"),
)
# The Bayesian Layer beside the delta rule of as many heads of its size.
FILTER = "Bayesian Layer, 4 heads of 128 x 128"
FILTER_SHAPE = Shape(16, 2048, 4, 128, 128)
FILTER_SIDES = (("Bayesian Layer", "bayesian", "cuda"), SIDES[2])
WIDTHS = (32, 64, 96, 128, 192, 256)  # K = V of the single head
STEPS = (("palimpsa_d", "auto"), ("palimpsa_d_additive", "chunked"), ("palimpsa_d_additive", "fla"))
STEP_BATCH = 16  # with fewer rows launching takes the host longer than 170M takes the GPU
PALIMPSA_D_760M: dict[str, Any] = PALIMPSA_D_170M | {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "options": {"num_heads": 16, "key_size": 96, "value_size": 192},
}
TRAINING = {"training step 170M-D": PALIMPSA_D_170M, "training step 760M-D": PALIMPSA_D_760M}


PARTS = ("shapes", "decode", "bayesian", "one head", "training step")


def bench_kernels(
    quick: bool = False, only: Sequence[str] = PARTS, peers: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured, by name, as it is made: ours first, then what the peers add to the same names.

    ``quick``: the first shape and a decode step; ``only``: some of ``PARTS``. ValueError without CUDA.
    """
    if unknown := [part for part in only if part not in PARTS]:
        raise ValueError(f"only must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise ValueError("bench kernels measures a CUDA device, and there is none here (bench ops measures the CPU)")
    parts = [part for part in only if not quick or part in PARTS[:2]]
    shapes = dict(itertools.islice(SHAPES.items(), 1 if quick else None)) if "shapes" in parts else {}
    yield "device", device()
    for name, shape in shapes.items():
        yield name, bench_shape(shape, SIDES[:1])
    if "decode" in parts:
        yield "decode 760M-D, 64 sequences", bench_decode_step()
    if "bayesian" in parts:
        yield FILTER, bench_shape(FILTER_SHAPE, FILTER_SIDES[:1])
        yield f"decode: {FILTER}, 64 sequences", bench_decode_step("bayesian", FILTER_SHAPE, "cuda")
    if "one head" in parts:
        yield "one head", {SIDES[0][0]: {str(width): bench_width(width, SIDES[0]) for width in WIDTHS}}
    steps = TRAINING if "training step" in parts else {}
    found = {name: bench_training_step(sizes, STEPS[:2]) for name, sizes in steps.items()}
    yield from found.items()
    if not peers:
        return
    if (reason := _reason("additive", "fla")) is not None:
        yield "peers", {"not run": reason}
        return
    began = time.perf_counter()
    compared = [*shapes.values(), *([FILTER_SHAPE] if "bayesian" in parts else [])]
    whole = fla_tuning.compile_all(_peer_calls(compared, WIDTHS if "one head" in parts else (), steps.values()))
    taken = time.perf_counter() - began
    yield "peers", {"seconds to compile": taken, "all compiled then": whole, "tuning": fla_tuning.CHANGES}
    with fla_tuning.quick():
        for name, shape in shapes.items():
            yield name, bench_shape(shape, SIDES[1:])
        if "bayesian" in parts:
            yield FILTER, bench_shape(FILTER_SHAPE, FILTER_SIDES[1:])
        if "one head" in parts:
            yield "one head", {SIDES[1][0]: {str(width): bench_width(width, SIDES[1]) for width in WIDTHS}}
        for name, sizes in steps.items():
            found[name] |= bench_training_step(sizes, STEPS[2:])
            yield name, found[name] | {"palimpsa over the fastest additive": _over_the_fastest(found[name])}


def _peer_calls(shapes: Iterable[Shape], widths: Iterable[int], models: Iterable[dict[str, Any]]) -> list[Any]:
    """What :func:`bench_kernels` is going to time, the same kernels once."""
    calls = [
        fla_tuning.Call(op, s.batch, s.heads, s.key_size, s.value_size, True) for s in shapes for _, op, _ in SIDES[1:]
    ]
    calls += [fla_tuning.Call("additive", 16, 1, width, width, False) for width in widths]
    for sizes in models:
        head = sizes["options"]
        calls += [
            fla_tuning.Call("additive", STEP_BATCH, head["num_heads"], head["key_size"], head["value_size"], True)
        ]
    return list(dict.fromkeys(calls))


def device() -> dict[str, float]:
    """Bytes per second that a copy reaches, and multiply-adds per second at the highest clock."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = milliseconds(lambda: target.copy_(source)) / 1e3
    found = torch.cuda.get_device_properties(0)
    clock = getattr(found, "clock_rate", 0) * 1e3 or 1.98e9  # PyTorch has it in kHz
    return {
        "copied bytes per second": 2 * source.numel() / seconds,
        "multiply-adds per second": found.multi_processor_count * 128 * clock,
    }


def milliseconds(run: Callable[[], Any]) -> float:
    """Median over about 0.15 s of runs (at least 5; 3 of more than 0.5 s), behind a cleared L2 cache.

    Each is timed on the device.
    """
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    count = min(max(int(0.15 / taken), 5 if taken < 0.5 else 3), 200)
    lying_in_cache = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        lying_in_cache.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def kernel_inputs(op: str, shape: Shape, device: str = "cuda") -> dict[str, Any]:
    """As :func:`metaplastic.evaluation.speed.operator_inputs`, on the device: bf16, decays and priors in float32."""
    source = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        each = (shape.batch, shape.length, shape.heads, *sizes)
        return torch.randn(each, generator=source, device=device)

    q, k = (torch.nn.functional.normalize(draw(shape.key_size), dim=-1).bfloat16() for _ in range(2))
    written, g = draw(shape.value_size).bfloat16(), -0.1 * draw().sigmoid()
    if shape.decays == "new model":  # A, dt and a projection of normed activations, as layers draw them
        rates, steps = torch.rand(2, shape.heads, generator=source, device=device)
        bias = torch.log(torch.expm1(0.001 * 100**steps))
        g = -16 * rates * torch.nn.functional.softplus(bias + 0.7 * draw())
    made: dict[str, Tensor] = {"q": q, "k": k, "g": g, ("w" if op == "palimpsa" else "v"): written}
    if op == "palimpsa":
        made |= {"beta": draw(shape.value_size).sigmoid().bfloat16(), "prior": torch.ones(shape.heads, device=device)}
    elif op == "delta":
        made["beta"] = draw().sigmoid().bfloat16()
    elif op == "bayesian":  # noise as much as the decay takes off
        made |= {"process_noise": 1 - (2 * g).exp(), "observation_noise": 0.05 + 0.45 * draw().sigmoid()}
        made["prior_variance"] = torch.ones(shape.heads, device=device)
    return {n: x.requires_grad_() for n, x in made.items()}


def bench_shape(shape: Shape, sides: Sequence[tuple[str, str, str]] = SIDES) -> dict[str, Any]:
    here, found = device(), {"shape": dataclasses.asdict(shape)}
    for label, op, backend in sides:
        if (reason := _reason(op, backend)) is not None:
            found[label] = {"not run": reason}
            continue
        inputs = kernel_inputs(op, shape)
        upstream = torch.randn(*inputs["q"].shape[:3], shape.value_size, device="cuda", dtype=torch.bfloat16)
        run, both = _passes(op, backend, inputs, upstream)
        found[label] = {"forward ms": milliseconds(run)}
        with _allowed(backend) as void:
            found[label] |= {"forward + backward ms": milliseconds(both), "extra peak GB": extra_memory(both) / 1e9}
        if void:
            found[label]["note"] = f"{void}: times only, gradients are not to be used"
        if backend == "fla":
            continue
        found[label]["errors"] = errors(op, inputs, upstream, backend)
        first = both()
        found[label]["20 runs equal"] = all(all(map(torch.equal, both(), first)) for _ in range(19))
        if op != "palimpsa":
            continue
        traffic = sum(x.nbytes for x in inputs.values()) + upstream.nbytes
        for what, bytes_moved in (("forward", traffic), ("forward + backward", 3 * traffic)):
            floor = 1e3 * max(
                bytes_moved / here["copied bytes per second"],
                OPERATIONS[what] * shape.elements / here["multiply-adds per second"],
            )
            found[label] |= {f"{what} floor ms": floor, f"{what} floor share": floor / found[label][f"{what} ms"]}
    return found


def _reason(op: str, backend: str) -> str | None:
    return None if backend == "auto" else dispatch.reason_against(op, backend, "cuda", torch.bfloat16)


def _passes(op: str, backend: str, inputs: dict[str, Any], upstream: Tensor) -> tuple[Callable, Callable]:
    operator, leaves = getattr(ops, op), list(inputs.values())

    @torch.no_grad()
    def forward() -> Tensor:
        return operator(**inputs, backend=backend).output

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(operator(**inputs, backend=backend).output, leaves, upstream)

    return forward, both


def _allowed(backend: str) -> contextlib.AbstractContextManager[str]:
    """Times a peer even where it refuses to run; the text says why its values are void."""
    return fla.unchecked() if backend == "fla" else contextlib.nullcontext("")


def extra_memory(both: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes allocated at most beyond what was there before and what is returned."""
    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = both()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in returned)


def errors(op: str, inputs: dict[str, Any], upstream: Tensor, backend: str) -> dict[str, float]:
    """Of the output and every gradient; of the prior from two heads of one sequence alone, where it is not a sum."""
    priors = {n for n, x in inputs.items() if x.dim() == 1}
    part = {n: (x[:2] if n in priors else x[:1, :, :2]).detach() for n, x in inputs.items()}
    dy = upstream[:1, :, :2]

    def measured(given: dict[str, Any], dy: Tensor, backend: str) -> list[Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        y = getattr(ops, op)(**leaves, backend=backend).output
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)]

    exact = measured({n: x.double() for n, x in part.items()}, dy.double(), "chunked")
    whole, alone = measured(inputs, upstream, backend), measured(part, dy, backend)
    found = [z if n in priors else x[:1, :, :2] for n, x, z in zip(("", *inputs), whole, alone, strict=True)]
    names = ("output", *(f"gradient of {n}" for n in inputs))
    return {n: ((x.double() - e).norm() / e.norm()).item() for n, x, e in zip(names, found, exact, strict=True)}


@torch.no_grad()
def bench_decode_step(
    op: str = "palimpsa", shape: Shape = SHAPES["760M-D"], backend: str = "auto", sequences: int = 64
) -> dict[str, float]:
    """One token for every sequence, in a CUDA graph; the floor reads and writes both fields of the state once."""
    shape = dataclasses.replace(shape, batch=sequences, length=1)
    operator = partial(getattr(ops, op), backend=backend)
    inputs = {n: x.detach() for n, x in kernel_inputs(op, shape).items()}
    state = operator(**inputs).state
    for _ in range(3):
        operator(**inputs, initial_state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(**inputs, initial_state=state)
    floor = 1e3 * 2 * sum(s.nbytes for s in state) / device()["copied bytes per second"]
    taken = milliseconds(graph.replay)
    return {"ms": taken, "floor ms": floor, "over the floor": taken / floor}


def bench_width(width: int, side: tuple[str, str, str]) -> float:
    """Thousand tokens per second of 16 x 2048 tokens through one head, forward (the published Fig. 7)."""
    shape, (_, op, backend) = Shape(16, 2048, 1, width, width), side
    inputs = {n: x.detach() for n, x in kernel_inputs(op, shape).items()}
    taken = milliseconds(lambda: getattr(ops, op)(**inputs, backend=backend))
    return shape.batch * shape.length / taken


def bench_training_step(
    sizes: dict[str, Any], steps: Sequence[tuple[str, str]], batch: int = STEP_BATCH, length: int = 2048
) -> dict[str, Any]:
    """Forward, backward and AdamW of a bf16 model with each of ``steps`` (mixer, backend)."""
    found: dict[str, Any] = {"batch": batch, "length": length}
    for mixer, backend in steps:
        options = {mixer: sizes["options"] | {"backend": backend}}
        plain = {name: value for name, value in sizes.items() if name != "options"}
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = MetaplasticForCausalLM(MetaplasticConfig(**plain, mixers=mixer, mixer_options=options))
        model: Any = model.to(dtype=torch.bfloat16).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, sizes["vocab_size"], (batch, length), device="cuda")

        def step(model=model, optimiser=optimiser, ids=ids) -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimiser.step()
            optimiser.zero_grad()

        with _allowed(backend):
            taken = milliseconds(step)
        found[f"{mixer} ({backend})"] = {"ms": taken, "tokens per second": 1e3 * batch * length / taken}
        del model, optimiser
        torch.cuda.empty_cache()
    return found


def _over_the_fastest(found: dict[str, Any]) -> float:
    steps = [x["ms"] for x in found.values() if isinstance(x, dict) and "ms" in x]
    return steps[0] / min(steps[1:])
