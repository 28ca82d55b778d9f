"""Several processes for one run: the recipe says what a step is, their number only how it is shared.

A step takes ``batch_size x accumulation`` rows, whoever computes them: D processes of data parallelism take a D-th
each, in the order in which one process would take them. Where rows run out, a process without any gets one in which
nothing is predicted; the loss is divided by the number of labels of all. So a run may stop on one number of processes
and go on on another.

* ``ddp``: every process holds the model; gradients are summed (PyTorch's DistributedDataParallel).
* ``fsdp2``: every process holds a part of each weight, its gradient and its optimiser state (fully_shard), a block's
  weights are gathered while it computes. Weights stay float32 and autocast chooses what is computed in bfloat16, as
  with one process: states, decays and priors are float32.
* Context parallelism (``training/context.py``): C neighbours share rows and take a shard of each; the others as above.
"""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate import DistributedDataParallelKwargs, PartialState
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from transformers import Trainer

from ..models.modeling import MetaplasticBlock
from ..tasks.stream import PackedStream
from .config import TrainConfig
from .context import IGNORED, context_group, parallelise_context

SECONDS_OF_THE_FIRST = 5.0
NOBODY = -1  # the number of a row that is there only so that a process has one


class Share(NamedTuple):
    """What one process does of every step."""

    rows: int  # at once
    accumulation: int  # how often


def share(config: TrainConfig) -> Share:
    """Raises ValueError where the processes that were started cannot run ``config``."""
    world = processes()
    started = "but one process was started (torchrun --nproc-per-node N -m metaplastic train ...)"
    if world == 1 and config.parallel is not None:
        raise ValueError(f"parallel: got {config.parallel!r}, {started}")
    if world == 1 and config.context_parallel > 1:
        raise ValueError(f"context_parallel: got {config.context_parallel}, {started}")
    if world % config.context_parallel:
        raise ValueError(f"context_parallel: got {config.context_parallel} of {world} processes, expected a divisor")
    if config.context_parallel > 1 and config.compile and config.checkpointing == "selective":
        raise ValueError("checkpointing: got 'selective', but with compile and context_parallel expected none or full")
    data, rows = world // config.context_parallel, config.batch_size * config.accumulation
    if rows % data:
        product = f"{config.batch_size} x {config.accumulation} = {rows} rows a step"
        raise ValueError(f"batch_size x accumulation: got {product} for {data} processes, expected a multiple")
    own = rows // data
    at_once = max(size for size in range(1, min(config.batch_size, own) + 1) if own % size == 0)
    return Share(at_once, own // at_once)


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def in_processes(config: TrainConfig) -> dict[str, Any]:
    """How a run is shared, for its results."""
    count = processes()
    parallel = (config.parallel or "ddp") if count > 1 else None
    return {"processes": count, "parallel": parallel, "context_parallel": config.context_parallel}


def is_first() -> bool:
    """Of the processes, the one that writes files and says what happens."""
    return int(os.environ.get("RANK", 0)) == 0


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Of several processes the first speaks, also of an error that all have.

    The others' errors wait a while, in which a launcher ends them, as it does where one has failed; an error that is
    not of the first, or not its fault, is heard after that.
    """
    if is_first():
        yield
        return
    logging.getLogger("metaplastic").setLevel(logging.ERROR)
    try:
        yield
    except Exception:
        time.sleep(SECONDS_OF_THE_FIRST)
        raise


@contextlib.contextmanager
def first_comes_first() -> Iterator[None]:
    """A context which the other processes enter when the first has left it; where it fails, so do they."""
    if processes() == 1:
        yield
        return
    state = PartialState(cpu=not torch.accelerator.is_available())
    if not is_first():
        try:
            state.wait_for_everyone()
        except RuntimeError as error:  # it is gone
            raise ValueError("the first process has ended, and said why") from error
    yield
    if is_first():
        state.wait_for_everyone()


def sharding(config: TrainConfig) -> dict[str, Any]:
    """What Hugging Face's TrainingArguments want to know of it."""
    if config.parallel != "fsdp2":
        # No buffer of a model changes in training (a prior is one): none has to be sent before every forward pass.
        return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": [MetaplasticBlock.__name__]}
    return {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT", **wrap}}


class Shared(BatchSampler):
    """The batches of process ``index`` of ``count``: every step of all of them takes the next rows of ``sampler``."""

    def __init__(self, sampler: Any, batch_size: int, accumulation: int, index: int, count: int):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, False
        self.accumulation, self.index, self.count = accumulation, index, count

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        while step := list(islice(rows, self.batch_size * self.accumulation * self.count)):
            for begin in range(0, len(step), self.batch_size * self.count):
                own = begin + self.index * self.batch_size
                yield step[own : own + self.batch_size] or [NOBODY]

    def __len__(self) -> int:
        steps, rest = divmod(len(self.sampler), self.batch_size * self.accumulation * self.count)
        return steps * self.accumulation + -(-rest // (self.batch_size * self.count))


class NoRows(dict):
    """A batch of which nothing counts."""


class _Rows(Dataset):
    """Those of a dataset, and the one that nobody wants."""

    def __init__(self, rows: Any, collate: Any):
        self.rows, self._collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        if number != NOBODY:
            return self.rows[number]
        row = dict(self.rows[0])
        labels = row["labels"]
        silent = torch.full_like(labels, IGNORED) if isinstance(labels, torch.Tensor) else [IGNORED] * len(labels)
        return NoRows(row | {"labels": silent})

    def collate(self, rows: list[Any]) -> Any:
        return NoRows(self._collate([dict(rows[0])])) if isinstance(rows[0], NoRows) else self._collate(rows)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)


class ParallelTrainer(Trainer):
    """Shares rows as the module's docstring says. ``context``: how many neighbours share a row."""

    def __init__(self, *args, context: int = 1, **kwargs):
        super().__init__(*args, **kwargs)
        self.context = context
        if context > 1:
            parallelise_context(self.model, context_group(context))  # pyright: ignore[reportArgumentType]

    def train(self, *args, **kwargs) -> Any:
        """Without what torch 2.13 says of ``broadcast_buffers`` (:func:`sharding`), for which 2.11 has no other name.

        That new name would send buffers once, at the beginning; ours are the same in every process anyhow.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return super().train(*args, **kwargs)

    @property
    def shares(self) -> int:
        """How many parts the rows of a step are cut into."""
        return self.args.world_size // self.context

    @property
    def own_share(self) -> int:
        return self.args.process_index // self.context

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        """Under DDP gradients are views of what is sent: one copy of them less to hold and to make."""
        arguments = super()._build_accelerator_args(**kwargs)
        for handler in arguments["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is None:
            return
        state: Any = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:  # where accelerate would not shard, and not say so
            state.distributed_type = DistributedType.FSDP
            options: Any = self.args.fsdp_plugin_args
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
            self.is_fsdp_enabled = True
        # Accelerate would hand every weight to the model in bfloat16, decays and priors too: autocast knows better.
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()

    def autocast_smart_context_manager(self, *args, **kwargs) -> contextlib.AbstractContextManager:
        """Accelerate wraps a model in autocast, but not one that it shards: with bf16 it would compute in float32."""
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """Of a stream: without workers, and without accelerate's loader, which reads a batch ahead."""
        stream = self.train_dataset
        if not isinstance(stream, PackedStream):
            return super().get_train_dataloader()
        if self.args.dataloader_num_workers:
            got = f"got dataloader_num_workers = {self.args.dataloader_num_workers}"
            raise ValueError(f"a PackedStream is read in the process that trains: {got}, expected 0")
        return DataLoader(
            stream.share(self._train_batch_size, self.own_share, self.shares),  # pyright: ignore
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # or each start of a loader would draw from the run's own random numbers
        )

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, *args, **kwargs):
        """Accelerate's own sharing takes rows twice where they do not divide evenly."""
        whole: Any = super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, *args, **kwargs)
        one = getattr(whole.batch_sampler, "batch_sampler", None)  # as one process would take the rows
        if self.args.world_size == 1 or isinstance(dataset, IterableDataset) or type(one) is not BatchSampler:
            return whole
        if "labels" not in (row := whole.dataset[0]):
            if self.context > 1:
                raise ValueError(f"train_dataset: got rows of {sorted(row)}, expected labels for context_parallel")
            whole.batch_sampler.even_batches = is_training or self.is_fsdp_enabled  # every process has as many batches
            return whole
        accumulation = self.args.gradient_accumulation_steps if is_training else 1
        rows = _Rows(whole.dataset, whole.collate_fn)
        names = ("num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context")
        names += ("persistent_workers", "prefetch_factor") if whole.num_workers else ()
        return DataLoaderShard(  # pyright: ignore[reportReturnType]
            rows,
            device=whole.device,
            collate_fn=rows.collate,
            batch_sampler=Shared(one.sampler, batch_size, accumulation, self.own_share, self.shares),
            _non_blocking=whole._non_blocking,
            **{name: getattr(whole, name) for name in names},
        )

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Counted on the host and handed over without waiting for the device.

        At least one: a step in which nothing is predicted has the loss 0, not 0 / 0. Neighbours count a row once.
        """
        average, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            count = super()._get_num_items_in_batch(batch_samples, torch.device("cpu"))
        finally:
            self.args.average_tokens_across_devices = average
        if not isinstance(count, torch.Tensor):
            return count
        whole: Any = count.to(device, non_blocking=True)
        if average and self.args.world_size > 1:
            whole = self.accelerator.gather(whole)
        return (whole.sum() // self.context).clamp(min=1)
