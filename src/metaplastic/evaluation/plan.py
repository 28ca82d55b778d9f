"""``metaplastic plan``: what a run needs of every GPU before any is rented: memory, communication, and both in seconds.

N processes, C of which share a row (context parallelism), so D = N / C take rows. P: parameters, 4 bytes each.

    ddp        every GPU: weights, gradients, averages of AdamW (16 P); gradients travel in the buckets they lie in
               2 (N - 1) / N of 4 P a step                                              all-reduce of the gradients
    fsdp2      every GPU: 16 P / N; the weights and gradients of two blocks, the embeddings, whole while they are used
               2 (N - 1) / N of 4 P each time rows are taken                            all-gather, forward and backward
               (N - 1) / N of 4 P a step                                                reduce-scatter of the gradients
    context    a layer and row: (C - 1) H (1 + 2 V K) floats forward, (C - 1) H 2 V K backward: (decay, M, J) of every
               shard to every shard. The additive rule: M alone. What is not affine in its state hands it on: H V K
               floats (the filter: H K^2 more) from process to process, each way. And the convolution's last inputs.

Weights travel in float32: accelerate's bf16 copies would cost decays and priors their precision. Bytes are those that
leave a GPU. Times are at the bandwidths given and at a share of the peak that is assumed, and say so. What overlaps
hides: the longest of compute and communication is a floor, their sum a ceiling.
"""

import dataclasses
import math
from typing import Any

import torch

from ..layers import MIXERS
from ..models import MetaplasticConfig, MetaplasticForCausalLM, size
from ..models.checkpointing import KINDS as CHECKPOINTING
from ..models.loss import FORMS as LOSSES
from ..models.loss import pays
from ..training.flops import PEAKS, model_flops, seen_in_a_row
from . import memory
from .words import digits, with_unit

PARALLEL = ("ddp", "fsdp2")
AFFINE = ("palimpsa", "additive")
BYTES = {"GB": 1e9, "MB": 1e6, "KB": 1e3}
TIMES = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}
SHORTEST = 3  # tokens of a shard: what the short convolution looks back to
STATES = "states (context)"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What the run has: GPUs, bytes per second that leave each of them, and what each computes."""

    gpus: int
    node: int = 8  # GPUs of one machine
    inside: float = 450e9  # bytes per second to others of the machine (NVLink)
    between: float = 50e9  # to other machines (a network card of 400 Gb/s for each)
    memory: float = 80e9
    peak: float = PEAKS["H100"]
    efficiency: float = 0.26  # of the peak, assumed: Palimpsa-D 760M on an H200, compiled; eager 0.21

    def __post_init__(self) -> None:
        # In units as the command takes them.
        units = {"inside": " GB/s", "between": " GB/s", "memory": " GB", "peak": " TFLOP/s"}
        for name in ("gpus", "node", *units, "efficiency"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                size = 1e12 if name == "peak" else 1e9 if name in units else 1
                raise ValueError(f"{name} must be > 0 and finite, got {value / size:g}{units.get(name, '')}")
        if self.efficiency > 1:
            raise ValueError(f"efficiency must be a share of the peak, at most 1, got {self.efficiency}")

    def rate(self, neighbours: int) -> float:
        """Bytes per second among so many neighbours: a ring of more than one machine has the speed of the network."""
        return self.inside if neighbours <= self.node else self.between


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step is: rows in all, their length, how many a GPU takes at once, and how they are shared."""

    rows: int
    length: int
    batch_size: int
    parallel: str = "ddp"
    context_parallel: int = 1
    checkpointing: str = "none"
    loss: str = "auto"  # what a CUDA device with flash-linear-attention does

    def __post_init__(self) -> None:
        for name in ("rows", "length", "batch_size", "context_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.context_parallel > 1 and self.length // self.context_parallel < SHORTEST:
            shards = f"rows of {self.length:,} tokens in {self.context_parallel:,} shards"
            raise ValueError(f"context_parallel: got {shards}, expected at least {SHORTEST} tokens in each")
        for name, known in (("parallel", PARALLEL), ("checkpointing", CHECKPOINTING), ("loss", LOSSES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one GPU: bytes by what they are for, and what it sends and computes in a step."""

    at_once: int  # rows that a GPU takes at once
    accumulation: int  # and how often in a step
    memory: dict[str, float]
    sent: dict[str, float]
    seconds: dict[str, float]  # the same, at the bandwidths given
    flops: float  # what is recomputed too
    loss: str  # fused or plain

    @property
    def resident(self) -> float:
        return sum(self.memory.values())


def plan(config: MetaplasticConfig, cluster: Cluster, step: Step) -> Plan:
    """Raises ValueError where the rows of a step cannot be shared evenly, or a layer cannot be cut."""
    shares, left = divmod(cluster.gpus, step.context_parallel)
    if left:
        raise ValueError(f"context_parallel: got {step.context_parallel} of {cluster.gpus} GPUs, expected a divisor")
    if step.rows % shares:
        who = f"{cluster.gpus:,} GPUs" + (f", {step.context_parallel} to a row," if step.context_parallel > 1 else "")
        few = f"{step.rows:,} rows of {step.length:,} tokens a step, which {who} cannot share evenly"
        raise ValueError(f"rows: got {few}: {_instead(config, cluster, step)}")
    own = step.rows // shares
    at_once = max(count for count in range(1, min(step.batch_size, own) + 1) if own % count == 0)
    if step.loss == "auto":
        step = dataclasses.replace(step, loss="fused" if pays(config.vocab_size, config.hidden_size) else "plain")
    with torch.device("meta"):
        model: Any = MetaplasticForCausalLM(config)
    found = size(config)
    tokens = own * step.length / step.context_parallel
    again = 4 / 3 if step.checkpointing == "full" else 1
    flops = again * tokens * model_flops(found, seen_in_a_row(step.length, found.window))
    accumulation = own // at_once
    sent = _sent(model, cluster, step, own, accumulation)
    rates = {name: cluster.rate(step.context_parallel if name == STATES else cluster.gpus) for name in sent}
    seconds = {name: count / rates[name] for name, count in sent.items()}
    kept = _memory(model, cluster, step, at_once, accumulation)
    return Plan(at_once, accumulation, kept, sent, seconds, flops, step.loss)


def _instead(config: MetaplasticConfig, cluster: Cluster, step: Step) -> str:
    """Options of the command with which the GPUs have rows to share: one of each kind, the nearest."""
    shares, tokens, found = cluster.gpus // step.context_parallel, step.rows * step.length, []
    rows = math.lcm(shares, step.batch_size)  # a step has a multiple of them
    if not any(MIXERS[name].growing_state for name in config.mixers):
        for context in range(step.context_parallel + 1, min(cluster.gpus, step.length // SHORTEST) + 1):
            if cluster.gpus % context == 0 and step.rows % (cluster.gpus // context) == 0:
                found.append(f"--context-parallel {context}")
                break
    found.append(f"--tokens-per-step {-(-step.rows // rows) * rows * step.length}")
    for length in range(min(step.length, tokens // rows), step.context_parallel * SHORTEST - 1, -1):
        if tokens % (rows * length) == 0:
            found.append(f"--block-length {length}")
            break
    return f"give {', '.join(found[:-1])}{' or ' if found[:-1] else ''}{found[-1]}"


def _memory(model: Any, cluster: Cluster, step: Step, at_once: int, accumulation: int) -> dict[str, float]:
    blocks, whole = list(model.model.layers), 4 * sum(p.numel() for p in model.parameters())
    largest = max(4 * sum(p.numel() for p in block.parameters()) for block in blocks)
    root = whole - sum(4 * sum(p.numel() for p in block.parameters()) for block in blocks)
    part = cluster.gpus if step.parallel == "fsdp2" else 1
    kept: dict[str, float] = {"weights": whole / part, "gradients": whole / part}
    kept["optimiser"] = memory.optimizer_bytes(model) / part
    if step.parallel == "fsdp2":
        kept["gathered weights and gradients"] = 2 * (2 * largest + root)
        if accumulation > 1:  # they are added up before they are shared
            kept["gradients, whole"] = whole
    tokens, length = at_once * step.length / step.context_parallel, step.length // step.context_parallel
    each = [memory.block_bytes(block, length) for block in blocks]
    if step.checkpointing != "none":
        kept["bf16 copies of weights"] = max(map(memory.weight_copies, blocks)) + memory.weight_copies(model.lm_head)
        waiting = sum(memory.kept_by_checkpointing(block, step.checkpointing, length) for block in blocks)
        kept["inputs of blocks" if step.checkpointing == "full" else "what of blocks is dear"] = tokens * waiting
        kept["activations of one block"] = tokens * max(each)
    else:
        kept["bf16 copies of weights"] = memory.weight_copies(model)
        kept["activations"] = tokens * sum(each)
    if step.loss == "plain":
        kept["output layer and loss"] = tokens * (memory.head_bytes(model) + memory.logits_bytes(model))
    if step.context_parallel > 1:
        kept["entry states"] = at_once * sum(4 * memory.state_elements(block.mixer) for block in blocks)
    return kept


def _sent(model: Any, cluster: Cluster, step: Step, own: int, accumulation: int) -> dict[str, float]:
    whole = 4 * sum(p.numel() for p in model.parameters())
    share, sent = (cluster.gpus - 1) / cluster.gpus, dict[str, float]()
    if step.parallel == "ddp":
        sent["gradients (all-reduce)"] = 2 * share * whole
    else:
        sent["weights (all-gather)"] = 2 * share * whole * accumulation
        sent["gradients (reduce-scatter)"] = share * whole
    if step.context_parallel > 1:
        sent[STATES] = own * sum(context_bytes(block.mixer, step.context_parallel) for block in model.model.layers)
    return sent


def context_bytes(mixer: Any, context: int) -> int:
    """What one of ``context`` neighbours sends of a row in a layer, forward and backward."""
    if mixer.growing_state:
        kind = type(mixer).__name__
        raise ValueError(f"context_parallel: {kind} layers cannot be cut, expected memories of fixed size")
    state = memory.state_elements(mixer)
    if mixer.operator in AFFINE:
        sent = (context - 1) * (mixer.num_heads + state + state)
    else:
        sent = 2 * state
    if mixer.conv is not None:
        sent += 2 * (mixer.conv.kernel_size - 1) * mixer.conv.channels
    return 4 * sent


def plan_rows(
    config: MetaplasticConfig, cluster: Cluster, step: Step, tokens: float | None = None
) -> list[tuple[str, str]]:
    """A plan as names and readable values; ``tokens``: of the whole run."""
    found = plan(config, cluster, step)
    compute = found.flops / (cluster.peak * cluster.efficiency)
    unit = _unit(found.resident)  # one for all that adds up
    rows = [
        (
            "GPUs",
            f"{cluster.gpus:,}: {step.parallel}"
            + (f", {step.context_parallel} share a row" if step.context_parallel > 1 else ""),
        ),
        ("a step", f"{step.rows:,} rows of {step.length:,} = {step.rows * step.length:,} tokens"),
        ("of a GPU", f"{_rows(found)}; checkpointing {step.checkpointing}"),
        ("loss", f"{found.loss}{' (what auto chooses on CUDA)' if step.loss == 'auto' else ''}"),
        *((f"  {name}", _bytes(count, unit)) for name, count in found.memory.items()),
        ("memory of a GPU", f"{_bytes(found.resident, unit)} of {_bytes(cluster.memory)}, beside what kernels need"),
    ]
    if found.resident > cluster.memory:
        fused = "" if found.loss == "fused" else "a fused loss, "
        rows.append(("  too much", f"a smaller batch_size, checkpointing, {fused}fsdp2, or context parallelism"))
        rows.append(("  of eager steps", "with --compile less is kept for the backward; that is not planned"))
    at = f"at {cluster.efficiency:.0%} of {cluster.peak / 1e12:,.0f} TFLOP/s (assumed)"
    rows.append(("compute of a step", f"{_ms(compute)} {at}"))
    talk = sum(found.seconds.values())
    if talk == 0:
        return [*rows, ("tokens per second", digits(step.rows * step.length / compute)), *_run(step, tokens, compute)]
    unit = _unit(max(found.sent.values()))
    for name, count in found.sent.items():
        rows.append((f"  {name}", f"{_bytes(count, unit)}, {_ms(found.seconds[name])}"))
    speeds = f"at {cluster.inside / 1e9:,.4g} GB/s in a machine, {cluster.between / 1e9:,.4g} between"
    rows.append(("communication", f"{_ms(talk)}, {digits(talk / compute, 2)} of compute, {speeds}"))
    rate = [step.rows * step.length / seconds for seconds in (compute + talk, max(compute, talk))]
    slow, fast = map(digits, rate)
    rows.append(("tokens per second", f"{slow} (nothing overlaps) to {fast} (everything)"))
    return [*rows, *_run(step, tokens, max(compute, talk), compute + talk)]


def _run(step: Step, tokens: float | None, *seconds: float) -> list[tuple[str, str]]:
    """How long the whole run takes, by the seconds of a step, without evaluations and checkpoints."""
    if tokens is None:
        return []
    steps = math.ceil(tokens / (step.rows * step.length))
    whole = [steps * each for each in seconds]
    unit = next((unit for unit, size in TIMES.items() if whole[-1] >= 2 * size), "seconds")
    length = " to ".join(dict.fromkeys(digits(each / TIMES[unit], 2) for each in whole))
    return [("the run", f"{with_unit(tokens, ' tokens')}, {steps:,} steps: {length} {unit}")]


def _rows(found: Plan) -> str:
    """How a GPU takes its rows."""
    rows = "1 row" if found.at_once == 1 else f"{found.at_once:,} rows"
    return f"{rows} at once, {'once' if found.accumulation == 1 else f'{found.accumulation:,} times'} a step"


def _ms(seconds: float) -> str:
    return f"{digits(1e3 * seconds)} ms"


def _unit(count: float) -> str:
    return next((unit for unit in ("GB", "MB") if count >= BYTES[unit]), "KB")


def _bytes(count: float, unit: str | None = None) -> str:
    unit = unit or _unit(count)
    return f"{count / BYTES[unit]:,.2f} {unit}"
