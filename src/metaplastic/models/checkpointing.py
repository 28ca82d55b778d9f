"""Which activations of a block wait for the backward pass, and which are computed again.

none        all of them wait
full        the input of each block: the whole block runs again
selective   that, and what is dear to compute; the rest of the block runs again

The gradients are those of ``none``, bit for bit on a CPU. A block that was computed again has spent what was kept:
under ``selective`` one backward pass is all there is (no ``retain_graph``).
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .pretrained import MetaplasticPreTrainedModel

KINDS = ("none", "full", "selective")

# Dear for its bytes: an element of a matrix product of width D costs 2 D FLOPs, some 1,000 a byte where a GPU does 150
# in the time in which it moves one; a memory's read-out costs several times that (10 K FLOPs beside the matrix units).
# Everything else (convolutions, gates, norms) is read and written at the speed of memory. With both, Palimpsa-D of 170M
# keeps 31% of the bytes of "none" (full: 8%; the memory alone: 10%, with every matrix product once more), so a pass
# that repeats no product and no memory, for a third of the bytes, is what lies between. Products of batches are not
# kept: in masked attention they are the scores of all pairs of tokens.
_DEAR = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def checkpoint_activations(model: MetaplasticPreTrainedModel, kind: str) -> None:
    """Makes training keep activations as ``kind`` says (see above); decides nothing but time and space."""
    if kind not in KINDS:
        raise ValueError(f"checkpointing must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "none":
        model.activation_checkpointing_disable()
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    model.activation_checkpointing_enable(how)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = getattr(op, "namespace", "") == "metaplastic" and "short_convolution" not in str(op)
    dear = op in _DEAR or ours
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
