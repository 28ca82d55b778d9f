"""The Hugging Face Trainer, with four things mended.

* Parameters that mixers list in ``no_weight_decay`` (A_log, dt_bias, D, b_scale, prior_log) get no weight decay.
* A checkpoint is written to a staging folder and renamed when complete: a killed process leaves a whole one or none.
* ``evaluate`` averages over tokens, so that the loss does not depend on the batch size or the last, smaller batch.
* Logs carry tokens per second, and the progress bar shows them beside the loss.
"""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

STAGING = ".staging"
PICKLED_ARGUMENTS = "training_args.bin"  # Hugging Face writes it and nothing of ours reads it: no pickles in our folders


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest complete checkpoint of a run, or None. (Incomplete ones are never under a checkpoint's name.)"""
    return get_last_checkpoint(str(folder)) if os.path.isdir(folder) else None


def training_arguments(output: str | os.PathLike, **overrides: Any) -> TrainingArguments:
    """TrainingArguments with our defaults: token counting, safe saving, nothing reported to third parties."""
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "report_to": [],
        "remove_unused_columns": False,
        "include_num_input_tokens_seen": "all",
        "logging_steps": 10,
        "disable_tqdm": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "save_total_limit": 2,
        "label_names": ["labels"],
    }
    return TrainingArguments(**(defaults | overrides))


class _Progress(ProgressCallback):
    """Hugging Face's progress bar, with loss and speed on the bar instead of one printed line per log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None or not state.is_world_process_zero or not logs:
            return
        shown = {
            name: f"{logs[key]:{form}}"
            for name, key, form in (
                ("loss", "loss", ".4f"),
                ("eval_loss", "eval_loss", ".4f"),
                ("tokens/s", "tokens_per_second", ",.0f"),
            )
            if key in logs
        }
        if shown:
            self.training_bar.set_postfix(shown)


class MetaplasticTrainer(Trainer):
    """See the module's docstring. Takes the arguments of :class:`transformers.Trainer`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._staged = False
        self._clock: tuple[float, int] | None = None  # time and tokens at the last log
        if self.args.should_save:
            shutil.rmtree(os.path.join(self.args.output_dir, STAGING), ignore_errors=True)
        self.pop_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(_Progress)
        self.add_callback(_Clock(self))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        spared = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in getattr(module, "no_weight_decay", ())
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in spared]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._clock is not None:
            now, tokens = time.perf_counter(), int(self.state.num_input_tokens_seen)
            logs["tokens_per_second"] = round((tokens - self._clock[1]) / max(now - self._clock[0], 1e-9), 1)
            self._clock = (now, tokens)
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean negative log-likelihood per predicted token (nats), its exponential, and the number of tokens."""
        model = self.model
        training = model.training
        model.eval()
        total, count = 0.0, 0
        for inputs in self.get_eval_dataloader(eval_dataset):
            inputs = self._prepare_inputs(inputs)
            predicted = int((inputs["labels"][..., 1:] != -100).sum())
            with self.compute_loss_context_manager():
                loss = model(**inputs, num_items_in_batch=1, use_cache=False).loss
            total, count = total + float(loss), count + predicted
        model.train(training)
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(torch.tensor([total, count], dtype=torch.float64, device=self.args.device))
            total, count = float(totals[0]), int(totals[1])
        if count == 0:
            raise ValueError("the evaluation set has no token to predict")
        loss = total / count
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._staged else folder

    def _save_checkpoint(self, model, trial) -> None:
        """Hugging Face writes into the staging folder; the rename makes it a checkpoint."""
        run = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        self._staged = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staged = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            staged = run / STAGING / name
            self._mend_best_checkpoint(staged, run)
            (staged / PICKLED_ARGUMENTS).unlink(missing_ok=True)
            for file in staged.rglob("*"):
                _flush(file)
            _flush(staged)
            if (run / name).exists():  # from an earlier attempt at the same step
                os.replace(run / name, run / STAGING / f"{name}.old")
            os.replace(staged, run / name)
            _flush(run)
            shutil.rmtree(run / STAGING, ignore_errors=True)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run), self.args.save_total_limit, best_model_checkpoint=best)
        self.accelerator.wait_for_everyone()

    def _mend_best_checkpoint(self, staged: Path, run: Path) -> None:
        """The best checkpoint's path, noted while in the staging folder, must be the one after the rename."""
        best = self.state.best_global_step
        if not best:
            return
        self.state.best_model_checkpoint = str(run / f"checkpoint-{best}")
        file = staged / "trainer_state.json"
        state = json.loads(file.read_text())
        state["best_model_checkpoint"] = self.state.best_model_checkpoint
        file.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")


class _Clock(TrainerCallback):
    """Starts the speed measurement when training starts and restarts it after evaluations and saves."""

    def __init__(self, trainer: MetaplasticTrainer):
        self.trainer = trainer

    def _restart(self, args, state, control, **kwargs):
        self.trainer._clock = (time.perf_counter(), int(state.num_input_tokens_seen))

    on_train_begin = on_evaluate = on_save = _restart


def _flush(path: Path) -> None:
    """Asks the system to put a file or folder on disk before we go on (not supported everywhere for folders)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
