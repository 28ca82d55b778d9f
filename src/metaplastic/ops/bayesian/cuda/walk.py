"""The two recursions of :mod:`metaplastic.ops.bayesian.parallel_backward` as kernels, for inputs that have no backward
kernels of their own: ``walk_mean.cu``, and in turn ``walk_reach.cu`` and ``walk_step.cu``, a chunk a launch.

Their products are of numbers split in two fp16 (``backward_numbers.cuh``), about as exact as float32 ones.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import nvrtc
from ..parallel_backward import Table, Walk
from . import key_decays
from .problem import CHUNK

FOLDER = Path(__file__).parent
LARGEST = 256  # keys
COLUMNS = 64  # values of a block of walk_mean.cu


class KernelWalk(Walk):
    """Of float32 and chunks of 64 tokens; keys and values are whole multiples of 64."""

    @classmethod
    def takes(cls, gain: Tensor, values: int, angle: Tensor | None) -> bool:
        keys = gain.shape[-1]
        fits = gain.shape[-2] == CHUNK and 0 < keys <= LARGEST and keys % CHUNK == values % COLUMNS == 0
        return fits and angle is None and gain.dtype == torch.float32 and gain.device.type in key_decays.DEVICES

    def __init__(self, table: Table, gain: Tensor, closed: Tensor, last: Tensor, angle: Tensor | None):
        super().__init__(table, gain.contiguous(), closed.contiguous(), last, angle)
        self.last = last.expand(*last.shape[:2], 1, gain.shape[-1]).contiguous()
        self.first = table.here(F.pad(table.first, (0, 1), value=table.count))

    def _kernel(self, name: str) -> Callable:
        return nvrtc.kernel(FOLDER, f"walk_{name}", self.gain.device.index or 0, KEYS=self.gain.shape[-1])

    def means(self, state: Tensor, sources: Tensor) -> None:
        sequences, heads, groups, _, values = state.shape
        walked = state.mT.contiguous()
        assert sources.mT.is_contiguous()
        if blocks := sequences * heads * groups * (values // COLUMNS):
            self._kernel("mean")(
                blocks, self.gain, self.closed, self.last, self.first, sources, walked, heads * groups, groups, values
            )
        state.copy_(walked.mT)

    def covariances(self, state: Tensor, sources: Tensor) -> None:
        sequences, heads, groups, keys, _ = state.shape
        items = sequences * heads * groups
        reached, blocks = state.new_empty((items, CHUNK, keys)), items * (keys // CHUNK)
        assert state.is_contiguous()
        if blocks and self.table.count:
            reach, step, sizes = self._kernel("reach"), self._kernel("step"), (heads * groups, groups)
            for n in range(int(self.table.counts.max())):
                reach(blocks, self.gain, self.first, state, reached, *sizes, n)
                step(blocks, self.gain, self.closed, self.last, self.first, reached, sources, state, *sizes, n)
