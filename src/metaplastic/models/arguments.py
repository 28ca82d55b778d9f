"""What a forward pass accepts: shapes and kinds of its tensors, checked before anything runs or any cache changes."""

from typing import Any

import torch
from torch import Tensor


def check_inputs(input_ids: Any, inputs_embeds: Any, attention_mask: Any, hidden_size: int) -> None:
    """Exactly one of tokens ``[B, T]`` and embeddings ``[B, T, D]``, and a mask that is a tensor."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if input_ids is not None:
        check_integers("input_ids", input_ids)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [B, T], got {list(input_ids.shape)}")
    else:
        check_tensor("inputs_embeds", inputs_embeds)
        if not inputs_embeds.is_floating_point():
            raise ValueError(f"inputs_embeds must be floating point, got {inputs_embeds.dtype}")
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != hidden_size:
            raise ValueError(f"inputs_embeds must be [B, T, D] with D = {hidden_size}, got {list(inputs_embeds.shape)}")
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)


def check_targets(labels: Any, shift_labels: Any, logits_to_keep: Any, tokens: Tensor) -> None:
    """Labels for every token, and logits for every label."""
    if isinstance(logits_to_keep, Tensor):
        check_integers("logits_to_keep", logits_to_keep)
        if logits_to_keep.dim() != 1:
            raise ValueError(f"logits_to_keep must be one-dimensional, got {list(logits_to_keep.shape)}")
    elif not isinstance(logits_to_keep, int) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be >= 0 (0 keeps all) or an index tensor, got {logits_to_keep!r}")
    for name, x in (("labels", labels), ("shift_labels", shift_labels)):
        if x is None:
            continue
        check_integers(name, x)
        if x.shape != tokens.shape[:2]:
            raise ValueError(f"{name} must be [B, T] = {list(tokens.shape[:2])} like the tokens, got {list(x.shape)}")
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            got = "a tensor" if isinstance(logits_to_keep, Tensor) else logits_to_keep
            raise ValueError(f"logits_to_keep must be 0 with {name}, which need all logits, got {got}")


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_integers(name: str, x: Any) -> None:
    check_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {x.dtype}")
