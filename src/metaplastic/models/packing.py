"""Packed sequences as others hand them over, turned into ``cu_seqlens``.

Hugging Face's ``DataCollatorWithFlattening`` (and trainers that call it padding-free) lays a batch out as one row and
says where sequences begin by ``position_ids`` that start again, and if asked by ``seq_idx`` or ``cu_seq_lens_q``. A
recurrent model has no positions: only the borders are read, and positions without a border are ignored.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import check_integers

# Not named in the signature of forward: generate() would make position_ids for models that name them.
KNOWN = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def offsets(
    cu_seqlens: Tensor | None, given: dict[str, Any], tokens: Tensor, attention_mask: Tensor | None
) -> Tensor | None:
    """``cu_seqlens`` of the sequences packed in ``tokens [B, T, ...]``; None if each row is one sequence.

    ``given`` holds any of ``KNOWN``. Offsets are taken as they are; ``seq_idx`` and ``position_ids`` are read, which
    waits for the device and cannot be traced by torch.compile.
    """
    given = {name: value for name, value in given.items() if value is not None}  # PEFT names what it does not ask for
    if given.pop("output_attentions", False):
        raise ValueError("output_attentions must be False or None, got True: attention weights are not kept")
    if unknown := sorted(set(given) - set(KNOWN)):
        raise TypeError(f"forward got an unexpected argument {', '.join(map(repr, unknown))}")
    for name in ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
        if name in given:
            check_integers(name, given[name])
    if cu_seqlens is not None:
        check_integers("cu_seqlens", cu_seqlens)
        if given:
            raise ValueError(f"give cu_seqlens or {', '.join(given)}, not both")
        return cu_seqlens
    if "cu_seq_lens_q" in given or "cu_seq_lens_k" in given:
        q, k = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
        if q is None or k is None or q.shape != k.shape or (q.device.type == "cpu" and not _equal(q, k)):
            raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k must be equal offsets, got {q} and {k}")
        return q
    for name in ("seq_idx", "position_ids"):
        if name in given and (found := _borders(name, given[name], tokens, attention_mask)) is not None:
            return found
    return None


def _equal(q: Tensor, k: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch.equal(q, k)


def _borders(name: str, x: Tensor, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    batch, length = tokens.shape[:2]
    if torch.compiler.is_compiling():
        raise ValueError(f"under torch.compile give cu_seqlens or cu_seq_lens_q instead of {name}, which must be read")
    if x.dim() != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
        raise ValueError(f"{name} must be [B, T] = {[batch, length]}, got {list(x.shape)}")
    border = x[:, 1:] != x[:, :-1] + (name == "position_ids")
    if attention_mask is not None:
        real = attention_mask[:, -length:].bool() if length else attention_mask[:, :0].bool()
        border = border & real[:, 1:] & real[:, :-1]
    if not border.any():
        return None
    if batch != 1 or attention_mask is not None:
        raise ValueError(
            f"{name} says that sequences are packed: then the batch size must be 1, without attention_mask "
            f"(got batch size {batch}{'' if attention_mask is None else ' and an attention_mask'})"
        )
    starts = border[0].nonzero()[:, 0] + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_tensor([length])])
