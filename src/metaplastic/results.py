"""One schema for every result file: what was measured, and everything needed to measure it again."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .ops import dispatch

SCHEMA = 1


def environment() -> dict[str, Any]:
    """Command, commit, device, versions, threads and the backends that have run in this process."""
    packages = (
        "metaplastic",
        "torch",
        "transformers",
        "accelerate",
        "numba",
        "numpy",
        "triton",
        "flash-linear-attention",
    )
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = {"cpu": _processor(), "threads": torch.get_num_threads(), "platform": platform.platform()}
    if torch.cuda.is_available():
        device["gpu"] = torch.cuda.get_device_name()
        device["cuda"] = torch.version.cuda
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device,
        "versions": versions,
        "backends": dispatch.used(),
    }


def record(name: str, measurements: dict[str, Any], *, seeds: list[int], settings: dict[str, Any]) -> dict[str, Any]:
    """A result: ``settings`` say what was run (every learning rate tried included), ``measurements`` what came out."""
    return {
        "schema": SCHEMA,
        "name": name,
        "settings": settings,
        "seeds": seeds,
        "measurements": measurements,
        "environment": environment(),
    }


def write_json(path: str | os.PathLike, content: Any) -> Path:
    """Writes JSON atomically: readers see the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, default=str) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path


def _commit() -> str | None:
    """The commit of the source tree this package runs from, with ``-dirty`` if it has changes; None outside git."""
    here = Path(__file__).resolve()
    # The first command fails where the package is merely installed somewhere inside another project's tree.
    commands = ["ls-files --error-unmatch " + here.name, "describe --always --abbrev=40 --dirty --exclude=*"]
    output = ""
    for command in commands:
        try:
            output = subprocess.check_output(
                ["git", *command.split()], cwd=here.parent, stderr=subprocess.DEVNULL, text=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return output.strip() or None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
