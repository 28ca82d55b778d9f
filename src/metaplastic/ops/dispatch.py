"""Which implementation runs: one table of names, one rule for ``auto``, one list of what this machine must not use.

A named backend runs exactly that or raises. ``auto`` takes the first backend of the operator's order that fits the
device and the dtype, is installed and is not on the machine's block list, and warns once when that is a slow one.
The block list is a JSON file written by ``metaplastic doctor`` when a backend fails its check (:func:`block`).
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch


class Backend(NamedTuple):
    """Where an implementation lives and where it can run."""

    function: str  # "module:function"
    devices: tuple[str, ...]  # device types; empty: any
    requires: str | None  # package that must be importable
    slow: bool  # "auto" warns when it has to fall back to this on a device
    dtypes: tuple[torch.dtype, ...] = ()  # of q; empty: any
    hardware: str | None = None  # "module:function" that says why the device here cannot run it, None if it can
    # "module:function" of dtype, K and V that names the kernels which run then; None: the same for all sizes
    kernels: str | None = None
    gradients: str | None = None  # "module:function" of operator and per_key: why no gradients here, None if they are


_HALF = (torch.bfloat16, torch.float16)
_FLA_GRADIENTS = "metaplastic.ops.fla:no_gradients"

# In order of preference: "auto" takes the first that fits. What stands behind "reference" is taken by name only.
BACKENDS: dict[str, dict[str, Backend]] = {
    "palimpsa": {
        "cuda": Backend(
            "metaplastic.ops.palimpsa.cuda:apply",
            ("cuda",),
            "cuda.bindings",
            False,
            hardware="metaplastic.ops.nvrtc:too_old",
            kernels="metaplastic.ops.palimpsa.cuda.kinds:kernels",
        ),
        "triton": Backend(  # slow beside "cuda", fast beside "chunked"
            "metaplastic.ops.palimpsa.triton:apply",
            ("cuda", "xpu"),
            "triton",
            True,
            kernels="metaplastic.ops.dispatch:each_size",
        ),
        "cpu": Backend("metaplastic.ops.palimpsa.cpu:apply", ("cpu",), "numba", False),
        "chunked": Backend("metaplastic.ops.palimpsa.chunked:apply", (), None, True),
        "reference": Backend("metaplastic.ops.palimpsa.reference:apply", (), None, True),
    },
    "additive": {
        "chunked": Backend("metaplastic.ops.additive.chunked:apply", (), None, False),
        "reference": Backend("metaplastic.ops.additive.reference:apply", (), None, True),
        "fla": Backend("metaplastic.ops.fla:additive", ("cuda",), "fla", False, _HALF, gradients=_FLA_GRADIENTS),
    },
    "delta": {
        "chunked": Backend("metaplastic.ops.delta.chunked:apply", (), None, False),
        "reference": Backend("metaplastic.ops.delta.reference:apply", (), None, True),
        "fla": Backend("metaplastic.ops.fla:delta", ("cuda",), "fla", False, _HALF, gradients=_FLA_GRADIENTS),
    },
    "bayesian": {
        "cuda": Backend(
            "metaplastic.ops.bayesian.cuda:apply",
            ("cuda",),
            "cuda.bindings",
            False,
            (torch.bfloat16, torch.float16, torch.float32),
            hardware="metaplastic.ops.nvrtc:too_small",
            kernels="metaplastic.ops.bayesian.cuda.kinds:kernels",
        ),
        "chunked": Backend("metaplastic.ops.bayesian.chunked:apply", (), None, False),
        "reference": Backend("metaplastic.ops.bayesian.reference:apply", (), None, True),
    },
}


def block_list_path() -> Path:
    """``blocked.json`` in ``$METAPLASTIC_CACHE``, else in the user's cache folder."""
    root = os.environ.get("METAPLASTIC_CACHE")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "metaplastic")
    return Path(root) / "blocked.json"


@functools.cache
def _blocked() -> frozenset[str]:
    path = block_list_path()
    try:
        if not _heeded:
            return frozenset()
        listed = json.loads(path.read_text())
        if not isinstance(listed, dict):
            raise ValueError(f"expected an object, configuration -> reason, got {type(listed).__name__}")
        return frozenset(listed)
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"ignoring the unreadable block list {path}: {error}", stacklevel=2)
        return frozenset()


def configuration(op: str, backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> str:
    """The name of one configuration on the block list, e.g. ``palimpsa/cpu/cpu/float32``.

    With ``sizes`` (K and V), of those kernels alone that run for such a head; other sizes may share them.
    """
    name = f"{op}/{backend}/{device}/{str(dtype).removeprefix('torch.')}"
    kernels = BACKENDS[op][backend].kernels
    return f"{name}/{_look_up(kernels)(dtype, *sizes)}" if sizes and kernels else name


def each_size(dtype: torch.dtype, keys: int, values: int) -> str:
    """The name of kernels in which K and V are constants."""
    return f"{keys}x{values}"


def by_size(op: str) -> bool:
    """Whether kernels for some head sizes alone are on the block list."""
    return any(name.startswith(f"{op}/") and name.count("/") > 3 for name in _blocked())


by_size._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  (see _resolve)


def block(configurations: dict[str, str]) -> Path:
    """Write this machine's block list anew: configuration name -> reason. Atomic. Returns its path."""
    path = block_list_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            json.dump(configurations, file, indent=1)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _forget()
    return path


def _forget() -> None:
    _blocked.cache_clear()
    _choose.cache_clear()


_heeded = True


@contextlib.contextmanager
def block_list_ignored() -> Iterator[None]:
    """Within it, this process may run what is on the list, to check it once more; the list stays as it is."""
    global _heeded
    _heeded = False
    _forget()
    try:
        yield
    finally:
        _heeded = True
        _forget()


def on_device(op: str, device: str) -> list[str]:
    """The backends made for this type of device, whether or not they can run here."""
    return [name for name, entry in BACKENDS[op].items() if not entry.devices or device in entry.devices]


def reason_against(op: str, backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> str | None:
    """Why ``backend`` cannot run here (with heads of these ``sizes``, K and V, if given), or None if it can."""
    entry = BACKENDS[op][backend]
    if entry.devices and device not in entry.devices:
        return f"runs on {', '.join(entry.devices)} tensors, not on {device}"
    if entry.dtypes and dtype not in entry.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in entry.dtypes)
        return f"takes {names}, not {str(dtype).removeprefix('torch.')}"
    if entry.requires and not _installed(entry.requires):
        return f"needs the package {entry.requires}, which is not installed"
    if entry.hardware and (reason := _look_up(entry.hardware)()) is not None:
        return reason
    blocked = f"and is blocked (run `metaplastic doctor`; list: {block_list_path()})"
    if configuration(op, backend, device, dtype) in _blocked():
        return f"failed its check on this machine {blocked}"
    if sizes and by_size(op) and configuration(op, backend, device, dtype, sizes) in _blocked():
        return f"failed its check on this machine for heads of {sizes[0]} x {sizes[1]} {blocked}"
    return None


def no_gradients(op: str, backend: str, per_key: bool = False) -> str | None:
    """Why a backend that can run here has no gradients (of a decay per head or per key), or None if it has."""
    entry = BACKENDS[op][backend]
    return _look_up(entry.gradients)(op, per_key) if entry.gradients else None


@functools.cache
def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a dotted name: not even its parent is there
        return False


@functools.cache
def _choose(op: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> str:
    reasons = []
    for name, entry in BACKENDS[op].items():
        if (reason := reason_against(op, name, device, dtype, sizes)) is None:
            if entry.slow and reasons:
                warnings.warn(
                    f"ops.{op} on {device} runs the slow {name!r} backend ({'; '.join(reasons)})", stacklevel=4
                )
            return name
        reasons.append(f"{name}: {reason}")
    raise RuntimeError(f"ops.{op}: no backend for {dtype} on {device}: {'; '.join(reasons)}")


def check_name(op: str, backend: str) -> bool:
    """Raises unless ``backend`` is "auto" or one of the operator's backends (whether or not it can run here)."""
    if backend != "auto" and not (isinstance(backend, str) and backend in BACKENDS[op]):
        names = ", ".join(repr(name) for name in ("auto", *BACKENDS[op]))
        raise ValueError(f"ops.{op}: backend must be one of {names}, got {backend!r}")
    return True


_used: dict[str, set[str]] = {}


def used() -> dict[str, list[str]]:
    """Operator -> the backends that have really run in this process so far."""
    return {op: sorted(names) for op, names in _used.items()}


@functools.cache
def load(op: str, backend: str) -> Callable:
    """The function behind a backend; imports its module on first use."""
    return _look_up(BACKENDS[op][backend].function)


def _look_up(name: str) -> Callable:
    """``module:function``."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


# A dictionary for each operator, complete for a device when first read: what torch.compile has once looked at while
# tracing, it does not see grow.
_functions: dict[str, dict[str, Callable]] = {op: {} for op in BACKENDS}


def resolve(op: str, backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> Callable:
    """The function to call for ``backend`` ("auto" or a name) on this device and dtype; raises if it cannot run.

    ``sizes``: K and V of the heads, which matter where some kernels alone are blocked.
    """
    backend = _resolve(op, backend, device, dtype, tuple(int(size) for size in sizes) if by_size(op) else ())
    return _functions[op][backend]


def _resolve(op: str, backend: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> str:
    if backend == "auto":
        backend = _choose(op, device, dtype, sizes)
    elif check_name(op, backend) and (reason := reason_against(op, backend, device, dtype, sizes)) is not None:
        raise RuntimeError(f"ops.{op}: backend {backend!r} {reason}")
    _used.setdefault(op, set()).add(backend)
    if backend not in _functions[op]:
        for name in BACKENDS[op]:
            if name == backend or reason_against(op, name, device, dtype) is None:
                _functions[op][name] = load(op, name)
    return backend


# torch.compile runs _resolve once, while tracing; only the look-up is in its graph. This is what the decorator
# torch.compiler.assume_constant_result does, without its import of torch._dynamo (over a second).
_resolve._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def backends() -> dict[str, dict[str, str]]:
    """What exists here: operator -> {"auto on <device>": choice, backend: "ready" or why not}.

    In float32, or the first dtype that a backend takes.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    table: dict[str, dict[str, str]] = {}
    for op, entries in BACKENDS.items():
        table[op] = {}
        for device in devices:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    table[op][f"auto on {device}"] = _choose.__wrapped__(op, device, torch.float32)
                except RuntimeError as error:
                    table[op][f"auto on {device}"] = str(error)
            for name, entry in entries.items():
                reason = reason_against(op, name, device, (*entry.dtypes, torch.float32)[0])
                table[op][f"{name} on {device}"] = "ready" if reason is None else reason
    return table
