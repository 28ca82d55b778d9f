"""One call: run tokens through a model and say what the memory of every mixer did with them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..models import MetaplasticModel, fork_cache
from .replay import LayerMemory, watch


@torch.no_grad()
def memories(
    model: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    cache: DynamicCache | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[LayerMemory, ...]:
    """What the memory of every mixer does with these tokens, per head: of the Bayesian Layer its uncertainty, its gain
    and what it knows; of Palimpsa the limit |I - prior| / prior and the metaplasticity ratio; of all their windows
    (``metaplastic.inspection.kinds`` has the equations).

    A head of Palimpsa is in Mamba2's limit where ``limit`` is far below 1: its answers then differ from those of the
    additive rule by at most that fraction of each of their terms.

    Args:
        model: a language model of ours, also inside others (PEFT, a wrapper); or any module that takes these arguments
            and contains mixers. Its mode and its gradients stay as they are. The output layer is not run.
        input_ids: tokens ``[B, T]``, or ``inputs_embeds [B, T, D]``.
        attention_mask: ``[B, T]``, non-zero at real tokens; padded ones do not count.
        cache: go on from what a model of ours returned. It is not changed.
        cu_seqlens: ``[N + 1]`` offsets of packed sequences (then B = 1); the tail beyond the last does not count.

    Returns:
        One :class:`~metaplastic.inspection.LayerMemory` per mixer, in the order of the model's modules.
    """
    given = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "inputs_embeds": inputs_embeds,
        "cu_seqlens": cu_seqlens,
        "cache": None if cache is None else fork_cache(cache, detach=True),
    }
    arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    trunk = next((m for m in model.modules() if isinstance(m, MetaplasticModel)), None)
    with watch(model) as memory:
        if trunk is None:
            model(**arguments)
        else:
            trunk(**arguments, use_cache=cache is not None)
    return memory.report()
