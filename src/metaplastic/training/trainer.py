"""The Hugging Face Trainer, mended.

* Parameters that mixers list in ``no_weight_decay`` (A_log, dt_bias, D, b_scale, prior_log) get no weight decay.
* A checkpoint is written to a staging folder and renamed when complete: a killed process leaves a whole one or none.
* A run resumed from a checkpoint logs and computes what the undisturbed one does, and stops where that stops.
* ``evaluate`` averages over tokens, so that the loss does not depend on the batch size or the last, smaller batch.
* Logs carry tokens per second, and the progress bar shows them beside the loss.
* A :class:`~metaplastic.tasks.PackedStream` to train on goes on with the very next block after a checkpoint: its place
  is in the checkpoint, and no batch is read again to be skipped. Its "epoch" in logs is the number of passes completed.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..tasks.stream import PackedStream
from .checkpoint import STAGING, checkpoints, clear_staging, flush, remove, saving, seal
from .divergence import named_divergence
from .progress import Bar, Lines

PICKLED_ARGUMENTS = "training_args.bin"  # Hugging Face writes it, nothing of ours reads it: no pickles in our folders
STREAM = "stream.json"  # in a checkpoint: the place in a stream of text


def training_arguments(output: str | os.PathLike, **overrides: Any) -> TrainingArguments:
    """TrainingArguments with our defaults: token counting, safe saving, nothing reported to third parties."""
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "report_to": [],
        "remove_unused_columns": False,
        "include_num_input_tokens_seen": "all",
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # it would log a past average in place of a NaN
        "disable_tqdm": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cpu": not torch.accelerator.is_available(),  # or Hugging Face refuses bf16 where there is only a CPU
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "save_total_limit": 2,
        "label_names": ["labels"],
        "use_cache": True,  # of the saved model; in training ours writes no cache anyway
    }
    return TrainingArguments(**(defaults | overrides))


class MetaplasticTrainer(Trainer):
    """See the module's docstring. Takes the arguments of :class:`transformers.Trainer`.

    ``beside``, if set, is called with every folder that a model is saved to, to write what belongs beside it.
    ``run``, if set, is what checkpoints are sealed with: which run they are of.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.beside: Callable[[Path], None] | None = None
        self.run: str | None = None
        self._staged = False
        self._clock: tuple[float, int] | None = None  # time and tokens at the last log
        bar = self.pop_callback(ProgressCallback) is not None
        self.pop_callback(PrinterCallback)
        self.add_callback(Bar if bar else Lines)
        self.add_callback(_Course(self))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        spared = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in getattr(module, "no_weight_decay", ())
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in spared]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the speed since the last log (``start_time`` would add Hugging Face's, which counts evaluations)."""
        if "loss" in logs and self._clock is not None:
            now, tokens = time.perf_counter(), int(self.state.num_input_tokens_seen)
            logs["tokens_per_second"] = round((tokens - self._clock[1]) / max(now - self._clock[0], 1e-9), 1)
            self._clock = (now, tokens)
        super().log(logs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        with named_divergence(self.state.global_step + 1, self.args.learning_rate):
            return super().training_step(model, inputs, *args, **kwargs)

    def _get_num_items_in_batch(self, *args, **kwargs) -> Any:
        """At least one: a step in which nothing is predicted has the loss 0, not 0 / 0."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return count.clamp(min=1) if isinstance(count, torch.Tensor) else count

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean negative log-likelihood per predicted token (nats), its exponential, and the number of tokens."""
        model: Any = self.model
        training = model.training
        model.eval()
        loader: Any = self.get_eval_dataloader(eval_dataset)
        if self.args.world_size > 1 and not self.is_fsdp_enabled:  # sharded models must do the same number of batches
            loader.batch_sampler.even_batches = False  # or some rows are counted twice
        self.callback_handler.eval_dataloader = loader
        total, count = 0.0, 0
        for inputs in loader:
            inputs = self._prepare_inputs(inputs)
            predicted = int((inputs["labels"][..., 1:] != -100).sum())
            with named_divergence(self.state.global_step, self.args.learning_rate), self.accelerator.autocast():
                loss = model(**inputs, num_items_in_batch=1, use_cache=False).loss
            total, count = total + float(loss), count + predicted
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        model.train(training)
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(torch.tensor([total, count], dtype=torch.float64, device=self.args.device))
            total, count = float(totals[0]), int(totals[1])
        if count == 0:
            raise ValueError("eval_dataset has no token to predict: all labels are -100, or there are no rows")
        loss = total / count
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def get_train_dataloader(self) -> DataLoader:
        """Of a stream: without workers, and without accelerate's loader, which reads a batch ahead."""
        stream = self.train_dataset
        if not isinstance(stream, PackedStream):
            return super().get_train_dataloader()
        if self.args.dataloader_num_workers:
            got = f"got dataloader_num_workers = {self.args.dataloader_num_workers}"
            raise ValueError(f"a PackedStream is read in the process that trains: {got}, expected 0")
        return DataLoader(
            stream.share(self._train_batch_size, self.args.process_index, self.args.world_size),  # pyright: ignore
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # or each start of a loader would draw from the run's own random numbers
        )

    def place(self) -> dict[str, Any] | None:
        """Where a stream stands after the steps done; None for other data."""
        if not isinstance(self.train_dataset, PackedStream):
            return None
        batches = self.state.global_step * self.args.gradient_accumulation_steps * self.args.world_size
        return self.train_dataset.state_dict(batches * self._train_batch_size)  # pyright: ignore[reportOperatorIssue]

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        """Of a stream no batch is skipped to come to the checkpoint: it goes there.

        How often to log, save and evaluate is what this call says, not what the checkpoint's did.
        """
        trained = super()._init_training_state(*args, **kwargs)
        self.state.compute_steps(self.args, self.state.max_steps)
        if not isinstance(self.train_dataset, PackedStream):
            return trained
        if checkpoint := kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None):
            self.train_dataset.load_state_dict(json.loads(Path(checkpoint, STREAM).read_text()))
        return 0, 0

    def _run_epoch(self, *args, **kwargs) -> None:
        """Resumed at its last step, Hugging Face's loop would take one step more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _load_from_checkpoint(self, *args, **kwargs) -> None:
        try:
            super()._load_from_checkpoint(*args, **kwargs)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            found = " ".join(str(error).split())
            raise ValueError(f"the checkpoint does not fit the model: {found[:300]}") from error

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A checkpoint that does not fit is an error. A tied weight is saved under one of its names only."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing, unexpected = sorted(set(load_result.missing_keys) - set(tied)), sorted(load_result.unexpected_keys)
        if missing or unexpected:
            found = f"{len(missing)} weights missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}"
            raise ValueError(f"the checkpoint does not fit the model: {found}")

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._staged else folder

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir or ".")
            (folder / PICKLED_ARGUMENTS).unlink(missing_ok=True)
            if self.beside is not None:
                self.beside(folder)

    def _save_checkpoint(self, model, trial) -> None:
        """Hugging Face writes into the staging folder; the rename makes it a checkpoint."""
        run = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        with saving(name, run):
            self._staged = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staged = False
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._complete(run / STAGING / name, run)
        self.accelerator.wait_for_everyone()

    def _complete(self, staged: Path, run: Path) -> None:
        """What is ours of a checkpoint, and its name."""
        self._mend_best_checkpoint(staged, run)
        if (place := self.place()) is not None:
            (staged / STREAM).write_text(json.dumps(place) + "\n")
        seal(staged, self.run, self.state.global_step)
        for file in staged.rglob("*"):
            flush(file)
        flush(staged)
        if (run / staged.name).exists():  # from an earlier attempt at the same step
            remove(run / staged.name)
        os.replace(staged, run / staged.name)
        flush(run)
        clear_staging(run)
        self._rotate(run)

    def _mend_best_checkpoint(self, staged: Path, run: Path) -> None:
        """The best checkpoint's path, if it is the one in the staging folder, must be that after the rename."""
        if Path(self.state.best_model_checkpoint or "") != staged:
            return
        self.state.best_model_checkpoint = str(run / staged.name)
        file = staged / "trainer_state.json"
        state = json.loads(file.read_text())
        state["best_model_checkpoint"] = self.state.best_model_checkpoint
        file.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

    def _rotate(self, run: Path) -> None:
        """Keeps ``save_total_limit`` checkpoints, the newest and the best among them."""
        found = checkpoints(run)
        best = Path(self.state.best_model_checkpoint or "").name
        spare = [checkpoint for checkpoint in found[:-1] if checkpoint.name != best]
        surplus = len(found) - (self.args.save_total_limit or len(found))
        for old in spare[: max(surplus, 0)]:
            remove(old)


class _Course(TrainerCallback):
    """Clears what a killed process left, measures speed between logs, and logs at every checkpoint."""

    def __init__(self, trainer: MetaplasticTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if args.should_save:
            clear_staging(args.output_dir or ".")
        self._restart(args, state, control)

    def _restart(self, args, state, control, **kwargs):
        self.trainer._clock = (time.perf_counter(), int(state.num_input_tokens_seen))

    on_evaluate = on_save = _restart  # neither is training

    def on_step_end(self, args, state, control, **kwargs):
        if (place := self.trainer.place()) is not None:  # Hugging Face's epoch is the share of the run since it began
            state.epoch = float(place["epoch"])
        # A logged loss is an average since the last log; a resumed run knows only what came after its checkpoint.
        control.should_log |= control.should_save

    on_epoch_end = on_step_end
