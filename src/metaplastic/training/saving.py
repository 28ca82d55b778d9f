"""Saving and going on: whole checkpoints from any number of processes, written while the training goes on.

A checkpoint is that of one process, however many train: the weights as safetensors, the state of the optimiser under
the numbers of its parameters. Sharded tensors are gathered one at a time, and the first process writes; to go on, every
process reads all and keeps its part. So a run may go on on another number of processes.

Asynchronously, training stops for a copy to the memory of the host; a thread writes it, flushes it to disk, seals and
renames it. The next save waits for that, as does whatever ends the training; an error of the thread is raised there.
"""

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from .checkpoint import STAGING, checkpoints, clear_staging, flush, remove, saving, seal
from .divergence import check_weights
from .parallel import ParallelTrainer

PICKLED_ARGUMENTS = "training_args.bin"  # Hugging Face writes it, nothing of ours reads it: no pickles in our folders
STREAM = "stream.json"  # in a checkpoint: the place in a stream of text
OPTIMISER, SCHEDULE = "optimizer.pt", "scheduler.pt"
logger = logging.getLogger("metaplastic")


class SavingTrainer(ParallelTrainer):
    """See the module's docstring. ``asynchronous``: whether checkpoints are written beside the training.

    None: where it trains on an accelerator. On a CPU the copy would take memory, and the writing cores, that the
    training needs.

    ``beside``, if set, is called with every folder that a model is saved to, to write what belongs beside it.
    ``run``, if set, is what checkpoints are sealed with: which run they are of.
    """

    def __init__(self, *args, asynchronous: bool | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.beside: Callable[[Path], None] | None = None
        self.run: str | None = None
        self.asynchronous = self.args.device.type != "cpu" if asynchronous is None else asynchronous
        self._staged = False
        self._later: list[Callable[[], Any]] = []  # what the thread will write
        self._host = _Host()
        self._writing: Future | None = None

    def train(self, *args, **kwargs) -> Any:
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            try:
                self.finish_saving()
            except OSError as error:  # the training's own error says more
                logger.error("%s", error)
            raise
        self.finish_saving()
        return result

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is whole, and raises what kept it from being so."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def place(self) -> dict[str, Any] | None:
        """What of the data a checkpoint has to hold; None: nothing."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_fsdp_enabled:  # every process gathers, the first keeps
            self.finish_saving()  # which is done with the memory of the host
            self._save(output_dir, self._host.take(self._weights(), self.args.should_save))
        else:
            super().save_model(output_dir, _internal_call)

    def _weights(self) -> dict[str, Any]:
        model: Any = self.model
        return model.state_dict(keep_vars=True)  # the parameters themselves, by which tied ones are known

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        if self._staged and self.asynchronous:
            if self.args.should_save:
                weights = self._host.take(self._weights(), True) if state_dict is None else state_dict
                self._later.append(partial(self.model.save_pretrained, str(folder), state_dict=weights))  # pyright: ignore
                folder.mkdir(parents=True, exist_ok=True)
                reader = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if reader is not None:
                    reader.save_pretrained(str(folder))  # pyright: ignore
        else:
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            (folder / PICKLED_ARGUMENTS).unlink(missing_ok=True)
            if self.beside is not None:
                self.beside(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled and not self.asynchronous:
            return super()._save_optimizer_and_scheduler(output_dir)
        optimiser: Any = self.optimizer
        state = self._host.take(optimiser.state_dict(), self.args.should_save)
        if self.args.should_save:
            write = partial(torch.save, state, os.path.join(output_dir, OPTIMISER))
            self._later.append(write) if self.asynchronous else write()
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULE))  # pyright: ignore

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._staged else folder

    def _save_checkpoint(self, model, trial) -> None:
        """Hugging Face writes into the staging folder; the rename makes it a checkpoint."""
        self.finish_saving()
        # Asked for by name they are sharded: after an evaluation those around the blocks would still be whole.
        weights = [weight for weight in self._weights().values() if isinstance(weight, Parameter)]
        check_weights(weights, self.state.global_step, self.args.learning_rate)
        run, complete = Path(super()._get_output_dir(trial)), None
        name = f"checkpoint-{self.state.global_step}"
        with saving(name, run):
            self._staged, self._later = True, []
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staged = False
            self.accelerator.wait_for_everyone()  # each has written its random state
            if self.args.should_save:
                complete = self._completion(run / STAGING / name, run)
                if not self.asynchronous:
                    complete()
        if complete is not None and self.asynchronous:
            thread = ThreadPoolExecutor(1, "checkpoint")
            self._writing = thread.submit(_guarded, name, run, complete)
            thread.shutdown(wait=False)  # it ends with this checkpoint
        self.accelerator.wait_for_everyone()

    def _completion(self, staged: Path, run: Path) -> Callable[[], None]:
        """What is left to do, without a look at what goes on changing."""
        self._mend_best_checkpoint(staged, run)
        if (place := self.place()) is not None:
            (staged / STREAM).write_text(json.dumps(place) + "\n")
        best = Path(self.state.best_model_checkpoint or "").name
        later, self._later = self._later, []
        return partial(self._complete, staged, run, later, self.state.global_step, best)

    def _complete(self, staged: Path, run: Path, later: list[Callable[[], Any]], step: int, best: str) -> None:
        """Writes what waits, and gives the checkpoint its seal and its name."""
        for write in later:
            write()
        seal(staged, self.run, step)
        for file in staged.rglob("*"):
            flush(file)
        flush(staged)
        if (run / staged.name).exists():  # from an earlier attempt at the same step
            remove(run / staged.name)
        os.replace(staged, run / staged.name)
        flush(run)
        clear_staging(run)
        self._rotate(run, best)

    def _mend_best_checkpoint(self, staged: Path, run: Path) -> None:
        """The best checkpoint's path, if it is the one in the staging folder, must be that after the rename."""
        if Path(self.state.best_model_checkpoint or "") != staged:
            return
        self.state.best_model_checkpoint = str(run / staged.name)
        file = staged / "trainer_state.json"
        state = json.loads(file.read_text())
        state["best_model_checkpoint"] = self.state.best_model_checkpoint
        file.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

    def _rotate(self, run: Path, best: str) -> None:
        """Keeps ``save_total_limit`` checkpoints, the newest and the best among them."""
        found = checkpoints(run)
        spare = [checkpoint for checkpoint in found[:-1] if checkpoint.name != best]
        surplus = len(found) - (self.args.save_total_limit or len(found))
        for old in spare[: max(surplus, 0)]:
            remove(old)

    def _load_best_model(self) -> None:
        self.finish_saving()
        if self.is_fsdp_enabled:  # Hugging Face would look for a file of its own
            self._load_shards(Path(self.state.best_model_checkpoint or ""))
        else:
            super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        try:
            if self.is_fsdp_enabled:
                self._load_shards(Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            found = " ".join(str(error).split())
            raise ValueError(f"the checkpoint does not fit the model: {found[:300]}") from error

    @torch.no_grad()
    def _load_shards(self, folder: Path) -> None:
        """Of the whole weights, what this process holds."""
        own, given = self._weights(), {}
        for file in sorted(folder.glob("*.safetensors")):
            given |= load_file(file)
        if not given:
            raise ValueError(f"the checkpoint {folder} holds no weights, expected safetensors")
        for name in own.keys() & given.keys():
            if own[name].shape != given[name].shape:
                sizes = f"{list(given[name].shape)}, expected {list(own[name].shape)}"
                raise ValueError(f"the checkpoint does not fit the model: size mismatch for {name}: got {sizes}")
            own[name].copy_(_part(given[name], own[name]))
        present = {id(own[name]) for name in own.keys() & given.keys()}  # a tied weight is saved under one of its names
        missing = [name for name, weight in own.items() if id(weight) not in present]
        self._issue_warnings_after_load(_Fit(missing, sorted(given.keys() - own.keys())))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A checkpoint that does not fit is an error. A tied weight is saved under one of its names only."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing, unexpected = sorted(set(load_result.missing_keys) - set(tied)), sorted(load_result.unexpected_keys)
        if missing or unexpected:
            found = f"{len(missing)} weights missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}"
            raise ValueError(f"the checkpoint does not fit the model: {found}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        optimiser: Any = self.optimizer
        state = torch.load(os.path.join(checkpoint, OPTIMISER), map_location="cpu", mmap=True, weights_only=True)
        weights = [weight for group in optimiser.param_groups for weight in group["params"]]
        for number, of_one in state["state"].items():
            weight = weights[number]
            for name, value in of_one.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == weight.shape:
                    of_one[name] = _part(value, weight)
        optimiser.load_state_dict(state)
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULE), map_location="cpu", weights_only=True))


class _Fit:
    """As PyTorch says what did not fit."""

    def __init__(self, missing_keys: list[str], unexpected_keys: list[str]):
        self.missing_keys, self.unexpected_keys = missing_keys, unexpected_keys


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """What ``like`` holds of a tensor that every process has whole."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, like.placements, src_data_rank=None)


class _Host:
    """Copies of tensors in the memory of the host: the same memory at every save, pinned where that is faster."""

    def __init__(self) -> None:
        self._memory: dict[tuple, Tensor] = {}

    @torch.no_grad()
    def take(self, tree: Any, keep: bool) -> Any:
        """``tree`` with its tensors whole and copied. Every process gathers what is sharded, some ``keep`` it."""
        copies: dict[int, Tensor | None] = {}

        def copy(x: Any, path: tuple) -> Any:
            if isinstance(x, dict):
                return {name: copy(each, (*path, name)) for name, each in x.items()}
            if isinstance(x, (list, tuple)):
                return type(x)(copy(each, (*path, number)) for number, each in enumerate(x))
            if not isinstance(x, Tensor):
                return x
            if id(x) not in copies:
                whole = x.full_tensor() if isinstance(x, DTensor) else x.detach()
                copies[id(x)] = self._copy(whole, path) if keep else None
            return copies[id(x)]

        taken = copy(tree, ())
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return taken

    def _copy(self, x: Tensor, path: tuple) -> Tensor:
        memory = self._memory.get(path)
        if memory is None or memory.shape != x.shape or memory.dtype != x.dtype:
            memory = self._memory[path] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return memory.copy_(x, non_blocking=True)


def _guarded(name: str, run: Path, complete: Callable[[], None]) -> None:
    with saving(name, run):
        complete()
