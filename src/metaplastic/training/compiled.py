"""torch.compile, block by block: all blocks of a kind run the same compiled code, so 24 layers compile as fast as one.

A kind is a mixer: its blocks differ in nothing but their weights, which are arguments of what is compiled. There is one
graph for training (and its backward), one for evaluation, and another for batches of another length than training began
with (the last of a pass); none is added for another number of packed documents. What is around the blocks, the
embedding, the last norm and the loss, is a kernel each or fused already, and stays as it is.

Where processes share rows (``pieces``, training/context.py) exchanges leave the graph, and a block is what is compiled
between them; activations that are computed again are so around the block, piece by piece, not in one graph with it.

Only the forward of a block is compiled: hooks, those of fully_shard too, run around it as they do around any module,
and names of weights and what is saved do not change. Activations that are computed again are so within the block.
"""

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.modeling import MetaplasticBlock
from ..models.pretrained import MetaplasticPreTrainedModel, blocks
from ..ops import convolution

OUTSIDE = ("fla",)  # backends that leave the graph
LIMIT = 32  # graphs of one kind of block
ITSELF = inspect.unwrap(MetaplasticBlock.forward)  # without what computes activations again


def compile_blocks(model: MetaplasticPreTrainedModel, backend: str = "inductor", *, pieces: bool = False) -> None:
    """Makes every block of ``model`` run compiled code, compiled when first called.

    Call it before the model is sharded or wrapped. ``backend``: of torch.compile. ``pieces``: for context parallelism.
    """
    # The gradients of a block are whole when they come, so nothing is gained by cutting its graph at DDP's buckets;
    # and what is cut could not hold activations that are computed again.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
    kinds: dict[tuple[str, bool], Callable] = {}
    for block in blocks(model):
        kind = block.mixer_name, not pieces and getattr(block.mixer, "backend", None) not in OUTSIDE
        if kind not in kinds:
            own = _of_its_own(_inner if pieces else _forward, kind[0])
            kinds[kind] = torch.compile(own, fullgraph=kind[1], backend=backend)
        block.forward = types.MethodType(_Compiled(kinds[kind], pieces), block)


def in_pieces(model: MetaplasticPreTrainedModel) -> bool:
    """Whether the blocks are compiled so."""
    run = getattr(blocks(model)[0].forward, "__func__", None)
    return isinstance(run, _Compiled) and run.pieces


class _Compiled:
    """The forward pass of a block, which says beforehand which of its sizes will change.

    A block that is copied has it too; one that is pickled finds its class's own by this name.
    """

    __name__ = "forward"

    def __init__(self, run: Callable, pieces: bool):
        self.run, self.pieces = run, pieces

    def __call__(
        self, block: Any, x: Tensor, state=None, mask=None, cu_seqlens: Tensor | None = None, keep_state: bool = True
    ) -> Any:
        if cu_seqlens is not None:
            if state is None and not keep_state and not self.pieces:  # those: for the borders of a shard too
                cu_seqlens = few_sizes(cu_seqlens, x.device.type)
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        if not torch.is_grad_enabled():
            x = x.detach()  # of embeddings that were made to need gradients, for what is computed again
            torch._dynamo.maybe_mark_dynamic(x, [0, 1] if len(x) > 1 else [1])  # held-out rows end with fewer
        given = (x, state, mask, cu_seqlens, keep_state)
        if self.pieces and block.gradient_checkpointing and block.training and torch.is_grad_enabled():
            return block._gradient_checkpointing_func(partial(self.run, block), *given)
        return self.run(block, *given)


def few_sizes(cu_seqlens: Tensor, device: str) -> Tensor:
    """With empty documents at the end, so that their number is of few: at least 2, since 1 is a graph of its own.

    Inductor fixes the lengths in the backward of PyTorch's convolution, of which the number is part: then powers of 2.
    """
    count = len(cu_seqlens) - 1
    alike = 2 if convolution.choose("auto", device) != "torch" else 1 << max(count - 1, 1).bit_length()
    return cu_seqlens if count >= alike else torch.cat([cu_seqlens, cu_seqlens[-1:].expand(alike - count)])


def _forward(block: Any, x, state, mask, cu_seqlens, keep_state) -> Any:
    return type(block).forward(block, x, state, mask, cu_seqlens, keep_state)


def _inner(block: Any, x, state, mask, cu_seqlens, keep_state) -> Any:
    return ITSELF(block, x, state, mask, cu_seqlens, keep_state)


def _of_its_own(function: types.FunctionType, name: str) -> Callable:
    """A copy with code of its own: PyTorch keeps what it compiled, and counts it, by code."""
    code = function.__code__.replace(co_name=f"{name}_block")
    return types.FunctionType(code, function.__globals__, code.co_name)
