"""Ctrl-C ends a run at the end of its step, with a checkpoint; once more, and it ends at once."""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger("metaplastic")


class Interruption(TrainerCallback):
    """As a context, it waits for Ctrl-C; as a callback, it asks the Trainer to save and to stop.

    Leaving the context raises KeyboardInterrupt if it came, unless an error is on its way. Where Ctrl-C is not Python's
    own any more, or the main thread is elsewhere, or several processes train together and would stop at different
    steps, nothing is changed.
    """

    def __init__(self) -> None:
        self.came = False
        self._waits = False

    def __enter__(self) -> "Interruption":
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        ours = threading.current_thread() is threading.main_thread()
        self._waits = alone and ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._waits:
            signal.signal(signal.SIGINT, self._first)
        return self

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.warning("interrupted: saving a checkpoint after this step (Ctrl-C again: stop at once, without)")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if self._waits:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and error is None:
            raise KeyboardInterrupt

    def on_step_end(self, args, state, control, **kwargs):
        if self.came:
            control.should_save = control.should_training_stop = True
