"""``metaplastic bench kernels``: the kernels on a CUDA device beside their peers, their floors and float64, in one run.

Times are medians by the device's clock, the L2 cache cleared before every run. The floor of a pass is the larger of
two times that no implementation of the recurrence can beat on this device: the bytes of its arguments, results and
gradients over the bandwidth that a copy reaches here, and its operations per memory element and token (``OPERATIONS``)
over the multiply-adds that the device issues at its highest clock. Memory is what a call allocates at most beyond its
arguments, results and gradients. Errors are in norm, relative to the chunked backend in float64, of two heads of the
first sequence.
"""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..ops import dispatch, fla
from ..report import Report
from .speed import PALIMPSA_D_170M, operator_inputs


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    key_size: int
    value_size: int

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
WIDTHS = (32, 64, 96, 128, 192, 256)  # K = V of the single head
PALIMPSA_D_760M: dict[str, Any] = PALIMPSA_D_170M | {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "options": {"num_heads": 16, "key_size": 96, "value_size": 192},
}


def bench_kernels(quick: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every measurement by name, as made; ``quick``: the first shape and a decode step. ValueError without CUDA."""
    if not torch.cuda.is_available():
        raise ValueError("bench kernels measures a CUDA device, and there is none here (bench ops measures the CPU)")
    yield "device", device()
    for name, shape in itertools.islice(SHAPES.items(), 1 if quick else None):
        yield name, bench_shape(shape)
    yield "decode 760M-D, 64 sequences", bench_decode_step()
    if not quick:
        yield "one head", {str(width): bench_width(width) for width in WIDTHS}
        yield "training step 170M-D", bench_training_step(PALIMPSA_D_170M)
        yield "training step 760M-D", bench_training_step(PALIMPSA_D_760M)


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
    """Median over about 0.15 s of runs, each timed on the device, behind a cleared L2 cache."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = min(max(int(0.15 / (time.perf_counter() - began)), 5), 200)
    lying_in_cache = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        lying_in_cache.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def kernel_inputs(op: str, shape: Shape) -> dict[str, Any]:
    """As :func:`operator_inputs`, on the device: activations in bf16, decays and priors in float32."""
    made = operator_inputs(op, **dataclasses.asdict(shape))
    wide = ("g", "prior")
    return {
        n: x.detach().to("cuda", torch.float32 if n in wide else torch.bfloat16).requires_grad_()
        for n, x in made.items()
    }


def bench_shape(shape: Shape) -> dict[str, Any]:
    here, found = device(), {"shape": dataclasses.asdict(shape)}
    for label, op, backend in SIDES:
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
        if op != "palimpsa":
            continue
        traffic = sum(x.nbytes for x in inputs.values()) + upstream.nbytes
        for what, bytes_moved in (("forward", traffic), ("forward + backward", 3 * traffic)):
            floor = 1e3 * max(
                bytes_moved / here["copied bytes per second"],
                OPERATIONS[what] * shape.elements / here["multiply-adds per second"],
            )
            found[label] |= {f"{what} floor ms": floor, f"{what} floor share": floor / found[label][f"{what} ms"]}
        found[label]["errors"] = errors(inputs, upstream)
        first = both()
        found[label]["20 runs equal"] = all(all(map(torch.equal, both(), first)) for _ in range(19))
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


def errors(inputs: dict[str, Any], upstream: Tensor) -> dict[str, float]:
    """Of the output and every gradient; of the prior from two heads of one sequence alone, where it is not a sum."""
    part = {n: (x[:2] if n == "prior" else x[:1, :, :2]).detach() for n, x in inputs.items()}
    dy = upstream[:1, :, :2]

    def measured(given: dict[str, Any], dy: Tensor, backend: str) -> list[Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        y = ops.palimpsa(**leaves, backend=backend).output
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)]

    exact = measured({n: x.double() for n, x in part.items()}, dy.double(), "chunked")
    whole, alone = measured(inputs, upstream, "auto"), measured(part, dy, "auto")
    found = [z if n == "prior" else x[:1, :, :2] for n, x, z in zip(("", *inputs), whole, alone, strict=True)]
    names = ("output", *(f"gradient of {n}" for n in inputs))
    return {n: ((x.double() - e).norm() / e.norm()).item() for n, x, e in zip(names, found, exact, strict=True)}


@torch.no_grad()
def bench_decode_step(sequences: int = 64) -> dict[str, float]:
    """One token for every sequence, in a CUDA graph; the floor reads and writes both fields of the state once."""
    shape = dataclasses.replace(SHAPES["760M-D"], batch=sequences, length=1)
    inputs = {n: x.detach() for n, x in kernel_inputs("palimpsa", shape).items()}
    state = ops.palimpsa(**inputs).state
    for _ in range(3):
        ops.palimpsa(**inputs, initial_state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.palimpsa(**inputs, initial_state=state)
    floor = 1e3 * 2 * sum(s.nbytes for s in state) / device()["copied bytes per second"]
    taken = milliseconds(graph.replay)
    return {"ms": taken, "floor ms": floor, "over the floor": taken / floor}


def bench_width(width: int) -> dict[str, float]:
    """Thousand tokens per second of 16 x 2048 tokens through one head, forward (the published Fig. 7)."""
    shape, found = Shape(16, 2048, 1, width, width), {}
    for label, op, backend in SIDES[:2]:
        if _reason(op, backend) is None:
            inputs = {n: x.detach() for n, x in kernel_inputs(op, shape).items()}
            operator = getattr(ops, op)
            taken = milliseconds(lambda o=operator, i=inputs, b=backend: o(**i, backend=b))
            found[label] = shape.batch * shape.length / taken
    return found


def bench_training_step(sizes: dict[str, Any], batch: int = 8, length: int = 2048) -> dict[str, Any]:
    """Forward, backward and AdamW of a bf16 model, and of the same model with the additive rule."""
    found: dict[str, Any] = {"batch": batch, "length": length}
    for mixer, backend in (("palimpsa_d", "auto"), ("palimpsa_d_additive", "fla"), ("palimpsa_d_additive", "chunked")):
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

        if (reason := _reason("additive", backend)) is not None and "additive" in mixer:
            found[f"{mixer} ({backend})"] = {"not run": reason}
            continue
        with _allowed(backend):
            taken = milliseconds(step)
        found[f"{mixer} ({backend})"] = {"ms": taken, "tokens per second": 1e3 * batch * length / taken}
        del model, optimiser
        torch.cuda.empty_cache()
    steps = [x["ms"] for x in found.values() if isinstance(x, dict) and "ms" in x]
    found["palimpsa over the fastest additive"] = steps[0] / min(steps[1:])
    return found


def kernel_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One measurement as names and readable values, for a terminal."""
    rows = []
    for name, value in found.items():
        if isinstance(value, dict) and "forward ms" in value:
            times = f"{value['forward ms']:.3g} / {value['forward + backward ms']:.3g} ms"
            shares = [f"{value[f'{p} floor share']:.0%}" for p in OPERATIONS if f"{p} floor share" in value]
            of_floor = f", {' / '.join(shares)} of the floor" if shares else ""
            rows.append((name, f"{times}{of_floor}, {value['extra peak GB']:.2f} GB extra"))
            if "errors" in value:
                worst = max(value["errors"].items(), key=lambda x: x[1])
                rows.append(("  largest error", f"{worst[1]:.1e} ({worst[0]})"))
                rows.append(("  20 runs equal, bit for bit", "yes" if value["20 runs equal"] else "NO"))
            if "note" in value:
                rows.append(("  note", value["note"]))
        elif isinstance(value, dict):
            words = ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in value.items())
            rows.append((name, words))
        else:
            rows.append((name, f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


def kernel_page(record: dict[str, Any], output: Path) -> Path:
    """Tables and the throughput of one head, as one page."""
    from matplotlib.figure import Figure

    report = Report("Kernels on this device")
    report.text("Forward / forward and backward, medians; shares are of the floor that no implementation can beat.")
    for name, found in record["measurements"].items():
        report.heading(name)
        if name != "one head":
            report.table(["measured", "value"], kernel_rows(found))
            continue
        figure = Figure(figsize=(5, 3.2))
        axes = figure.subplots()
        for label in dict.fromkeys(label for each in found.values() for label in each):
            points = [(int(width), each[label]) for width, each in found.items() if label in each]
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel="K = V of the head", ylabel="thousand tokens / s", yscale="log")
        axes.legend()
        report.figure(figure, "16 x 2048 tokens through one head, forward.", save=output / "one-head.png")
    report.facts(record)
    return report.write(output / "index.html")
