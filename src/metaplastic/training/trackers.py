"""Trackers (TensorBoard, Weights & Biases, ...): those of the Hugging Face Trainer, checked before anything runs."""

from collections.abc import Sequence
from pathlib import Path

from transformers import Trainer
from transformers.integrations import integration_utils


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that the Hugging Face Trainer does not know, or that is not installed."""
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        if name not in known:
            raise ValueError(f"report_to: got {name!r}, expected some of {', '.join(sorted(known))}")
        # Each looks for its package when it is made, and begins only with the training. One that has been made in vain
        # must not be tidied up: what its __del__ takes for granted is not there.
        attempt = type(known[name].__name__, (known[name],), {"__del__": lambda self: None})
        try:
            attempt()
        except (RuntimeError, ImportError) as error:
            ours = "pip install 'metaplastic[tensorboard]'"
            reason = ours if name == "tensorboard" else error
            raise ValueError(f"report_to: {name!r} is not installed ({reason})") from error


def put_tensorboard(trainer: Trainer, folder: Path, step: int) -> None:
    """One log in ``folder`` for all calls of a run: what an earlier one wrote after ``step`` is hidden by this one."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, integration_utils.TensorBoardCallback):
            callback.logging_dir = str(folder)
            callback.tb_writer = callback._SummaryWriter(log_dir=str(folder), purge_step=step + 1)
