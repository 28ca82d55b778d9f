"""Mixer states in Hugging Face's own cache: where they go, and how many tokens they have seen.

A linear-attention cache layer holds one convolution state ``[B, C, W - 1]`` and several recurrent states. Two traps of
that class are handled here: a state is only handed out once ``has_previous_state`` is set for its index, which writing
a recurrent state does not do; and an all-recurrent cache does not know its length, so we keep the count beside it.
"""

import torch
from transformers import Cache

from ..layers.mixer import MixerState

_COUNT = "tokens_seen"  # attribute of the cache, a tensor: counting never waits for the device


def read(cache: Cache, layer_idx: int, memory_type: type) -> MixerState | None:
    """The state of one layer, or None before its first token."""
    convolution = cache.get_conv_state(layer_idx)
    if convolution is None:
        return None
    memory = [cache.get_recurrent_state(layer_idx, i) for i in range(len(memory_type._fields))]
    return MixerState(convolution.transpose(1, 2), memory_type(*memory))


def write(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Stores a layer's state; the cache keeps its buffers and copies into them."""
    cache.update_conv_state(state.convolution.transpose(1, 2), layer_idx)
    for i, memory in enumerate(state.memory):
        cache.update_recurrent_state(memory, layer_idx, i)
    written = cache.layers[layer_idx].has_previous_state  # pyright: ignore[reportAttributeAccessIssue]
    for i in written:
        written[i] = True


def count_tokens(cache: Cache, new: int, device: torch.device) -> None:
    """Adds ``new`` tokens to the cache's count. To be called before the layers write their states."""
    before = getattr(cache, _COUNT) if has_tokens(cache) else torch.zeros((), dtype=torch.int64, device=device)
    setattr(cache, _COUNT, before + new)


def has_tokens(cache: Cache) -> bool:
    """False for a cache that is new or was emptied by reset()."""
    return getattr(cache, _COUNT, None) is not None and cache.has_previous_state(0)


def tokens_seen(cache: Cache | None) -> int:
    """How many tokens (padding included) the cache has been fed; reads a value from the device."""
    return int(getattr(cache, _COUNT)) if cache is not None and has_tokens(cache) else 0
