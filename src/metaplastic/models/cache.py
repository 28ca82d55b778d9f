"""Mixer states in Hugging Face's own cache object: where they live, and how they are forked, saved and loaded.

A :class:`~transformers.DynamicCache` is a list of layers. Ours, :class:`StateLayer`, hold a :class:`MixerState`: one
convolution state ``[B, W - 1, C]`` and the memory's fields. Hugging Face's own linear-attention layer hands a state out
only once a convolution state was written for its index, copies every new state into marked buffers (twice the traffic
of a decode step, and torch.compile compiles anew for every batch size) and can be told to crop what cannot be cropped.
Here a call replaces the states; no tensor is changed in place, so a cache is differentiable and what was read stays.

File format: safetensors, tensors ``layers.<i>.<field>`` as in ``MixerState`` (``convolution`` is ``[B, W - 1, C]``),
metadata ``format``, ``tokens_seen`` and ``mixers`` (a JSON list).
"""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ..layers import MIXERS
from ..layers.mixer import MixerState
from .configuration import MetaplasticConfig

FORMAT = "metaplastic cache 1"
_COUNT = "tokens_seen"  # attribute of the cache, a tensor: counting never waits for the device


class StateLayer(LinearAttentionLayer):
    """The state of one layer, replaced as a whole; ``mixer`` names what it belongs to."""

    mixer: str | None = None

    def put(self, state: MixerState, mixer: str) -> None:
        self.mixer, self.device, self.dtype = mixer, state.convolution.device, state.convolution.dtype
        self.conv_states[0] = state.convolution
        self.is_conv_states_initialized[0] = True
        for i, memory in enumerate(state.memory):
            self.recurrent_states[i] = memory
            self.is_recurrent_states_initialized[i] = True
            self.has_previous_state[i] = True

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
        self.mixer = None

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
        if getattr(cache, _COUNT, None) is not None or any(map(_holds_something, cache.layers)):
            raise ValueError(f"cache must come from a metaplastic model or be empty, got states of {cache.layers[0]}")
        cache.layers = new_cache(config).layers
    mixers = [getattr(layer, "mixer", None) for layer in cache.layers]
    if len(mixers) != len(config.mixers) or (mixers[0] is not None and mixers != list(config.mixers)):
        raise ValueError(f"cache holds the states of another model: of mixers {mixers}, expected {config.mixers}")
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


def write(cache: Cache, layer_idx: int, state: MixerState, mixer: str) -> None:
    """Replaces a layer's state."""
    cache.layers[layer_idx].put(state, mixer)  # pyright: ignore


def count_tokens(cache: Cache, new: int, device: torch.device) -> None:
    """Adds ``new`` tokens to the cache's count. To be called before the layers write their states."""
    before = getattr(cache, _COUNT) if has_tokens(cache) else torch.zeros((), dtype=torch.int64, device=device)
    setattr(cache, _COUNT, before + new)


def has_tokens(cache: Cache) -> bool:
    """False for a cache that is new or was emptied by reset()."""
    return getattr(cache, _COUNT, None) is not None and cache.layers[0].has_previous_state[0]  # pyright: ignore


def tokens_seen(cache: Cache | None) -> int:
    """How many tokens (padding included) the cache has been fed; reads a value from the device."""
    return int(getattr(cache, _COUNT)) if cache is not None and has_tokens(cache) else 0


def fork_cache(cache: Cache, *, repeats: int = 1, detach: bool = False) -> DynamicCache:
    """A copy to continue from, which leaves ``cache`` as it is.

    Args:
        cache: states of earlier calls.
        repeats: how often each sequence is repeated, next to one another: num_beams or num_return_sequences.
        detach: cut the graph, for truncated back-propagation through time.
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats must be an integer >= 1, got {repeats!r}")
    layers = _of(cache)
    fork = DynamicCache()
    fork.layers = [StateLayer(layer.number_of_states) for layer in layers]  # pyright: ignore
    if has_tokens(cache):
        for old, new in zip(layers, fork.layers, strict=True):
            states = old.get(MIXERS[old.mixer].memory_type)  # pyright: ignore
            copies = [_repeat(x.detach() if detach else x, repeats) for x in _fields(states).values()]
            new.put(MixerState(copies[0], type(states.memory)(*copies[1:])), old.mixer)  # pyright: ignore
        setattr(fork, _COUNT, getattr(cache, _COUNT).clone())
    return fork


def _of(cache: Cache) -> list[StateLayer]:
    if not isinstance(cache, DynamicCache) or not all(isinstance(layer, StateLayer) for layer in cache.layers):
        raise TypeError(f"cache must be the cache that a metaplastic model returned, got {type(cache).__name__}")
    return cache.layers  # pyright: ignore


def _repeat(x: Tensor, repeats: int) -> Tensor:
    """A copy with each row repeated; not a view of one, which torch.compile would tell from other states."""
    return x.index_select(0, torch.arange(x.shape[0], device=x.device).repeat_interleave(repeats))


def _fields(state: MixerState) -> dict[str, Tensor]:
    return {"convolution": state.convolution} | state.memory._asdict()


def save_cache(cache: Cache, path: str | os.PathLike) -> Path:
    """Writes the states and the token count to one safetensors file, whole or not at all; returns its path."""
    layers, path = _of(cache), Path(path)
    if not has_tokens(cache):
        raise ValueError("cache has seen no token: there is nothing to save")
    tensors = {}
    for i, layer in enumerate(layers):
        for name, x in _fields(layer.get(MIXERS[layer.mixer].memory_type)).items():  # pyright: ignore
            tensors[f"layers.{i}.{name}"] = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    metadata = {"format": FORMAT, _COUNT: str(tokens_seen(cache)), "mixers": json.dumps([x.mixer for x in layers])}
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, staged, metadata)
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return path


def load_cache(
    path: str | os.PathLike,
    config: MetaplasticConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> DynamicCache:
    """The cache that :func:`save_cache` wrote, for a model of this configuration.

    Args:
        path: the file.
        config: of the model that goes on; its mixers and sizes must be those of the model that saved.
        device: where to put the states. None: the CPU.
        dtype: of the model that goes on. None: as saved. Memories stay float32 (float64 for a float64 model).

    Raises:
        ValueError: a truncated or foreign file, or layers that do not fit the configuration.
    """
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"path: {path} is not a whole safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"path: {path} has format {metadata.get('format')!r}, expected {FORMAT!r}, as save_cache writes"
        )
    mixers, seen = _described(path, metadata)
    if mixers != list(config.mixers):
        raise ValueError(f"path: {path} holds states of mixers {mixers}, expected {config.mixers}")
    cache = new_cache(config)
    rows = [x.shape[0] for x in tensors.values() if x.dim()][:1]
    for i, like in enumerate(empty_states(config)):
        found = []
        for name, x in _fields(like).items():
            key, expected = f"layers.{i}.{name}", [*rows, *x.shape[1:]]
            if key not in tensors or list(tensors[key].shape) != expected:
                came = f"is {list(tensors[key].shape)}" if key in tensors else "is missing"
                raise ValueError(f"path: {path} does not fit the configuration: {key} {came}, expected {expected}")
            if not tensors[key].is_floating_point():
                raise ValueError(f"path: in {path} {key} is {tensors[key].dtype}, expected floating point")
            found.append(tensors.pop(key))
        if dtype is not None:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            found = [found[0].to(dtype), *(x.to(wide) for x in found[1:])]
        cache.layers[i].put(MixerState(found[0], type(like.memory)(*found[1:])), mixers[i])  # pyright: ignore
    if tensors:
        raise ValueError(f"path: {path} does not fit the configuration: unexpected {', '.join(sorted(tensors))}")
    setattr(cache, _COUNT, torch.tensor(seen, dtype=torch.int64, device=device))
    return cache


def _described(path: str | os.PathLike, metadata: dict[str, str]) -> tuple[list[str], int]:
    """The mixers and the token count that a file's metadata names."""
    mixers, seen = metadata.get("mixers", ""), metadata.get(_COUNT, "")
    if not seen.isdecimal() or int(seen) < 1:
        raise ValueError(f"path: in {path} metadata {_COUNT} is {seen!r}, expected a whole number > 0")
    try:
        names = json.loads(mixers)
    except ValueError:
        names = None
    if not isinstance(names, list):
        raise ValueError(f"path: in {path} metadata mixers is {mixers!r}, expected a JSON list of names")
    return names, int(seen)


def empty_states(config: MetaplasticConfig) -> list[MixerState]:
    """The states of all layers for one sequence, on the meta device: shapes without values."""
    with torch.device("meta"):
        return [MIXERS[name](**config.mixer_arguments(i)).init_state(1) for i, name in enumerate(config.mixers)]
