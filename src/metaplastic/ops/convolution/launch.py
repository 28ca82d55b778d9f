"""Tensors in, tensors out: what :mod:`.kernels` are given, and what is left to do after them.

Blocks follow from C and the width alone: nothing is tuned, nor compiled anew for another B or T.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# (a function under triton.jit is launched: kernel[grid](...))

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..contract import compute_dtype
from . import kernels


class Blocks(NamedTuple):
    """What a program walks along: ``tokens``, ``rows`` of them at a time; ``channels`` that ``warps`` share.

    ``registers`` is the most that a thread may have (NVIDIA only): the compiler would rather load early than let more
    warps run.
    """

    tokens: int
    channels: int
    rows: int
    warps: int
    registers: int | None = None

    def options(self, channels: int, width: int) -> dict[str, int]:
        """For an input of fewer channels than a block: not more lanes than it needs."""
        most = self.channels if width <= 4 else self.channels // 2  # for as many registers
        taken = min(most, max(32, 1 << (channels - 1).bit_length()))
        found = {"BC": taken, "ROWS": self.rows, "num_warps": max(1, self.warps * taken // most)}
        if self.registers is not None and torch.version.cuda is not None:
            found["maxnreg"] = self.registers
        return found


# Four channels a thread: 8 bytes of 16-bit numbers. More leave too few warps for the registers that they take.
FORWARD = Blocks(tokens=64, channels=256, rows=8, warps=2, registers=64)
BACKWARD = Blocks(tokens=64, channels=256, rows=4, warps=2, registers=128)
PROGRAMS = 512  # of the backward along the tokens, at most: as many partial sums of dweight


def _last_contiguous(x: Tensor) -> Tensor:
    """Other strides are as they come: x may be some columns of a wider matrix."""
    return x.detach() if x.stride(2) == 1 or x.shape[2] == 1 else x.detach().contiguous()


def _slots(x: Tensor, offsets: Tensor | None, block: int) -> tuple[int, int]:
    """The number of sequences and that of slots, see :mod:`.kernels`."""
    if offsets is None:
        return x.shape[0], x.shape[0] * max(1, -(-x.shape[1] // block))
    return offsets.shape[0] - 1, x.shape[1] // block + offsets.shape[0]


def _flags(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, offsets: Tensor | None, silu: bool):
    real = tl.float64 if compute_dtype(x) == torch.float64 else tl.float32
    given = {"BIAS": bias is not None, "STATE": state is not None, "PACKED": offsets is not None}
    return {"W": weight.shape[1], "SILU": silu, "REAL": real} | given


def _inputs(weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous; any tensor in place of one that is not there."""
    weight = weight.detach().contiguous()
    bias, state = (weight if x is None else x.detach().contiguous() for x in (bias, state))
    return weight, bias, state


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, offsets: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """y [B, T, C] and the new state [N, W - 1, C], both of x's dtype, which ``state`` has too."""
    x = _last_contiguous(x)
    channels, width = weight.shape
    sequences, slots = _slots(x, offsets, FORWARD.tokens)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_state = x.new_empty((sequences, width - 1, channels))
    if channels and slots:
        options = {"BT": FORWARD.tokens} | FORWARD.options(channels, width)
        with torch.accelerator.device_index(x.device.index):
            kernels.forward_kernel[(slots * -(-channels // options["BC"]),)](
                x, *_inputs(weight, bias, state), y, new_state, weight if offsets is None else offsets,
                x.shape[1], sequences, channels, x.stride(0), x.stride(1),
                **_flags(x, weight, bias, state, offsets, silu), **options,
            )  # fmt: skip
    return y, new_state


def backward(
    dy: Tensor, d_new_state: Tensor | None,
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, offsets: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias and state, each in the dtype of its input; None of what is not there."""
    x, dy = _last_contiguous(x), _last_contiguous(dy)
    channels, width = weight.shape
    block = max(1, BACKWARD.tokens - (width - 1))  # so many tokens more are walked along
    sequences, slots = _slots(x, offsets, block)
    per_program = max(1, -(-slots // PROGRAMS))
    programs = -(-slots // per_program)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_state = None if state is None else x.new_empty((sequences, width - 1, channels))
    rows = width if bias is None else width + 1
    sums = torch.empty((programs, rows, channels), dtype=compute_dtype(x), device=x.device)
    if sums.numel():
        options = {"BT": block} | BACKWARD.options(channels, width)
        final = weight if d_new_state is None else d_new_state.contiguous()
        with torch.accelerator.device_index(x.device.index):
            kernels.backward_kernel[(programs * -(-channels // options["BC"]),)](
                x, *_inputs(weight, bias, state), dy, final, dx, dx if d_state is None else d_state, sums,
                weight if offsets is None else offsets, x.shape[1], sequences, slots, per_program,
                channels, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1), FINAL=d_new_state is not None,
                **_flags(x, weight, bias, state, offsets, silu), **options,
            )  # fmt: skip
    total = sums.sum(0)
    d_weight = total[:width].T.to(weight.dtype).contiguous()
    return dx, d_weight, None if bias is None else total[width].to(bias.dtype, copy=True), d_state
