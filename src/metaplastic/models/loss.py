"""The loss of a language model over its logits, or fused with the output layer, so that they are never whole.

    loss = sum_t -log softmax(W x_t)[label_t] / N          over the tokens t with a label

``plain``  makes the logits [B, T, vocabulary], in float32 too: with a large vocabulary the largest tensors of a step.
``fused``  makes and forgets them chunk by chunk (:mod:`metaplastic.ops.cross_entropy`), and raises where it cannot.
``auto``   is fused on CUDA where it can be and the vocabulary is larger than the width, else plain.

``model.loss_form`` says which. It is no part of a saved model: one that was loaded is plain. **Where the loss is fused,
a call with labels returns no logits** (``logits`` is None), in training and in evaluation; without labels nothing
changes.

Where FSDP2 shards the output layer its weight is whole in its own forward pass only: there the loss is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..ops import cross_entropy

FORMS = ("auto", "fused", "plain")
FSDP = "torch.distributed.fsdp"  # where its hooks are from


def backend(form: str, head: nn.Module, device: str, dtype: torch.dtype) -> str | None:
    """What fuses the loss with the output layer ``head`` in products of this dtype; None where the loss is plain.

    Raises:
        ValueError: an unknown form, or "fused" where it cannot be.
    """
    if form not in FORMS:
        raise ValueError(f"loss must be one of {', '.join(FORMS)}, got {form!r}")
    if form == "plain":
        return None
    found = cross_entropy.choose(device, dtype)
    reason = _reason_against(head)
    if form == "auto":
        vocabulary, width = getattr(head, "out_features", 0), getattr(head, "in_features", 0)
        return found if device == "cuda" and reason is None and pays(vocabulary, width) else None
    if reason is None and found is None:
        each = (f"{name} {cross_entropy.reason_against(name, device, dtype)}" for name in cross_entropy.BACKENDS)
        reason = "; ".join(each)
    if reason is not None:
        raise ValueError(f"loss: got 'fused', which cannot be here: {reason}; {_way_out(head, device, dtype)}")
    return found


def pays(vocabulary: int, width: int) -> bool:
    """Whether "auto" fuses the loss on a CUDA device that can: where logits are wider than what they come from."""
    return vocabulary > width


def _way_out(head: nn.Module, device: str, dtype: torch.dtype) -> str:
    expected = "expected 'plain', or 'auto', which chooses"
    half = dtype == torch.bfloat16 and _reason_against(head) is None
    return f"{expected}, or float32 (no bf16)" if half and cross_entropy.choose(device, torch.float32) else expected


def _reason_against(head: nn.Module) -> str | None:
    """Only the weight of the output layer is read: what is wrapped around it would be passed by, silently."""
    if (type(head).__mro__[2] if isinstance(head, FSDPModule) else type(head)) is not nn.Linear:
        return f"the output layer is a {type(head).__name__}, expected torch's own Linear (no adapter)"
    if head.bias is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return "the output layer has a bias"
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    if isinstance(head, FSDPModule):  # its own run, see _with_whole_weight
        hooks = tuple(hook for hook in hooks if not hook.__module__.startswith(FSDP))
    return "the output layer has hooks" if hooks or "forward" in vars(head) else None


def chosen(form: str, head: Any, x: Tensor) -> str | None:
    """As :func:`backend`, for activations ``x``; no tokens have nothing to be fused."""
    if form == "plain":
        return None
    return backend(form, head, x.device.type, product_dtype(head, x.device.type)) if x.numel() else None


def product_dtype(head: Any, device: str) -> torch.dtype:
    """Of the output layer's products: autocast's, or that of its weight."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype


def fused(
    x: Tensor,
    head: Any,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    num_items_in_batch: Tensor | int | None,
    backend: str,
) -> Tensor:
    """The loss for activations ``x [B, T, D]``, with labels as :class:`MetaplasticForCausalLM` takes them."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=cross_entropy.IGNORED)[..., 1:]
    target = shift_labels.reshape(-1).to(x.device, torch.int64)
    dtype = product_dtype(head, x.device.type)

    def summed(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            rows = x.flatten(0, 1).to(dtype)
            return cross_entropy.summed_cross_entropy(rows, head.weight.to(dtype), target, backend)

    total = _with_whole_weight(head, summed, x) if isinstance(head, FSDPModule) else summed(x)
    count: Any = (target != cross_entropy.IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _with_whole_weight(head: Any, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``compute(x)`` as the forward pass of a sharded output layer, around which it gathers its weight.

    Its hooks also see to it that the gradient of the weight is shared out in the backward pass.
    """
    head.forward = compute
    try:
        return head(x)
    finally:
        del head.forward
