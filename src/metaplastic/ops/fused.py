"""Triton kernels in place of a few of PyTorch's operations around a memory: whether they can run here.

They have no table in ``dispatch``: PyTorch's operations stand in for them anywhere, and ``auto`` takes them where there
is no reason against the kernels. Each name is one configuration on the machine's block list, for all dtypes.
"""

import functools
import os
import shutil

from .dispatch import _blocked, _installed, block_list_path

DEVICES = ("cuda", "xpu")  # that Triton compiles for


def configuration(name: str, device: str) -> str:
    """The name of these kernels on the machine's block list."""
    return f"{name}/triton/{device}"


def reason_against(name: str, device: str) -> str | None:
    """Why the kernels of this name cannot run here, or None if they can."""
    reason = _unable(device)
    if reason is None and configuration(name, device) in _blocked():
        return f"failed its check on this machine and is blocked (list: {block_list_path()})"
    return reason


@functools.cache
def _unable(device: str) -> str | None:
    if device not in DEVICES:
        return f"runs on {', '.join(DEVICES)} tensors, not on {device}"
    if not _installed("triton"):
        return "needs the package triton, which is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler, with which Triton builds what starts its kernels (gcc, clang or $CC)"
    return None
