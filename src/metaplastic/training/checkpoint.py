"""Checkpoints as folders: whole or not there, and known again.

A checkpoint is written to a staging folder and renamed when complete. Beside what the Hugging Face Trainer writes there
is a seal, ``checkpoint.json``: which run it is of, after how many steps, and the SHA-256 of every file that resuming
reads. So a file that is missing, damaged or of another run is found before anything is computed from it.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

STAGING = ".staging"
SEAL = "checkpoint.json"
CARD = "README.md"  # for people: they may edit it


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints of a run, oldest first. All are complete: incomplete ones never carry a checkpoint's name."""
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(filter(Path.is_dir, found), key=step_of)


def step_of(checkpoint: str | os.PathLike) -> int:
    """The number of optimiser steps before a checkpoint, from its name."""
    return int(os.fspath(checkpoint).rsplit("-", 1)[1])


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint of a run, or None."""
    found = checkpoints(folder)
    return str(found[-1]) if found else None


def remove(folder: Path) -> None:
    """Deletes a folder of a run; it loses its name first, so that a process killed meanwhile leaves no half of it."""
    aside = folder.with_name(f"{STAGING}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def clear_staging(run: str | os.PathLike) -> None:
    """Deletes what a killed process was writing or deleting in a run's folder."""
    for left in Path(run).glob(f"{STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def saving(name: str, run: str | os.PathLike) -> Iterator[None]:
    """Makes a failure to write one OSError that says what is still there; what was half written is deleted."""
    try:
        yield
    except Exception as error:
        # On a full disk torch.save fails with a RuntimeError (of several wordings), tokenizers with a bare Exception;
        # any other is a fault of ours.
        of_torch = isinstance(error, RuntimeError) and _raised_in("torch.serialization", error)
        of_tokenizers = type(error) is Exception and "os error" in str(error)
        if not (isinstance(error, (OSError, SafetensorError)) or of_torch or of_tokenizers):
            raise
        clear_staging(run)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        full = " (no space left?)" if isinstance(error, RuntimeError) else ""
        what = f"output: {name} could not be saved in {run}: {reason}{full}"
        kept = f"; {found[-1].name} is whole" if (found := checkpoints(run)) else ""
        raise OSError(f"{what}{kept}; once there is room to write, the same command goes on") from error


def seal(folder: Path, run: str | None, step: int) -> None:
    """Writes ``folder/checkpoint.json``, after everything else."""
    files = {str(file.relative_to(folder)): sha256_of(file) for file in sorted(folder.rglob("*")) if _counts(file)}
    (folder / SEAL).write_text(json.dumps({"run": run, "step": step, "sha256": files}, indent=1) + "\n")


def check_seal(checkpoint: str | os.PathLike, run: str) -> None:
    """Raises ValueError unless ``checkpoint`` is whole, as it was saved, of this run, and of the step in its name."""
    folder = Path(checkpoint)
    advice = "delete that folder to go on from the checkpoint before it, or from the beginning if there is none"
    try:
        found = json.loads((folder / SEAL).read_text())
        files, origin, step = dict(found["sha256"]), found["run"], found["step"]
    except FileNotFoundError as error:
        raise ValueError(
            f"output: {folder} has no {SEAL}, expected what a checkpoint is sealed with: {advice}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"output: {folder / SEAL} cannot be read ({error}): {advice}") from error
    if origin != run:
        raise ValueError(f"output: {folder} is a checkpoint of another run (other settings or other data): {advice}")
    if step != step_of(folder):
        raise ValueError(f"output: {folder} is the checkpoint of step {step} under another name: {advice}")
    for name, sha256 in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"output: {folder} lacks {name}: {advice}")
        if sha256_of(folder / name) != sha256:
            raise ValueError(f"output: {folder / name} is damaged, it is not what was saved: {advice}")


def sha256_of(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Asks the system to put a file or folder on disk before we go on (not supported everywhere for folders)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _counts(file: Path) -> bool:
    return file.is_file() and file.name not in (CARD, SEAL)


def _raised_in(module: str, error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == module:
            return True
        trace = trace.tb_next
    return False
