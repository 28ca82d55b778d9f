"""The Hugging Face Trainer, mended.

* Parameters that mixers list in ``no_weight_decay`` (A_log, dt_bias, D, b_scale, prior_log) get no weight decay.
* A checkpoint is written to a staging folder and renamed when complete (``saving.py``), on any number of processes that
  share the rows of a step (``parallel.py``): a killed process leaves a whole one or none.
* A run resumed from a checkpoint logs and computes what the undisturbed one does, and stops where that stops.
* ``evaluate`` averages over tokens, so that the loss does not depend on the batch size or the last, smaller batch.
* Logs carry tokens per second and, where the device's peak is known, the share of it that the model's FLOPs are (MFU);
  every evaluation what the memory of each layer does (``memory.py``), if there are rows to watch.
* Nothing waits for the device between logs (but, of several processes, ``interrupt.py`` now and then): counts, losses
  and offsets are read where a log asks for them, or on the host.
* A :class:`~metaplastic.tasks.PackedStream` to train on goes on with the very next block after a checkpoint: its place
  is in the checkpoint, and no batch is read again to be skipped. Its "epoch" in logs is the number of passes completed.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..tasks.stream import PackedStream
from .checkpoint import clear_staging
from .divergence import named_divergence
from .memory import memory_measures
from .parallel import NoRows
from .progress import Bar, Lines
from .saving import STREAM, SavingTrainer


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
    arguments = TrainingArguments(**(defaults | overrides))
    # Hugging Face would take all GPUs of the machine in one process, and as many times the rows of a step.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class MetaplasticTrainer(SavingTrainer):
    """See the module's docstring. Takes the arguments of :class:`transformers.Trainer`, and

    ``watched``, if set: held-out rows on which the memory of every layer is measured at every evaluation.
    ``least_seconds``, if set: what a token takes at a device's peak (:func:`metaplastic.training.flops.least_seconds`).
    ``asynchronous``, ``beside``, ``run``: :class:`~metaplastic.training.saving.SavingTrainer`.
    ``context``: :class:`~metaplastic.training.parallel.ParallelTrainer`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watched: list[Any] = []
        self.least_seconds: float | None = None
        self._clock: tuple[float, int] | None = None  # time and tokens at the last log
        self._uncounted = 0  # tokens of this process since the last count of all
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
            speed = (tokens - self._clock[1]) / max(now - self._clock[0], 1e-9)
            logs["tokens_per_second"] = round(speed, 1)
            if self.least_seconds is not None:
                logs["mfu"] = round(speed * self.least_seconds / self.args.world_size, 4)
            self._clock = (now, tokens)
        super().log(logs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        with named_divergence(self.state.global_step + 1, self.args.learning_rate):
            return super().training_step(model, inputs, *args, **kwargs)

    def _get_dataloader(self, *args, **kwargs) -> Any:
        """Batches stay on the host until :meth:`_prepare_inputs`."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        loader.device = None
        return loader

    def _prepare_inputs(self, inputs: Any) -> Any:
        """To the device without waiting for it. Offsets stay on the host, where every operator reads them."""
        moved: Any = send_to_device({k: x for k, x in inputs.items() if k != "cu_seqlens"}, self.args.device, True)
        return super()._prepare_inputs(moved) | {k: x for k, x in inputs.items() if k == "cu_seqlens"}

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """On the host; Hugging Face's asks all processes after every batch, and waits for the device."""
        if isinstance(inputs, NoRows):
            return
        if self.args.include_num_input_tokens_seen == "all" and "input_ids" in inputs:
            self._uncounted += inputs["input_ids"].numel()
        else:
            super()._track_num_input_tokens(inputs)

    def _count_tokens(self) -> None:
        """Those of all processes, which have to call this together."""
        count, self._uncounted = self._uncounted, 0
        if self.args.world_size > 1:
            whole: Any = self.accelerator.reduce(torch.tensor(count, device=self.args.device))
            count = int(whole) // self.context
        self.state.num_input_tokens_seen += count

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        now = self.control
        if now.should_log or now.should_evaluate or now.should_save or now.should_training_stop:
            self._count_tokens()
        super()._maybe_log_save_evaluate(*args, **kwargs)

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
        self.callback_handler.eval_dataloader = loader
        losses: list[torch.Tensor] = []
        predicted: list[torch.Tensor] = []
        with self.accelerator.autocast(), named_divergence(self.state.global_step, self.args.learning_rate):
            for inputs in loader:
                inputs = self._prepare_inputs(inputs)
                predicted.append((inputs["labels"][..., 1:] != -100).sum())
                losses.append(model(**inputs, num_items_in_batch=1, use_cache=False).loss)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        seen = {}
        if self.watched:
            seen = memory_measures(model, self._prepare_inputs(self.data_collator(self.watched)))
        model.train(training)
        total, count = _sum(losses), int(_sum(predicted))
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(torch.tensor([total, count], dtype=torch.float64, device=self.args.device))
            total, count = float(totals[0]), int(totals[1]) // self.context  # neighbours count a row each
        if count == 0:
            raise ValueError("eval_dataset has no token to predict: all labels are -100, or there are no rows")
        loss = total / count
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count} | seen
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def place(self) -> dict[str, Any] | None:
        """Where a stream stands after the steps done; None for other data."""
        if not isinstance(self.train_dataset, PackedStream):
            return None
        batches = self.state.global_step * self.args.gradient_accumulation_steps * self.shares
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


def _sum(values: list[torch.Tensor]) -> float:
    """Of numbers on a device, read at once."""
    return float(torch.stack(values).cpu().double().sum()) if values else 0.0


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
