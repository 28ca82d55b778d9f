"""What a person sees of a run: a bar in a terminal, now and then a line elsewhere."""

import logging
import time

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

SECONDS_BETWEEN_LINES = 30
logger = logging.getLogger("metaplastic")


def _shown(logs: dict[str, float]) -> dict[str, str]:
    """What a person watching a run wants of a log entry."""
    forms = {"loss": ".4f", "eval_loss": ".4f", "tokens_per_second": ",.0f", "mfu": ".1%"}
    return {name.replace("_per_second", "/s"): f"{logs[name]:{form}}" for name, form in forms.items() if name in logs}


class Bar(ProgressCallback):
    """Hugging Face's progress bar, with losses and speed on the bar instead of one printed line per log."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.seen: dict[str, float] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None:
            self.seen |= logs or {}
            self.training_bar.set_postfix(_shown(self.seen))


class Lines(TrainerCallback):
    """Without a bar (no terminal): a line in the log for each evaluation, and now and then in between."""

    def __init__(self):
        self.training: dict[str, float] = {}
        self.last = time.monotonic()

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        if "loss" in logs:
            self.training = logs
        elif "eval_loss" not in logs:
            return
        now = time.monotonic()
        if state.is_world_process_zero and ("eval_loss" in logs or now - self.last >= SECONDS_BETWEEN_LINES):
            self.last = now
            what = ", ".join(f"{name} {value}" for name, value in _shown(self.training | logs).items())
            logger.info("step %d of %d: %s", state.global_step, state.max_steps, what)
