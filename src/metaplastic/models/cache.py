"""Mixer states in Hugging Face's own cache object: where they live, how calls change them, and how they are forked.

A :class:`~transformers.DynamicCache` is a list of layers. Ours, :class:`StateLayer`, hold a :class:`MixerState`: one
convolution state ``[B, W - 1, C]`` and the memory's fields. Hugging Face's own linear-attention layer hands a state out
only once a convolution state was written for its index, copies every new state into marked buffers (twice the traffic
of a decode step, and torch.compile compiles anew for every batch size) and can be told to crop what cannot be cropped.
Here a call replaces the states; no tensor is changed in place, so a cache is differentiable and what was read stays.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ..layers import MIXERS
from ..layers.mixer import MixerState
from .configuration import MetaplasticConfig, mixer_defaults

COUNT = "tokens_seen"  # attribute of the cache, a tensor: counting never waits for the device


class Owner(NamedTuple):
    """The layer that a state belongs to: its mixer, and the options on which the meaning of the state depends."""

    mixer: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.mixer} ({options})" if options else self.mixer


def owners(config: MetaplasticConfig) -> list[Owner]:
    """Of every layer of a model."""
    found = []
    for i, name in enumerate(config.mixers):
        given = mixer_defaults(name) | config.mixer_arguments(i)
        found.append(Owner(name, {option: given[option] for option in MIXERS[name].state_options}))
    return found


class StateLayer(LinearAttentionLayer):
    """The state of one layer, replaced as a whole."""

    owner: Owner | None = None

    def put(self, state: MixerState, owner: Owner) -> None:
        self.owner, self.device, self.dtype = owner, state.convolution.device, state.convolution.dtype
        self.conv_states[0] = state.convolution
        self.is_conv_states_initialized[0] = True
        for i, memory in enumerate(state.memory):
            self.recurrent_states[i] = memory
            self.is_recurrent_states_initialized[i] = True
            self.has_previous_state[i] = True

    @property
    def mixer(self) -> str | None:
        return None if self.owner is None else self.owner.mixer

    def get(self, memory_type: type) -> MixerState:
        memory = [self.recurrent_states[i] for i in range(len(memory_type._fields))]
        return MixerState(self.conv_states[0], memory_type(*memory))  # pyright: ignore

    @property
    def batch_size(self) -> int:
        convolution = self.conv_states[0]
        return -1 if convolution is None else convolution.shape[0]

    # generate() would record CUDA graphs, which need buffers that stay.
    is_compileable = False  # pyright: ignore[reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportAssignmentType]

    def reset(self) -> None:
        self.__init__(self.number_of_states)
        self.owner = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: _repeat(x, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices.to(x.device)])

    def _each(self, change) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, x in states.items():
                states[i] = None if x is None else change(x)

    def activate_past_recording(self) -> None:
        raise NotImplementedError(_NO_WAY_BACK)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(f"{_NO_WAY_BACK} (asked to take back {abs(tokens_to_remove)} tokens)")


_NO_WAY_BACK = "a recurrent state cannot be rolled back: fork_cache(cache) before the tokens that may be taken back"


def new_cache(config: MetaplasticConfig) -> DynamicCache:
    """An empty cache."""
    cache = DynamicCache(config=config)
    layers = [StateLayer(len(MIXERS[name].memory_type._fields)) for name in config.mixers]
    cache.layers = layers  # pyright: ignore
    return cache


def enter(cache: Cache, config: MetaplasticConfig, batch: int) -> None:
    """Checks that ``cache`` fits the model and the ``batch`` rows of its input; makes the layers of a new one ours."""
    if not isinstance(cache, DynamicCache):
        raise TypeError(f"cache must be a transformers.DynamicCache or None, got {type(cache).__name__}")
    if not any(isinstance(layer, StateLayer) for layer in cache.layers):
        if getattr(cache, COUNT, None) is not None or any(map(_holds_something, cache.layers)):
            raise ValueError(f"cache must come from a metaplastic model or be empty, got states of {cache.layers[0]}")
        cache.layers = new_cache(config).layers
    found, expected = [getattr(layer, "owner", None) for layer in cache.layers], owners(config)
    if len(found) != len(expected) or (found[0] is not None and found != expected):
        came, wanted = (list(map(str, each)) for each in (found, expected))
        raise ValueError(f"cache holds the states of another model: of mixers {came}, expected {wanted}")
    if has_tokens(cache) and (rows := cache.layers[0].batch_size) != batch:  # pyright: ignore
        raise ValueError(
            f"cache holds the states of {rows} sequences, but the input has {batch} rows "
            "(fork_cache(cache, repeats=n) repeats each sequence n times)"
        )


def _holds_something(layer) -> bool:
    states = (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values())
    return any(x is not None for x in (*states, getattr(layer, "keys", None)))


def read(cache: Cache, layer_idx: int, memory_type: type) -> MixerState | None:
    """The state of one layer, or None before its first token."""
    layer = cache.layers[layer_idx]
    return layer.get(memory_type) if layer.has_previous_state[0] else None  # pyright: ignore


def commit(cache: Cache, new: Sequence[MixerState], owner: Sequence[Owner], tokens: int, device: torch.device) -> None:
    """Replaces the states of all layers and counts the ``tokens`` that led to them."""
    before = getattr(cache, COUNT) if has_tokens(cache) else torch.zeros((), dtype=torch.int64, device=device)
    for layer, state, each in zip(cache.layers, new, owner, strict=True):
        layer.put(state, each)  # pyright: ignore
    setattr(cache, COUNT, before + tokens)


def has_tokens(cache: Cache) -> bool:
    """False for a cache that is new or was emptied by reset()."""
    return getattr(cache, COUNT, None) is not None and cache.layers[0].has_previous_state[0]  # pyright: ignore


def tokens_seen(cache: Cache | None) -> int:
    """How many tokens (padding included) the cache has been fed; reads a value from the device."""
    return int(getattr(cache, COUNT)) if cache is not None and has_tokens(cache) else 0


def fork_cache(cache: Cache, *, repeats: int = 1, detach: bool = False) -> DynamicCache:
    """A copy to continue from, which leaves ``cache`` as it is.

    Args:
        cache: states of earlier calls.
        repeats: how often each sequence is repeated, next to one another: num_beams or num_return_sequences.
        detach: cut the graph, for truncated back-propagation through time.

    Of a batch that ``generate`` returned, go on only with rows that did not end early: the cache of a row that ended
    before the others has been fed the padding behind its end.
    """
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise ValueError(f"repeats must be an integer >= 1, got {repeats!r}")
    layers = our_layers(cache)
    fork = DynamicCache()
    fork.layers = [StateLayer(layer.number_of_states) for layer in layers]  # pyright: ignore
    if has_tokens(cache):
        for old, new in zip(layers, fork.layers, strict=True):
            states = old.get(MIXERS[old.mixer].memory_type)  # pyright: ignore
            copies = [_repeat(x.detach() if detach else x, repeats) for x in fields(states).values()]
            new.put(MixerState(copies[0], type(states.memory)(*copies[1:])), old.owner)  # pyright: ignore
        setattr(fork, COUNT, getattr(cache, COUNT).clone())
    return fork


def our_layers(cache: Cache) -> list[StateLayer]:
    if not isinstance(cache, DynamicCache) or not all(isinstance(layer, StateLayer) for layer in cache.layers):
        raise TypeError(f"cache must be the cache that a metaplastic model returned, got {type(cache).__name__}")
    return cache.layers  # pyright: ignore


def _repeat(x: Tensor, repeats: int) -> Tensor:
    """A copy with each row repeated; not a view of one, which torch.compile would tell from other states."""
    return x.index_select(0, torch.arange(x.shape[0], device=x.device).repeat_interleave(repeats))


def fields(state: MixerState) -> dict[str, Tensor]:
    return {"convolution": state.convolution} | state.memory._asdict()


def empty_states(config: MetaplasticConfig) -> list[MixerState]:
    """The states of all layers for one sequence, on the meta device: shapes without values."""
    with torch.device("meta"):
        return [MIXERS[name](**config.mixer_arguments(i)).init_state(1) for i, name in enumerate(config.mixers)]
