"""When steps end, by the device's own clock: the host runs ahead of a GPU, so its clock says nothing about one step."""

import itertools
import time
from typing import Any

import torch


class Clock:
    """Moments on the device; on a CPU, which does at once what it is told, those of the host."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self._moments: list[Any] = []

    def mark(self) -> None:
        """The moment in which the device has done what it has been given so far; waits for nothing."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between neighbouring moments, the last of which has come (``torch.cuda.synchronize``)."""
        pairs = itertools.pairwise(self._moments)
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]
