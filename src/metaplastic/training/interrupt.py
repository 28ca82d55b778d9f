"""Ctrl-C (SIGINT) and SIGTERM end a run at the end of a step, with a checkpoint; a second signal ends it at once.

One process looks at every step. Several have to stop at the same one: they ask one another where they wait for the
device anyway, at logs, evaluations and saves, and between those about every ``SECONDS``, in which a wait is nothing:
after every step where steps are that long. Whoever was told tells the others, so it is enough that one of them was.
"""

import atexit
import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback

SECONDS = 5.0
AS_ONE = 1.0  # of several processes: a launcher sends on what came to all of them anyway
logger = logging.getLogger("metaplastic")
_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interruption(TrainerCallback):
    """As a context, it waits for a signal; as a callback, it asks the Trainer to save and to stop.

    If one came, leaving the context raises KeyboardInterrupt (SIGINT) or SystemExit with code 143 (SIGTERM), unless an
    error is on its way. Where a signal is not Python's own any more, or the main thread is elsewhere, it is left alone.
    """

    def __init__(self) -> None:
        self.came = False
        self._signal, self._at = int(signal.SIGINT), 0.0
        self._alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        self._agreed = False  # by several processes
        self._waits: list[int] = []
        self._asked, self._asked_at, self._next = 0, time.monotonic(), 0  # step, time; the step to ask at

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._waits = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) is default]
        for number in self._waits:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.came:
            self.came, self._signal, self._at = True, number, now
            name = "interrupted" if number == signal.SIGINT else "SIGTERM"
            step = "this step" if self._alone else "the step at which all processes have heard of it"
            again = (
                "Ctrl-C again: stop at once, without" if number == signal.SIGINT else "once more: end at once, without"
            )
            logger.warning("%s: saving a checkpoint after %s (%s)", name, step, again)
        elif self._alone or now - self._at > AS_ONE:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number in self._waits:
            signal.signal(number, _DEFAULTS[number])

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        self._restore()
        if error is not None or not (self.came if self._alone else self._agreed):
            return
        if self._agreed:
            PartialState().wait_for_everyone()  # a launcher may end all when one has ended, and the first may yet write
            atexit.register(_leave)
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        logger.warning("ended by SIGTERM: the same command goes on from the last checkpoint")
        raise SystemExit(128 + self._signal)

    def on_train_begin(self, args, state, control, **kwargs):
        self._asked, self._asked_at, self._next = state.global_step, time.monotonic(), state.global_step + 1

    def on_step_end(self, args, state, control, **kwargs):
        if self.came if self._alone else self._all_agree(args.device, state.global_step, control):
            control.should_save = control.should_training_stop = True

    def _all_agree(self, device: torch.device, step: int, control: Any) -> bool:
        """Whether any process was told to stop; all call this at the same steps."""
        waits = control.should_log or control.should_evaluate or control.should_save or control.should_training_stop
        if not waits and step < self._next:
            return False
        now = time.monotonic()
        took = (now - self._asked_at) / max(step - self._asked, 1)
        told = torch.tensor([self._signal if self.came else 0, int(1e6 * took)], device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        number, microseconds = told.tolist()
        self._asked, self._asked_at = step, now
        self._next = step + max(int(1e6 * SECONDS / max(microseconds, 1)), 1)
        if number:
            self._signal, self._agreed = number, True
        return self._agreed


def _leave() -> None:
    """Threads of gloo that live on when a process ends abort it, and its code is another."""
    if dist.is_initialized():
        dist.destroy_process_group()
