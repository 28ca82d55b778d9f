"""The operators' CUDA kernels on the CPU: the same sources, compiled for this machine with a C++ compiler."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from metaplastic.ops import nvrtc

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ here: the CUDA kernels are NOT checked")


_built: dict[tuple, Callable] = {}  # of all test files in a process


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """``emulator(folder, name, device, **definitions)`` stands in for :func:`metaplastic.ops.nvrtc.kernel`."""
    libraries = tmp_path_factory.mktemp("emulated")

    def build(folder, name, device, **definitions):
        wanted = (folder, name, *sorted(definitions.items()))
        if wanted in _built:
            return _built[wanted]
        defined = [f"-D{n}={x}" for n, x in sorted(definitions.items())]
        source = f"""#include "{name}.cu"
extern "C" void run(unsigned blocks, void** arguments) {{
    emulation::launch({name}, blocks, launch_shape[0], launch_shape[1], arguments);
}}"""
        key = hashlib.sha256(repr((folder, defined)).encode()).hexdigest()[:16]
        library = libraries / f"{name}{key}.so"
        includes = [f"-I{place}" for place in (HERE, folder, nvrtc.HEADERS)]
        command = [COMPILER, "-O1", "-std=c++17", "-w", "-DEMULATED", *defined, *includes]
        subprocess.run(
            [*command, "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=source.encode(), check=True
        )
        run = ctypes.CDLL(str(library)).run

        def launch(blocks, *arguments, early=False):  # one kernel after another
            values, pointers = nvrtc.pack(arguments)
            run(ctypes.c_uint(blocks), ctypes.c_void_p(pointers.buffer_info()[0]))

        return _built.setdefault(wanted, launch)

    return build


@pytest.fixture
def emulated(emulator, monkeypatch):
    """The names of the kernels that ran, each on the emulator."""
    used = []

    def kernel(folder, name, device, **definitions):
        used.append(name)
        return emulator(folder, name, device, **definitions)

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    return used
