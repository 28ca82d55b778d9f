"""torch.compile, block by block: all blocks of a kind run the same compiled code, so 24 layers compile as fast as one.

A kind is a mixer: its blocks differ in nothing but their weights, which are arguments of what is compiled. There is one
graph for training (and its backward), one for evaluation, and another for batches of another length than training began
with (the last of a pass); none is added for another number of packed documents. What is around the blocks, the
embedding, the last norm and the loss, is a kernel each or fused already, and stays as it is.

Only the forward of a block is compiled: hooks, those of fully_shard too, run around it as they do around any module,
and names of weights and what is saved do not change. Activations that are computed again are so within the block.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.pretrained import MetaplasticPreTrainedModel, blocks
from ..ops import convolution

OUTSIDE = ("fla",)  # backends that leave the graph
LIMIT = 32  # graphs of one kind of block


def compile_blocks(model: MetaplasticPreTrainedModel, backend: str = "inductor") -> None:
    """Makes every block of ``model`` run compiled code, compiled when first called.

    Call it before the model is sharded or wrapped. ``backend``: of torch.compile.
    """
    # The gradients of a block are whole when they come, so nothing is gained by cutting its graph at DDP's buckets;
    # and what is cut could not hold activations that are computed again.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
    kinds: dict[tuple[str, bool], Callable] = {}
    for block in blocks(model):
        kind = block.mixer_name, getattr(block.mixer, "backend", None) not in OUTSIDE
        if kind not in kinds:
            kinds[kind] = torch.compile(_of_its_own(_forward, kind[0]), fullgraph=kind[1], backend=backend)
        block.forward = types.MethodType(_Compiled(kinds[kind]), block)


class _Compiled:
    """The forward pass of a block, which says beforehand which of its sizes will change.

    A block that is copied has it too; one that is pickled finds its class's own by this name.
    """

    __name__ = "forward"

    def __init__(self, run: Callable):
        self.run = run

    def __call__(
        self, block: Any, x: Tensor, state=None, mask=None, cu_seqlens: Tensor | None = None, keep_state: bool = True
    ) -> Any:
        if cu_seqlens is not None:
            if state is None and not keep_state:
                cu_seqlens = _few_sizes(cu_seqlens, x.device.type)
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        if not torch.is_grad_enabled():
            x = x.detach()  # of embeddings that were made to need gradients, for what is computed again
            torch._dynamo.maybe_mark_dynamic(x, [0, 1] if len(x) > 1 else [1])  # held-out rows end with fewer
        return self.run(block, x, state, mask, cu_seqlens, keep_state)


def _few_sizes(cu_seqlens: Tensor, device: str) -> Tensor:
    """With empty documents at the end, so that their number is of few: at least 2, since 1 is a graph of its own.

    Inductor fixes the lengths in the backward of PyTorch's convolution, of which the number is part: then powers of 2.
    """
    count = len(cu_seqlens) - 1
    alike = 2 if convolution.choose("auto", device) != "torch" else 1 << max(count - 1, 1).bit_length()
    return cu_seqlens if count >= alike else torch.cat([cu_seqlens, cu_seqlens[-1:].expand(alike - count)])


def _forward(block: Any, x, state, mask, cu_seqlens, keep_state) -> Any:
    return type(block).forward(block, x, state, mask, cu_seqlens, keep_state)


def _of_its_own(function: types.FunctionType, name: str) -> Callable:
    """A copy with code of its own: PyTorch keeps what it compiled, and counts it, by code."""
    code = function.__code__.replace(co_name=f"{name}_block")
    return types.FunctionType(code, function.__globals__, code.co_name)
