"""The output folder of a run: whose it is, who may write to it, and what of it may be deleted."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .. import results
from .checkpoint import checkpoints, remove
from .config import TrainConfig
from .saved import FINAL, holds_weights

RUN, RESULTS, TRACKED, LOCK = "run.json", "results.json", "tensorboard", ".lock"
DATA = "data_sha256"  # in run.json: what the data held
MODEL = "model_sha256"  # in run.json: what the model it began from was, if it began from one
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
    keys = (wanted.keys() | found.keys()) - {DATA, MODEL} - (defaults.keys() - wanted.keys())
    if different := sorted(key for key in keys if wanted.get(key) != found.get(key)):
        changes = ", ".join(f"{key} was {found.get(key)!r} and is {wanted.get(key)!r}" for key in different)
        raise ValueError(f"output: {output} holds another run ({changes}): {_ADVICE}")
    return True


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
        if not isinstance(found, dict) or "measurements" not in found:
            raise ValueError("no object with measurements")
    except ValueError as error:
        advice = "delete it, and the same command writes it again"
        raise ValueError(f"output: {file} holds no results ({error}): {advice}") from error
    return found


def claim(config: TrainConfig, output: Path, hashes: dict[str, str]) -> None:
    """Makes ``output`` this run's folder. Of what is there, only what a run writes is deleted."""
    (output / RESULTS).unlink(missing_ok=True)
    for old in (*checkpoints(output), output / FINAL, output / TRACKED):
        if old.is_dir():
            remove(old)
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
