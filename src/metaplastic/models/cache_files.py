"""Caches in files: written whole or not at all, and read with every doubt an error.

Format: safetensors, tensors ``layers.<i>.<field>`` as in ``MixerState`` (``convolution`` is ``[B, W - 1, C]``),
metadata ``format``, ``tokens_seen`` and ``mixers`` (a JSON list: of every layer the
mixer's name and the options on which the meaning of its state depends).
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache, DynamicCache

from ..layers import MIXERS
from ..layers.mixer import MixerState
from .cache import COUNT, Owner, empty_states, fields, has_tokens, new_cache, our_layers, owners, tokens_seen
from .configuration import MetaplasticConfig

FORMAT = "metaplastic cache 1"
_WIDE = (torch.float32, torch.float64)  # what memories are kept in
_FLOATS = (*_WIDE, torch.bfloat16, torch.float16)


def save_cache(cache: Cache, path: str | os.PathLike) -> Path:
    """Writes the states and the token count to one safetensors file, whole or not at all; returns its path.

    A link is followed; the file gets the permissions of any new file.
    """
    layers, path = our_layers(cache), Path(path)
    _refuse_folder(path)
    if not has_tokens(cache):
        raise ValueError("cache has seen no token: there is nothing to save")
    tensors = {}
    for i, layer in enumerate(layers):
        for name, x in fields(layer.get(MIXERS[layer.mixer].memory_type)).items():  # pyright: ignore
            tensors[f"layers.{i}.{name}"] = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    metadata = {"format": FORMAT, COUNT: str(tokens_seen(cache)), "mixers": json.dumps([x.owner for x in layers])}
    target = Path(os.path.realpath(path))
    staged = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        staged.touch(exist_ok=False)
        mode = staged.stat().st_mode  # safetensors makes files that only their owner can read
        save_file(tensors, staged, metadata)
        staged.chmod(mode)
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, target)
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
        TypeError: an argument of the wrong kind.
        ValueError: a truncated or foreign file, or layers that do not fit the configuration.
    """
    if not isinstance(config, MetaplasticConfig):
        raise TypeError(f"config must be a MetaplasticConfig, got {type(config).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _FLOATS))}, got {dtype}")
    place = _device(device)
    _refuse_folder(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"path: {path} is not a whole safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"path: {path} has format {metadata.get('format')!r}, expected {FORMAT!r}, as save_cache writes"
        )
    mixers, seen = _described(path, metadata)
    if mixers != (expected := owners(config)):
        came, wanted = (list(map(str, each)) for each in (mixers, expected))
        raise ValueError(f"path: {path} holds states of mixers {came}, expected {wanted}")
    cache = new_cache(config)
    rows = [x.shape[0] for x in tensors.values() if x.dim()][:1]
    for i, like in enumerate(empty_states(config)):
        owner, found = mixers[i], []
        grows = MIXERS[owner.mixer].growing_state
        for name, x in fields(like).items():
            key, expected = f"layers.{i}.{name}", [*rows, *x.shape[1:]]
            if grows and name != "convolution":
                expected[1:2] = [MIXERS[owner.mixer].slots(seen, **owner.options)]
            if key not in tensors or list(tensors[key].shape) != expected:
                came = f"is {list(tensors[key].shape)}" if key in tensors else "is missing"
                raise ValueError(f"path: {path} does not fit the configuration: {key} {came}, expected {expected}")
            if tensors[key].dtype not in (kinds := _kinds(name, owner.mixer)):
                names = ", ".join(map(str, kinds))
                raise ValueError(f"path: in {path} {key} is {tensors[key].dtype}, expected one of {names}")
            if tensors[key].is_floating_point() and not bool(tensors[key].isfinite().all()):
                raise ValueError(f"path: in {path} {key} holds NaN or infinity, expected finite numbers")
            if name == "positions":
                _check_positions(path, key, tensors[key], seen)
            found.append(tensors.pop(key).to(place))
            if dtype is not None and kinds is _FLOATS:
                found[-1] = found[-1].to(dtype)
            elif dtype is not None and kinds is _WIDE:
                found[-1] = found[-1].to(torch.float64 if dtype == torch.float64 else torch.float32)
        cache.layers[i].put(MixerState(found[0], type(like.memory)(*found[1:])), owner)  # pyright: ignore
    if tensors:
        raise ValueError(f"path: {path} does not fit the configuration: unexpected {', '.join(sorted(tensors))}")
    setattr(cache, COUNT, torch.tensor(seen, dtype=torch.int64, device=place))
    return cache


def _kinds(name: str, mixer: str) -> tuple[torch.dtype, ...]:
    """In which dtypes a field of a state may come: activations in any, memories in at least float32."""
    if name == "positions":
        return (torch.int64,)
    return _FLOATS if name == "convolution" or MIXERS[mixer].growing_state else _WIDE


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"path must be a file, got the folder {path}")


def _device(device: Any) -> torch.device:
    """Checked before a file is opened, and that there is such a device."""
    try:
        return torch.empty(0, device="cpu" if device is None else device).device
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: a PyTorch without CUDA
        raise ValueError(f"device must be a device that is there, got {device!r} ({error})") from error


def _described(path: str | os.PathLike, metadata: dict[str, str]) -> tuple[list[Owner], int]:
    """The layers and the token count that a file's metadata names."""
    mixers, seen = metadata.get("mixers", ""), metadata.get(COUNT, "")
    if not (seen.isascii() and seen.isdecimal() and len(seen) < 19):  # 19 digits may not fit an int64
        raise ValueError(f"path: in {path} metadata {COUNT} is {seen[:40]!r}, expected a whole number below 10^18")
    try:
        found = [Owner(name, options) for name, options in json.loads(mixers)]
    except (ValueError, TypeError, RecursionError):
        found = []
    if not found or not all(isinstance(each.mixer, str) and isinstance(each.options, dict) for each in found):
        expected = "a JSON list of a mixer's name and its options for every layer"
        raise ValueError(f"path: in {path} metadata mixers is {mixers[:200]!r}, expected {expected}")
    return found, int(seen)


def _check_positions(path: str | os.PathLike, key: str, positions: Tensor, seen: int) -> None:
    """Real tokens are counted one by one, the last of them below ``seen``; padding is -1."""
    real = positions >= 0
    later = real.sum(1, keepdim=True) - real.cumsum(1)
    last = positions.amax(1, keepdim=True) if positions.shape[1] else positions
    if not (torch.where(real, last - later, -1) == positions).all() or not (last < seen).all():
        expected = f"those of consecutive tokens below tokens_seen = {seen}, and -1 at padding"
        raise ValueError(f"path: in {path} {key} are not positions, expected {expected}")
