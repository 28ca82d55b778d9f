"""The output folder of a run: whose it is, who may write to it, and what of it may be deleted.

A run is its settings and what is in its data, its model and its tokenizer. Where they lie decides nothing: run.json
holds hashes of them, and their paths for people. Of ``batch_size`` and ``accumulation`` the product decides, the rows
of a step, which are the same ones in the same order.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .. import results
from .checkpoint import checkpoints, remove
from .config import TrainConfig
from .saved import FINAL, holds_weights

RUN, RESULTS, TRACKED, CURVES, LOCK = "run.json", "results.json", "tensorboard", "curves", ".lock"
DATA = "data_sha256"  # in run.json: what the data held
MODEL = "model_sha256"  # in run.json: what the model it began from was, if it began from one
TOKENIZER = "tokenizer_sha256"
MEASURED = ("eval_loss", "eval_perplexity", "tokens_seen", "parameters")  # in every results file
# What a run writes to folders in which others may keep files of their own.
WRITTEN = {CURVES: ("index.html", "curves.png", "memory.png"), TRACKED: ("events.out.tfevents.*",)}
_PLACES = ("files", "data", "model")  # of which it decides by itself whether there are any
_FACTORS = ("batch_size", "accumulation")
_PRODUCT = " x ".join(_FACTORS)
_ADVICE = "choose another output, or overwrite (--overwrite)"


def holds_this_run(config: TrainConfig, output: Path, overwrite: bool) -> bool:
    """Whether ``output`` is this run's folder already; raises if it must not become so."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, expected a folder")
    found = read_run(output)
    if found is None:
        if output.is_dir() and any(not file.name.startswith(".") for file in output.iterdir()):
            raise ValueError(f"output: {output} has files but no run of ours, expected a new or empty folder")
        return False
    if overwrite:
        return False
    # What an earlier version did not write down was as it is by default.
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    wanted, found = (json.loads(json.dumps(each)) for each in (config.decisions(), defaults | found))
    hashed = {name for name in (DATA, MODEL, TOKENIZER) if name in found}
    one, other = _deciding(wanted, hashed), _deciding(found, hashed)
    keys = (one.keys() | other.keys()) - (defaults.keys() - wanted.keys())
    if different := sorted(key for key in keys if one.get(key) != other.get(key)):
        raise _another(output, different, other | found, one | wanted)  # the paths themselves, for people
    return True


def _deciding(run: dict[str, Any], hashed: set[str]) -> dict[str, Any]:
    """What of a run.json is compared as it stands; ``hashed``: the hashes there are for the rest."""
    kept = {name: value for name, value in run.items() if name not in (DATA, MODEL, TOKENIZER, *_FACTORS)}
    for name in _PLACES:
        if name != "model" or MODEL in hashed:
            kept[name] = bool(run[name])
    if TOKENIZER in hashed:
        del kept["tokenizer"]
    if run["dataset"] and os.path.isdir(run["dataset"]):  # it is never read whole, so no hash stands for it
        kept["dataset"] = os.path.realpath(run["dataset"])
    return kept | {_PRODUCT: math.prod(run[name] for name in _FACTORS)}


def check_hashes(config: TrainConfig, output: Path, hashes: dict[str, str], changed: str) -> None:
    """Raises ValueError unless the run in ``output`` began with the same data, model and tokenizer.

    ``changed`` says what has become another, if the data are where they were.
    """
    found = read_run(output) or {}
    wanted = json.loads(json.dumps(config.decisions()))
    names = {DATA: ("files", "data", "dataset"), MODEL: ("model",), TOKENIZER: ("tokenizer",)}
    since = f"since {output} was started: choose another output, or overwrite"
    said = {DATA: changed, MODEL: f"model: {config.model} has changed", TOKENIZER: "tokenizer: it has changed"}
    for kind, places in names.items():
        if kind in hashes and found.get(kind, None if kind == DATA else hashes[kind]) != hashes[kind]:
            if different := [name for name in places if found.get(name, wanted[name]) != wanted[name]]:
                raise _another(output, different, found, wanted)
            raise ValueError(f"{said[kind]} {since}")


def _another(output: Path, different: list[str], found: dict[str, Any], wanted: dict[str, Any]) -> ValueError:
    changes = ", ".join(f"{key} was {found.get(key)!r} and is {wanted.get(key)!r}" for key in different)
    return ValueError(f"output: {output} holds another run ({changes}): {_ADVICE}")


def read_run(output: Path) -> dict[str, Any] | None:
    """The configuration of the run in a folder, or None if there is none (or another program's file of that name)."""
    try:
        found = json.loads((output / RUN).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= {"mixer", "block_length", "steps"} else None


def identity(run: dict[str, Any]) -> str:
    """A run's name in its checkpoints: a hash of what is in its run.json."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def finished(output: Path) -> dict[str, Any] | None:
    """The results of a run that has ended, or None; raises ValueError if they cannot be read."""
    file = output / RESULTS
    if not file.is_file() or not holds_weights(output / FINAL):
        return None
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or not isinstance(found.get("measurements"), dict):
            raise ValueError("no object with measurements")
        for name in MEASURED:
            if isinstance(value := found["measurements"].get(name), bool) or not isinstance(value, int | float):
                raise ValueError(f"measurements.{name} is {str(value)[:60]!r}, expected a number")
    except ValueError as error:
        advice = "delete it, and the same command writes it again"
        raise ValueError(f"output: {file} holds no results ({error}): {advice}") from error
    return found


def claim(config: TrainConfig, output: Path, hashes: dict[str, str]) -> None:
    """Makes ``output`` this run's folder. Of what is there, only what a run writes is deleted.

    A checkpoint and ``final`` are one thing each, and go whole; of the other folders what is in ``WRITTEN``.
    """
    (output / RESULTS).unlink(missing_ok=True)
    for old in (*checkpoints(output), output / FINAL):
        if old.is_dir():
            remove(old)
    for name, patterns in WRITTEN.items():
        for file in (file for pattern in patterns for file in (output / name).glob(pattern)):
            if file.is_file():
                file.unlink()
        with contextlib.suppress(OSError):  # there is none, or others have files in it
            (output / name).rmdir()
    results.write_json(output / RUN, config.decisions() | hashes)


@contextlib.contextmanager
def alone(output: Path) -> Iterator[None]:
    """Keeps other runs out of ``output``, which is made if need be. The system lets go of it when a process dies.

    Of several processes that train together, the first holds it.
    """
    if int(os.environ.get("RANK", 0)) > 0:
        yield
        return
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"output: another process is training in {output}: wait for it, or choose another") from error
    try:
        yield
    finally:
        lock.release()
