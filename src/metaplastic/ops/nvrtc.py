"""CUDA C++ compiled when first needed: NVRTC, a disk cache, a launch. No CUDA toolkit, no build when installing.

``kernel(folder, name, device, ...)`` compiles ``<name>.cu`` of an operator's folder with the given definitions for the
device at hand. Every such file holds one kernel of its own name and ``const int launch_shape[2]``: its threads and
bytes of shared memory. The headers it includes are in its folder, or here (``instructions.cuh``).
The cache is ``cuda/`` beside the block list (see :mod:`metaplastic.ops.dispatch`), one file per kernel: its SHA-256 and
the machine code. A damaged file is compiled anew, a folder that cannot be written is done without.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import logging
import os
import re
import struct
import tempfile
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import dispatch

HEADERS = Path(__file__).parent  # that all operators share
OPTIONS = ("-std=c++17", "--fmad=true")

logger = logging.getLogger("metaplastic")
_lock = threading.Lock()
_DOUBLE, _INTEGER = struct.Struct("d"), struct.Struct("q")


LEAST_CAPABILITY = (8, 0)  # tensor cores for bf16, copies in the background
LARGE_BLOCK = 227 * 1024


@functools.cache
def too_old() -> str | None:
    """Why the CUDA device here cannot run the kernels; None if it can."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "runs on NVIDIA devices, and there is none here"
    found = torch.cuda.get_device_capability()
    if found >= LEAST_CAPABILITY:
        return None
    return f"needs compute capability 8.0, this device has {found[0]}.{found[1]}"


@functools.cache
def too_small() -> str | None:
    """Why it cannot run kernels with copy engine and nearly all of a Hopper's shared memory; None if it can."""
    if (reason := too_old()) is not None:
        return reason
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    if found.major >= 9 and found.shared_memory_per_block_optin >= LARGE_BLOCK:
        return None
    return (
        f"needs compute capability 9.0 and {LARGE_BLOCK} bytes of shared memory a block, this device has "
        f"{found.major}.{found.minor} and {found.shared_memory_per_block_optin}"
    )


class Kernel:
    """A loaded kernel: ``kernel(blocks, *arguments)`` launches it on the current stream of its device.

    Arguments: tensors and None become pointers, int a 32-bit int or an address, float a double.
    """

    def __init__(self, code: bytes, name: str, device: int):
        driver = _bindings("driver")
        self.name, self.device, self._driver = name, device, driver
        # A thread that has not used the device yet has no context, and what follows needs one.
        self._context = _check(driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)))
        _check(driver.cuCtxSetCurrent(self._context))
        self._library = _check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        kernel = _check(driver.cuLibraryGetKernel(self._library, name.encode()))
        address, size = _check(driver.cuLibraryGetGlobal(self._library, b"launch_shape"))
        shape = (ctypes.c_int * 2)()
        _check(driver.cuMemcpyDtoH(ctypes.addressof(shape), address, size))
        self.threads, self.shared_bytes = shape
        most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if self.shared_bytes > most:
            raise RuntimeError(
                f"{name}.cu needs {self.shared_bytes} bytes of shared memory a block, {device=} has {most}"
            )
        attributes = driver.CUfunction_attribute
        limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuKernelSetAttribute(limit, self.shared_bytes, kernel, driver.CUdevice(device)))
        self._function = _check(driver.cuKernelGetFunction(kernel))
        self._early = driver.CUlaunchAttribute()
        self._early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._early.value.programmaticStreamSerializationAllowed = 1
        self.registers = _check(driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS, self._function))

    def __call__(self, blocks: int, *arguments: Any, early: bool = False) -> None:
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(blocks, *arguments, early=early)
        values, pointers = pack(arguments)
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # without the object that takes a tenth of a launch
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        if early:
            config.attrs, config.numAttrs = [self._early], 1
        launch = config, self._function, pointers.buffer_info()[0], 0
        status = self._driver.cuLaunchKernelEx(*launch)
        if status[0].name == "CUDA_ERROR_INVALID_CONTEXT":  # such a thread, of autograd for one
            _check(self._driver.cuCtxSetCurrent(self._context))
            status = self._driver.cuLaunchKernelEx(*launch)
        _check(status)


def pack(arguments: tuple) -> tuple[array, array]:
    """The arguments' values, 8 bytes each, and the array of pointers to them that a launch takes."""
    values = array("q", [_word(x) for x in arguments])
    first, count = values.buffer_info()
    return values, array("q", range(first, first + 8 * count, 8))


def _word(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return _INTEGER.unpack(_DOUBLE.pack(x))[0]
    return x or 0  # of an int that is no address the first four bytes count


def _bindings(part: str) -> Any:
    """``cuda.bindings.driver`` or ``.nvrtc``: optional, and loaded only where a kernel is needed."""
    return importlib.import_module(f"cuda.bindings.{part}")


def _check(result: tuple) -> Any:
    """The values of a call into CUDA; raises unless it succeeded."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else values


@functools.cache
def kernel(folder: Path, name: str, device: int, **definitions: Any) -> Kernel:
    """The kernel ``name`` of a folder with these preprocessor definitions, compiled for a CUDA device (its index)."""
    with _lock, torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}" + "a" * (major >= 9)  # all that this very device can do
        return Kernel(machine_code(folder, name, architecture, definitions), name, device)


def machine_code(folder: Path, name: str, architecture: str, definitions: dict[str, Any]) -> bytes:
    """From the cache, else compiled and put there."""
    source = (folder / f"{name}.cu").read_bytes()
    headers = _headers(folder, source)
    options = [f"--gpu-architecture={architecture}", *OPTIONS, *(f"-D{n}={x}" for n, x in sorted(definitions.items()))]
    key = hashlib.sha256(repr((_compiler_version(), options, source, headers)).encode()).hexdigest()
    path = dispatch.block_list_path().parent / "cuda" / f"{name}-{key[:32]}.cubin"
    if (code := _read(path)) is None:
        start = time.perf_counter()
        code = _compile(name, source, headers, options)
        logger.info("compiled %s.cu for %s in %.1f s: %s", name, architecture, time.perf_counter() - start, options[3:])
        _write(path, code)
    return code


def _headers(folder: Path, source: bytes) -> dict[str, bytes]:
    """The headers that a source includes, those that they include among them."""
    found: dict[str, bytes] = {}
    for name in re.findall(rb'^#include "(\w+\.cuh)"', source, re.MULTILINE):
        place = folder / name.decode()
        header = (place if place.exists() else HEADERS / name.decode()).read_bytes()
        found |= {name.decode(): header, **_headers(folder, header)}
    return dict(sorted(found.items()))


@functools.cache
def _compiler_version() -> tuple[int, int]:
    nvrtc = _bindings("nvrtc")
    return tuple(_check(nvrtc.nvrtcVersion()))


def _compile(name: str, source: bytes, headers: dict[str, bytes], options: list[str]) -> bytes:
    nvrtc = _bindings("nvrtc")
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source, f"{name}.cu".encode(), len(headers), [*headers.values()], [n.encode() for n in headers]
        )
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [x.encode() for x in options])
        if status.value != 0:
            log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{name}.cu does not compile with {options}: {status.name}\n{log.decode()}")
        code = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def _read(path: Path) -> bytes | None:
    """What :func:`_write` wrote, or None if it is not there or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Atomically, so that no process ever reads half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                file.write(hashlib.sha256(code).digest() + code)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)
