r"""What processes that share a sequence tell each other, with the gradients written out.

A sequence is cut into contiguous shards, shard r on process r. For a memory that is affine in its entry state,
``S_out = a S_in + c`` with a and c from the shard alone, the entry state of every shard follows from one exchange:

    e_0 = 0,   e_{r+1} = a_r e_r + c_r                        forward: all_gather of (a, c)
    l_r = de_r + a_r l_{r+1},   l_R = 0                       backward: all_gather of de, the gradient of e_r on r
    dc_r = l_{r+1},   da_r = <l_{r+1}, e_r>

What is not affine is handed from process to process. Where activations are computed again nothing is exchanged again
(``models/checkpointing.py``): else the backward pass of a layer would go up and down the whole line of processes before
that of the next could begin. A collective is called on every process or it waits for ever, so an exchange is in the
graph of every process, also where its result is zero. Compiled code is in pieces around every exchange.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..models.checkpointing import once

Function = TypeVar("Function", bound=Callable)


def outside(function: Function) -> Function:
    """A function that runs as it is, between two pieces of compiled code."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


class Line:
    """The processes of one sequence, in its order."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._sent: list[tuple[Any, Tensor]] = []  # a message has to stay until it has gone

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def gather(self, x: Tensor) -> list[Tensor]:
        """What every process gives, in order; all of one shape."""
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return found

    def send(self, x: Tensor, to: int) -> None:
        """Goes on at once."""
        self._sent = [(work, message) for work, message in self._sent if not work.is_completed()]
        message = x.detach().clone(memory_format=torch.contiguous_format)  # autograd may go on adding to x
        work = dist.isend(message, dist.get_global_rank(self.group, to), group=self.group)
        self._sent.append((work, message))

    def receive(self, like: Tensor, origin: int) -> Tensor:
        message = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(message, dist.get_global_rank(self.group, origin), group=self.group)
        return message

    def settle(self) -> None:
        """Waits until everything sent has gone."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []


def entry_states(line: Line, anchor: Tensor, decay: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The states that a shard begins with, from the ``decay`` a and the ``states`` c of each; zeros on the first.

    decay has the shape of a state with ones where it is shared. ``anchor``: what needs a gradient wherever anything in
    the layer does, so that the backward exchange happens on every process.
    """
    return _Entry.apply(line, anchor, decay, *states)  # pyright: ignore[reportReturnType]


@outside
def from_before(line: Line, x: Tensor) -> Tensor:
    """The x of the process before; zeros on the first."""
    return _Shift.apply(line, x)  # pyright: ignore[reportReturnType]


@outside
def hand_on(line: Line, through: Tensor, x: Tensor) -> Tensor:
    """Sends x to the next process; returns ``through``, by which the gradient of x finds its way back."""
    return through if line.last else _HandOn.apply(line, through, x)  # pyright: ignore[reportReturnType]


@outside
def taken(line: Line, anchor: Tensor, like: Tensor) -> Tensor:
    """What the process before hands on; not to be called on the first."""
    return _Taken.apply(line, anchor, like)  # pyright: ignore[reportReturnType]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def unflat(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = x.split([each.numel() for each in like])
    return [piece.view(each.shape) for piece, each in zip(pieces, like, strict=True)]


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line: Line, anchor: Tensor, decay: Tensor, *states: Tensor):
        decays, entry = once(partial(_entry, line, decay, states))
        ctx.line = line
        ctx.save_for_backward(*decays, *entry)
        return entry

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor):
        line: Line = ctx.line
        saved = ctx.saved_tensors  # once: activations that are computed again are unpacked once
        decays, entry = saved[: line.size], saved[line.size :]
        later = [torch.zeros_like(each) for each in gradients]
        gathered = [unflat(x, gradients) for x in line.gather(flat(gradients))]
        for r in range(line.size - 1, line.rank, -1):
            later = [own + decays[r] * after for own, after in zip(gathered[r], later, strict=True)]
        of_decay = sum(after * before for after, before in zip(later, entry, strict=True))
        return None, None, of_decay.sum_to_size(decays[0].shape), *later  # pyright: ignore


def _entry(line: Line, decay: Tensor, states: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The decays of all shards and the states that this one begins with."""
    gathered = [unflat(x, (decay, *states)) for x in line.gather(flat((decay, *states)))]
    entry = [torch.zeros_like(state) for state in states]
    for a, *c in gathered[: line.rank]:
        entry = [a * before + own for before, own in zip(entry, c, strict=True)]
    return tuple(a.clone() for a, *_ in gathered), tuple(entry)  # not views, which would hold the states of all


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line: Line, x: Tensor):
        ctx.line = line
        if not line.last:
            once(partial(line.send, x, line.rank + 1))
        return torch.zeros_like(x) if line.first else once(partial(line.receive, x, line.rank - 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        line: Line = ctx.line
        if not line.first:
            line.send(gradient, line.rank - 1)
        return None, torch.zeros_like(gradient) if line.last else line.receive(gradient, line.rank + 1)


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line: Line, through: Tensor, x: Tensor):
        ctx.line, ctx.shape, ctx.options = line, x.shape, {"dtype": x.dtype, "device": x.device}
        once(partial(line.send, x, line.rank + 1))
        return through.view_as(through)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        like = torch.empty(ctx.shape, **ctx.options)
        return None, gradient, ctx.line.receive(like, ctx.line.rank + 1)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line: Line, anchor: Tensor, like: Tensor):
        ctx.line = line
        return once(partial(line.receive, like, line.rank - 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        ctx.line.send(gradient, ctx.line.rank - 1)
        return None, None, None
