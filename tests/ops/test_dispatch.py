"""What ``auto`` takes on a CUDA device, as the table and the block list say: no device is needed to ask."""

import types
import warnings

import pytest
import torch

from metaplastic.ops import accuracy, dispatch, nvrtc
from metaplastic.ops.palimpsa.cuda import kinds

HALF, FULL = torch.bfloat16, torch.float32
TOO_SMALL = nvrtc.too_small.__wrapped__  # not from its cache


@pytest.fixture(autouse=True)
def _a_machine_with_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("METAPLASTIC_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)
    monkeypatch.setattr(nvrtc, "too_old", lambda: None)
    monkeypatch.setattr(nvrtc, "too_small", lambda: None)
    dispatch._forget()
    yield
    monkeypatch.undo()
    dispatch._forget()


def auto(device="cuda", dtype=HALF, sizes=()):
    """The choice, and what it says."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return dispatch._choose("palimpsa", device, dtype, sizes), [str(w.message) for w in said]


def test_the_order_on_a_cuda_device(monkeypatch):
    assert auto() == ("cuda", [])
    monkeypatch.setattr(dispatch, "_installed", lambda package: package != "cuda.bindings")
    dispatch._forget()
    chosen, (said,) = auto()
    assert chosen == "triton" and "slow 'triton'" in said and "cuda: needs the package cuda.bindings" in said
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    dispatch._forget()
    chosen, (said,) = auto()
    assert chosen == "chunked" and "slow 'chunked'" in said and "triton: needs the package triton" in said


def test_other_devices():
    """Triton is declared for Intel's GPUs too; a CPU gets its own kernels, and nothing is said."""
    assert auto("xpu")[0] == "triton"
    assert auto("mps")[0] == "chunked"
    assert auto("cpu") == ("cpu", [])


def test_what_the_doctor_blocked_is_not_taken():
    dispatch.block({"palimpsa/cuda/cuda/bfloat16": "wrong"})
    chosen, (said,) = auto()
    assert chosen == "triton" and "cuda: failed its check on this machine" in said
    assert auto(dtype=FULL) == ("cuda", [])
    with pytest.raises(RuntimeError, match="backend 'cuda' failed its check"):
        dispatch._resolve("palimpsa", "cuda", "cuda", HALF)


def test_kernels_of_some_heads_alone():
    """Heads that run the blocked kernels go elsewhere, all others stay; a name raises for the first only."""
    name = dispatch.configuration("palimpsa", "cuda", "cuda", HALF, (96, 192))
    assert not dispatch.by_size("palimpsa")
    dispatch.block({name: "wrong"})
    assert dispatch.by_size("palimpsa") and not dispatch.by_size("delta")
    chosen, (said,) = auto(sizes=(96, 192))
    assert chosen == "triton" and "for heads of 96 x 192" in said
    assert auto(sizes=(91, 190))[0] == "triton"  # padded to the very same kernels
    assert auto(sizes=(48, 48)) == ("cuda", []) and auto(sizes=(96, 192), dtype=FULL) == ("cuda", [])
    with pytest.raises(RuntimeError, match="for heads of 96 x 192"):
        dispatch._resolve("palimpsa", "cuda", "cuda", HALF, (96, 192))
    dispatch.block({name: "wrong", dispatch.configuration("palimpsa", "triton", "cuda", HALF, (96, 192)): "wrong"})
    assert auto(sizes=(96, 192))[0] == "chunked" and auto(sizes=(91, 190))[0] == "triton"


def test_an_operator_asks_for_its_own_head_size(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "by_size", lambda op: True)
    monkeypatch.setattr(dispatch, "_resolve", lambda *args: asked.append(args[-1]) or "chunked")
    monkeypatch.setitem(dispatch._functions["palimpsa"], "chunked", dispatch.load("palimpsa", "chunked"))
    accuracy.OPERATORS["palimpsa"][0](**accuracy.example("palimpsa", accuracy.Case(length=2), FULL))
    assert asked == [(16, 24)]


# Of a kernel's numbers in its name: which differ in kind, and from where on they no longer do.
KINDS = {
    "forward": {1: 2, 3: 32},  # warps to a row, tokens of a tile
    "states": {1: 2},
    "backward_tensor": {1: 2, 3: 2},  # warps to a row, blocks to the values
    "backward": {1: 4, 2: 8},  # rows and warps
    "recurrent": {},
}


@pytest.mark.parametrize("dtype", accuracy.KERNEL_DTYPES, ids=str)
def test_the_checked_sizes_take_every_kernel(dtype):
    """There is no way to cut a state, K up to 256, that the doctor's sizes leave out."""

    def ways(keys, values):
        for kernel in kinds.kernels(dtype, keys, values).split(", "):
            name, numbers = kernel.split(" ")
            numbers = [int(n) for n in numbers.split("x")]
            yield name, *(min(numbers[i], most) for i, most in KINDS[name].items())

    checked = {way for sizes in accuracy.SIZES for way in ways(*sizes)}
    wanted = {
        way for keys in range(1, 257, 5) for values in (1, 17, 48, 64, 128, 192, 256) for way in ways(keys, values)
    }
    assert wanted <= checked


def test_a_device_with_little_shared_memory(monkeypatch):
    """A later device may have less of it than an earlier one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for major, memory, small in ((9, 232448, False), (10, 232448, False), (12, 101376, True), (8, 166912, True)):
        found = types.SimpleNamespace(major=major, minor=0, shared_memory_per_block_optin=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        reason = TOO_SMALL()
        assert (reason is not None) == small
        assert reason is None or f"this device has {major}.0 and {memory}" in reason
    monkeypatch.setattr(nvrtc, "too_old", lambda: "is not there")
    assert TOO_SMALL() == "is not there"
