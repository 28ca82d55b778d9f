"""``metaplastic bench training``: what an optimiser step costs, as ``metaplastic train`` takes it.

The real Trainer takes the steps: master weights in float32, bf16 autocast, clipping, AdamW, nothing logged or saved.
A step lasts from the end of one to the end of the next, by the device's clock on a GPU; times are medians. Rows come
from memory; how fast shards give batches is measured beside it, through the same loader.

Layouts: "packed", rows end to end with the borders of documents known, as ``metaplastic train`` has them; "rows", a
plain batch. The MFU is the rate of the model's FLOPs (training/flops.py; attention by the tokens that it really sees)
over the device's dense bf16 peak or the one that is given, left out where neither is known.

One more step runs under PyTorch's profiler: what copies from device to host, reads a scalar or waits for the device in
it, and where, and which kernels take the device's time. A training step should have none of the former: the host then
runs ahead of the device. On a CPU, which is both, there is nothing to wait for, and no such report.

Compiled steps (``compile``: block by block, training/compiled.py) are compiled before any is timed; how long that took
is told apart, and how many graphs there are.

Peers' kernels are compiled first and tuned in seconds, as :mod:`metaplastic.ops.fla_tuning` says.
"""

import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import calculate_time_spent, counters
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import TrainerCallback

from ..layers import MIXERS
from ..layers.mixer import Mixer
from ..models import MetaplasticConfig, MetaplasticForCausalLM, size
from ..models.checkpointing import checkpoint_activations
from ..ops import dispatch, fla_tuning
from ..tasks import ShardedText, byte_tokenizer, collate_packed, write_shards
from ..training import MetaplasticTrainer, training_arguments
from ..training.compiled import compile_blocks
from ..training.flops import model_flops, peak_flops
from .clock import Clock
from .data_speed import StandardLibrary
from .training_profile import PROFILED, kernels, waits

LAYOUTS = ("packed", "rows")
SECONDS = 1.0  # of the loader
WARM = 2  # steps before those that are timed
LOADER = "loader's speed over the step's"
PEER = " (fla)"  # ends the names of models on flash-linear-attention's kernels


@dataclasses.dataclass(frozen=True)
class Setting:
    """How every model is measured: rows of a step and their tokens, how many steps, and how they are taken."""

    batch: int = 8
    length: int = 2048
    repetitions: int = 10
    bf16: bool = True
    checkpointing: str = "none"
    loss: str = "auto"
    peak_flops: float | None = None  # of the device; None: of its bf16 products, if known
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "length", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.peak_flops is not None and not 0 < self.peak_flops < math.inf:
            raise ValueError(f"peak_flops must be > 0 and finite, got {self.peak_flops}")


def bench_training(
    models: Mapping[str, MetaplasticConfig],
    output: Path,
    setting: Setting,
    *,
    layouts: tuple[str, ...] = LAYOUTS,
    data: str | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every measurement by name, as made: each of ``models`` in each layout, then the loader.

    ``data`` is a folder of shards; None: one is written to ``output``, of the standard library's texts.
    """
    for layout in layouts:
        if layout not in LAYOUTS:
            raise ValueError(f"layouts: unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if (count := torch.cuda.device_count()) > 1:  # the Trainer would take them all in one process
        raise ValueError(f"bench training measures one GPU, and there are {count}: CUDA_VISIBLE_DEVICES=0 leaves one")
    text = ShardedText(Path(data) if data else _shards(output / "shards"), setting.length, seed=0)
    read = loading(text, output, setting.batch)
    calls = peer_calls(models, setting.batch)
    with contextlib.ExitStack() as tuned:
        if calls:
            yield "peers' kernels", _prepare(calls, tuned)
        for name, config in models.items():
            for layout in layouts:
                try:
                    found = bench_step(config, text, output, setting, layout)
                    found[LOADER] = read["tokens per second"] / found["tokens per second"]
                except torch.OutOfMemoryError:
                    found = {"not run": f"out of memory at {setting.batch} x {setting.length} tokens"}
                except Exception as error:  # what a peer lacks here should not end the measurement of ours
                    if not name.endswith(PEER):
                        raise
                    found = {"not run": f"{type(error).__name__}: {error}"}
                _clear()
                yield f"{name}, {layout}{', compiled' if setting.compile else ''}", found
    yield f"loader, {setting.batch} x {setting.length}", read


def with_peers(models: Mapping[str, MetaplasticConfig]) -> dict[str, MetaplasticConfig]:
    """Those models, and behind each the same one on flash-linear-attention's kernels, where they can run here."""
    found: dict[str, MetaplasticConfig] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, config in models.items():
        found[name] = config
        operators = {kind.operator for kind in _mixers(config) if kind.operator}
        if not operators or any("fla" not in dispatch.BACKENDS[op] for op in operators):
            continue
        if any(dispatch.reason_against(op, "fla", device, torch.bfloat16) for op in operators):
            continue
        if any(dispatch.no_gradients(op, "fla") for op in operators):
            continue
        found[name + PEER] = peer = copy.deepcopy(config)
        for mixer, options in (peer.mixer_options or {}).items():
            if MIXERS[mixer].operator:
                options["backend"] = "fla"
    return found


def peer_calls(models: Mapping[str, MetaplasticConfig], batch: int) -> list[fla_tuning.Call]:
    """What flash-linear-attention's kernels will be called with by those of ``models`` that ask for them."""
    found: dict[fla_tuning.Call, None] = {}
    for config in models.values():
        with torch.device("meta"):
            model = MetaplasticForCausalLM(config)
        for layer in model.modules():
            if isinstance(layer, Mixer) and layer.backend == "fla":
                sizes = layer.num_heads, layer.key_size, layer.value_size
                found[fla_tuning.Call(layer.operator, batch, *sizes, gradients=True)] = None
    return list(found)


def _prepare(calls: list[fla_tuning.Call], tuned: contextlib.ExitStack) -> dict[str, Any]:
    """Compiles peers' kernels; until ``tuned`` is closed they are tuned in seconds."""
    began = time.perf_counter()
    try:
        whole = fla_tuning.compile_all(calls)
        tuned.enter_context(fla_tuning.quick())
    except (ImportError, RuntimeError) as error:  # each is compiled and tuned when it is called, then, if it can be
        return {"not prepared": f"{type(error).__name__}: {error}"}
    return {"compile seconds": time.perf_counter() - began, "all": whole, "tuning": fla_tuning.CHANGES}


def bench_step(
    config: MetaplasticConfig, text: ShardedText, output: Path, setting: Setting, layout: str
) -> dict[str, Any]:
    """Steps of one model: time, memory, the backend that ran, and what makes the host wait."""
    rows, watch = _Rows(text, config.vocab_size, setting.batch), _Watch(setting.repetitions)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = MetaplasticForCausalLM(config)
    model.loss_form = setting.loss
    checkpoint_activations(model, setting.checkpointing)
    if setting.compile:
        compile_blocks(model)
    steps, compiling = setting.repetitions + WARM + 2, calculate_time_spent()["total_wall_time"]
    trainer = _trainer(model, rows, output, setting.batch, layout, bf16=setting.bf16, steps=steps)
    trainer.add_callback(watch)
    try:
        trainer.train()
    finally:
        watch.close()
    times, tokens = watch.clock.seconds(), setting.batch * setting.length
    seconds = statistics.median(times)
    found: dict[str, Any] = dataclasses.asdict(setting) | {"layout": layout, "backends": watch.backends(config)}
    del found["peak_flops"]  # below, if it is known
    found |= {"ms": 1e3 * seconds, "least ms": 1e3 * min(times), "most ms": 1e3 * max(times)}
    found |= _costs(config, tokens / seconds, rows.seen(layout), setting)
    if watch.peak is not None:
        found["peak memory GB"] = watch.peak / 1e9
    if setting.compile:
        if watch.graphs[0] != watch.graphs[-1]:
            raise RuntimeError(f"{watch.graphs[-1] - watch.graphs[0]} graphs were compiled while steps were timed")
        found["compile seconds"] = calculate_time_spent()["total_wall_time"] - compiling
        found["graphs"] = watch.graphs[-1] - watch.before
    return found | ({"waits": watch.waits(), "kernels": kernels(watch.events)} if watch.cuda else {})


def _clear() -> None:
    """A model and its optimiser go in a circle of references."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _costs(config: MetaplasticConfig, rate: float, seen: float, setting: Setting) -> dict[str, Any]:
    """Tokens per second and what they are of the device's peak."""
    found = size(config)
    flops = model_flops(found, seen)
    peak = setting.peak_flops
    if peak is None and setting.bf16 and torch.cuda.is_available():
        peak = peak_flops(torch.cuda.get_device_name())
    costs: dict[str, Any] = {"parameters": found.parameters, "tokens per second": rate}
    costs |= {"model FLOPs per token": flops, "model FLOP/s": flops * rate}
    if peak is not None:
        costs |= {"MFU": flops * rate / peak, "peak FLOP/s": peak}
    return costs


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows with the document borders of real text and tokens drawn from the whole vocabulary."""

    def __init__(self, text: ShardedText, vocabulary: int, batch: int):
        source, length = torch.Generator().manual_seed(0), text.block_length
        self.rows = []
        for number in range(batch):
            row = text[number % len(text)]
            ids = torch.randint(0, vocabulary, (length,), generator=source)
            self.rows.append(row | {"input_ids": ids, "labels": ids.index_fill(0, row["starts"], -100)})

    def __len__(self) -> int:
        return 1 << 20  # one pass is longer than any run here

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index % len(self.rows)]

    def seen(self, layout: str) -> float:
        """How many tokens attention sees from a token on average, itself included."""
        total = seen = 0
        for row in self.rows:
            edges = [*row["starts"].tolist(), len(row["input_ids"])] if layout == "packed" else [0, len(row["labels"])]
            for first, last in itertools.pairwise(edges):
                total, seen = total + last - first, seen + (last - first) * (last - first + 1) / 2
        return seen / total


def _plain(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return default_collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])


def _trainer(
    model: MetaplasticForCausalLM, rows: Dataset, output: Path, batch: int, layout: str, *, bf16: bool, steps: int
) -> MetaplasticTrainer:
    arguments = training_arguments(
        output, max_steps=steps, per_device_train_batch_size=batch, learning_rate=1e-4, bf16=bf16, disable_tqdm=True,
        logging_strategy="no", save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    collate = collate_packed if layout == "packed" else _plain
    return MetaplasticTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)


class _Watch(TrainerCallback):
    """``WARM`` steps to warm up, those that are timed, one more, and one under the profiler."""

    def __init__(self, repetitions: int):
        self.repetitions, self.cuda, self.clock = repetitions, torch.cuda.is_available(), Clock()
        self.peak: int | None = None
        self.before, self.graphs = _graphs(), [0]  # compiled so far: before all steps, at the end of each timed one
        self.events: list[Any] = []
        self._open = contextlib.ExitStack()

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step == WARM:
            self.graphs = []
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
        if WARM <= step <= WARM + self.repetitions:
            self.clock.mark()
            self.graphs.append(_graphs())
        if step == WARM + self.repetitions and self.cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated()
        if step == WARM + 1 + self.repetitions:  # the synchronisation above is behind it
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else every profile writes two lines on the terminal
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            self.profile = self._open.enter_context(profile(activities=activities, with_stack=True, acc_events=True))
            self._open.enter_context(record_function(PROFILED))
        if step == WARM + 2 + self.repetitions:
            self.close()
            self.events = list(self.profile.events() or [])

    def close(self) -> None:
        """The profiler of a step that did not end would go on, and slow down what is measured next."""
        self._open.close()

    def backends(self, config: MetaplasticConfig) -> list[str]:
        """Those whose operators the profiled step shows; of those that show none, what has run in this process."""
        shown = {name.split("::")[1].removesuffix("_backward") for name in self._names() if "metaplastic::" in name}
        if shown:
            return sorted(shown)
        operators = {kind.operator for kind in _mixers(config) if kind.operator}
        return sorted(f"{op}_{backend}" for op in operators for backend in dispatch.used().get(op, ())) or ["PyTorch's"]

    def _names(self) -> set[str]:
        return {event.name for event in self.events}

    def waits(self) -> dict[str, Any]:
        return waits(self.events, self.cuda)


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _mixers(config: MetaplasticConfig) -> set[Any]:
    return {MIXERS[name] for name in config.mixers}


def _shards(folder: Path) -> Path:
    if not (folder / "index.json").exists():
        source = StandardLibrary()
        write_shards(source, source.origin, byte_tokenizer(), folder, held_out=0.0)
    return folder


def loading(text: ShardedText, output: Path, batch: int) -> dict[str, Any]:
    """Tokens per second that the Trainer's loader brings to the device; the median of five, each over a fifth."""
    one = {"attention": {"num_heads": 1}}
    least = MetaplasticConfig(vocab_size=4, hidden_size=4, num_hidden_layers=1, mixers="attention", mixer_options=one)
    model = MetaplasticForCausalLM(least)
    trainer = _trainer(model, text, output, batch, "packed", bf16=False, steps=1)
    batches, rates = _endless(trainer.get_train_dataloader()), []
    next(batches)
    for _ in range(5):
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS / 5:
            tokens += trainer._prepare_inputs(next(batches))["input_ids"].numel()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(tokens / (time.perf_counter() - began))
    return {"tokens per second": statistics.median(rates), "least": min(rates), "most": max(rates)}


def _endless(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader
