"""What each process of ``metaplastic bench parallel`` does: steps of the real Trainer, as ``metaplastic train`` has it.

    python -m metaplastic.evaluation.parallel_steps FOLDER WAY

does the jobs in ``FOLDER/WAY.jobs.json`` one after another and keeps what this process found in
``FOLDER/WAY-RANK.json``, written anew after each. A job is a model and a run of it: the same on any number of processes
but for its ``parallel`` and ``context_parallel``. Rows are drawn from a seed, with documents and numbers of labels that
differ from row to row.
"""

import contextlib
import dataclasses
import gc
import json
import os
import stat
import statistics
import sys
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.tensor import DTensor
from torch.profiler import profile, record_function
from torch.utils.data import Dataset, default_collate
from transformers import TrainerCallback, set_seed

from .. import results
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..models.checkpointing import checkpoint_activations
from ..models.loss import backend
from ..ops import dispatch
from ..tasks import collate_packed
from ..training import MetaplasticTrainer, TrainConfig, last_checkpoint
from ..training.checkpoint import step_of
from ..training.compiled import compile_blocks
from ..training.interrupt import Interruption
from ..training.run import _arguments
from ..training.trainer import training_arguments
from .clock import Clock
from .training_profile import PROFILED, waits

IGNORED = -100
WARM = 3  # steps before the one that is profiled, the last


@dataclasses.dataclass(frozen=True)
class Job:
    """``logged`` steps of which loss and gradient norm are kept, one in between, and ``timed`` ones.

    ``until``: a run that is saved and left at that step; it goes on from where the job before it, of the same folder
    ``run``, has left it. ``profiled``: what makes the host wait in a step is looked for as well.
    """

    name: str
    network: dict[str, Any]  # of MetaplasticConfig
    config: dict[str, Any]  # of TrainConfig
    packed: bool = True
    logged: int = 3
    timed: int = 0
    until: int | None = None
    run: str | None = None
    profiled: bool = False


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """``count`` rows over and over, which no two processes can share evenly: every row has labels of its own number."""

    def __init__(self, count: int, length: int, vocabulary: int):
        source = torch.Generator().manual_seed(0)
        self.rows = []
        for number in range(count):
            ids = torch.randint(0, vocabulary, (length,), generator=source)
            starts = torch.randint(1, length, (1 + number % 3,), generator=source).sort().values
            labels = ids.clone()
            labels[: number * length // (2 * count)] = IGNORED
            self.rows.append({"input_ids": ids, "labels": labels.index_fill(0, starts, IGNORED), "starts": starts})

    def __len__(self) -> int:
        return len(self.rows) << 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index % len(self.rows)]


def _whole(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Every row one document."""
    return default_collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])


class _Watch(TrainerCallback):
    """Asks for a log in the first steps, keeps when later ones end, and leaves a run where it is to be left."""

    def __init__(self, job: Job):
        self.job, self.cuda, self.clock = job, torch.cuda.is_available(), Clock()
        self.waits: dict[str, Any] = {}
        self._open = contextlib.ExitStack()
        self.memory: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs):
        step, begin = state.global_step, self.job.logged + 1
        control.should_log |= step <= self.job.logged or self.job.until is not None
        control.should_training_stop |= step == self.job.until
        if step == begin and self.cuda:
            torch.cuda.reset_peak_memory_stats()
        if self.job.timed and begin <= step <= begin + self.job.timed:
            self.clock.mark()
        if self.job.timed and step == begin + self.job.timed and self.cuda:
            torch.cuda.synchronize()
            self.memory = {"peak memory GB": torch.cuda.max_memory_allocated() / 1e9}
        if self.job.profiled and self.cuda and step == WARM:
            self.profile = self._open.enter_context(profile(with_stack=True, acc_events=True))
            self._open.enter_context(record_function(PROFILED))
        if self.job.profiled and self.cuda and step == WARM + 1:
            self._open.close()
            self.waits = {"waits": waits(list(self.profile.events() or []), self.cuda)}


def do(job: Job, folder: Path) -> dict[str, Any]:
    """One job, in a process of as many as the environment says."""
    config = TrainConfig(**job.config)
    arguments: Any = _arguments(config, folder / (job.run or "steps"))
    arguments.logging_strategy = training_arguments(folder, logging_strategy="no").logging_strategy
    arguments.train_sampling_strategy, arguments.disable_tqdm = "sequential", True
    set_seed(config.seed)
    with arguments.device:  # which is this process's own
        model = MetaplasticForCausalLM(MetaplasticConfig.from_dict(job.network))
    model.loss_form = config.loss
    checkpoint_activations(model, config.checkpointing)
    if config.compile:
        compile_blocks(model, pieces=config.context_parallel > 1)
    rows = _Rows(config.batch_size * config.accumulation, config.block_length, model.config.vocab_size)
    watch, products = _Watch(job), set()
    model.model.layers[0].register_forward_pre_hook(lambda *_: products.add(_autocast(arguments.device.type)))
    trainer = MetaplasticTrainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collate_packed if job.packed else _whole,
        callbacks=[Interruption(), watch], context=config.context_parallel,
    )  # fmt: skip
    trainer.run = "bench parallel"
    checkpoint = last_checkpoint(folder / job.run) if job.run else None
    began = step_of(checkpoint) if checkpoint else 0
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "losses": [entry["loss"] for entry in entries],
        "gradient norms": [entry["grad_norm"] for entry in entries],
        "began at step": began,
        "ended at step": trainer.state.global_step,
        "rows at once": arguments.per_device_train_batch_size,
        "accumulation": arguments.gradient_accumulation_steps,
        "rows of a step": config.batch_size * config.accumulation,
        "tokens of a row": config.block_length,
        "bf16": config.bf16,
        "products": sorted(products),
        "checkpointing": config.checkpointing,
        "compile": config.compile,
        "loss": backend(config.loss, model.lm_head, arguments.device.type, _product(config, model)) or "plain",
        "layout": "packed" if job.packed else "rows of one document",
        "backends": dispatch.used(),
        "processes": arguments.world_size,
        "exchange": dist.get_backend() if dist.is_initialized() else None,
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),  # pyright: ignore
        "weights, gradients, optimiser GB": _persistent(trainer) / 1e9,
    }
    times = [1e3 * seconds for seconds in watch.clock.seconds()]
    return found | ({"ms": statistics.median(times), "all ms": times} if times else {}) | watch.memory | watch.waits


def _autocast(device: str) -> str:
    """What matrix products are computed in here, of float32 weights."""
    return str(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32)


def _product(config: TrainConfig, model: MetaplasticForCausalLM) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else model.dtype


def _persistent(trainer: Any) -> int:
    """Bytes of this process that outlive a layer: weights, a gradient of each, the state of the optimiser."""

    def size(x: Any) -> int:
        own = x.to_local() if isinstance(x, DTensor) else x
        return own.numel() * own.element_size()

    weights = sum(size(weight) for weight in trainer.model.parameters())
    states = (x for state in trainer.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    return 2 * weights + sum(size(x) for x in states)


def main(folder: Path, way: str) -> None:
    rank = int(os.environ.get("RANK", 0))
    jobs = [Job(**job) for job in json.loads((folder / f"{way}.jobs.json").read_text())]
    found: dict[str, Any] = {}
    for job in jobs:
        began = time.perf_counter()
        try:
            found[job.name] = do(job, folder)
        except torch.OutOfMemoryError:
            if job.config["parallel"] or job.config["context_parallel"] > 1:
                raise  # the others wait for this process
            found[job.name] = {"not run": "out of memory"}
        found[job.name]["seconds in all"] = round(time.perf_counter() - began, 1)
        if torch.cuda.is_available():
            found["NCCL"] = ".".join(map(str, nccl.version()))
            peers = (torch.cuda.can_device_access_peer(0, other) for other in range(1, torch.cuda.device_count()))
            found["GPUs reach each other's memory"] = all(peers)
        results.write_json(folder / f"{way}-{rank}.json", found)
        gc.collect()  # a model and its optimiser go in a circle of references
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if rank == 0:
            print(f"{way}: {job.name}: {found[job.name]['seconds in all']} s", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def end_with_parent(pipe: FileIO) -> threading.Thread:
    """Ends this process, wherever it waits, when the one that holds the other end of ``pipe`` is gone."""

    def wait() -> None:
        while pipe.read(1):
            pass
        os._exit(1)

    watching = threading.Thread(target=wait, daemon=True)
    watching.start()
    return watching


if __name__ == "__main__":
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        end_with_parent(FileIO(0, closefd=False))
    main(Path(sys.argv[1]), sys.argv[2])
