"""The short convolution's Triton kernels on the CPU: run by Triton's interpreter, and compiled, which needs no GPU.

What it is, and PyTorch's form of it, is in layers/test_convolution.py; on a GPU, in layers/test_gpu.py.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from metaplastic.ops import convolution, dispatch, fused
from metaplastic.ops.convolution import check, short_convolution
from metaplastic.ops.fused_accuracy import failures

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton here: the kernels of the convolution are NOT checked"
)


def run(code: str, **environment: str) -> list:
    """What ``code`` leaves in ``found``. Triton reads TRITON_INTERPRET when it is imported: a process of its own."""
    environment = os.environ | {"TRITON_CACHE_DIR": os.environ["METAPLASTIC_CACHE"]} | environment
    code += "\nimport json\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


INTERPRETED = """
import math, torch
from metaplastic.ops import convolution, fused
from metaplastic.ops.convolution import launch, short_convolution

fused.DEVICES = ("cpu",)
torch.manual_seed(0)
launch.FORWARD = launch.FORWARD._replace(tokens=8, channels=32, rows=4)
launch.BACKWARD = launch.BACKWARD._replace(tokens=9, channels=32, rows=4)
launch.PROGRAMS = 3  # several slots a program
found = []

def inputs(B, T, C, W, bias, state, offsets, dtype):
    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    wide = make(B, T, C + 3)
    rows = B if offsets is None else len(offsets) - 1
    return [
        wide[..., 2 : C + 2],  # columns of a wider matrix, as projections are
        make(C, W),
        make(C) if bias else None,
        make(rows, W - 1, C) if state else None,
        None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
    ]

def results(backend, given, silu, final, dtype):
    *tensors, offsets = given
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in tensors]
    given = dict(cu_seqlens=offsets, activation="silu" if silu else None)
    outputs = short_convolution(*leaves, **given, backend=backend)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=draw).half().to(dtype) for y in outputs]
    loss = sum((y * v).sum() for y, v in list(zip(outputs, weights))[: 2 if final else 1])
    leaves = [x for x in leaves if x is not None]
    return [*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]

def check(*case, silu=True, final=True, dtype=torch.float64, tolerance=1e-12):
    given = inputs(*case, dtype)
    exact = results("torch", given, silu, final, torch.float64)
    for name, x, y in zip(("y", "state", *"gradients"), results("triton", given, silu, final, dtype), exact):
        assert x.shape == y.shape and x.dtype == dtype
        error = (x.double() - y).abs().max().item() / max(1.0, y.abs().max().item()) if y.numel() else 0.0
        found.append((str((*case, silu, final, dtype, name)), error if math.isfinite(error) else 1e9, tolerance))
"""

CASES = """
packed = (0, 0, 1, 3, 3, 16, 19)
check(2, 19, 5, 4, True, True, None)
check(2, 13, 40, 4, False, False, None, silu=False)  # two blocks of channels
check(1, 22, 5, 4, True, True, packed)  # empty and short sequences, and a tail
check(1, 12, 3, 3, False, True, (0, 9), final=False)
check(1, 13, 3, 4, True, False, (0, 1, 13), silu=False)
for width in (1, 2, 8):
    check(1, 12, 3, width, True, True, (0, 9, 9, 11))
for length in (0, 1, 2):  # less than is looked back on: the new state has some of the old one
    check(2, length, 4, 4, True, True, None)
check(0, 4, 3, 4, True, True, None)
check(1, 9, 3, 4, True, True, (0,))
check(1, 0, 3, 4, True, True, (0, 0))
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3)):  # sums are float32 until they are rounded
    check(1, 13, 3, 4, True, True, None, dtype=dtype, tolerance=tolerance)

given = inputs(1, 15, 5, 4, False, True, (0, 5, 12, 15), torch.float32)
def both():
    return convolution._op(*given, True)[0], convolution._op_backward(given[0] * 0 + 1, None, *given, True)[0]
y, dx = both()
given[0][:, 8:12] = torch.nan  # neither the past nor other sequences see it
later, d_later = both()
same = torch.equal(y[:, :8], later[:, :8]) and torch.equal(y[:, 12:], later[:, 12:])
same = same and torch.equal(dx[:, :5], d_later[:, :5]) and torch.equal(dx[:, 12:], d_later[:, 12:])
found.append(("causal", 1.0 - (same and later[:, 8:12].isnan().all().item()), 0.0))

for case in ((1, 9, 3, 3, True, True, (0, 2, 7)), (1, 5, 3, 1, False, False, None)):
    *tensors, offsets = inputs(*case, torch.float32)
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.metaplastic.short_convolution.default, (*leaves, offsets, True))

counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
compiled = torch.compile(lambda *z: short_convolution(*z[:4], cu_seqlens=z[4], activation="silu", backend="triton"),
                         fullgraph=True, dynamic=True, backend=counter)
for length in (7, 9):
    given = inputs(1, length, 5, 4, True, True, (0, 2, length - 1), torch.float64)
    leaves = [x.detach().requires_grad_() for x in given[:4]]
    for function, into in ((compiled, []), (lambda *z: convolution._op(*z, True), kept := [])):
        y, state = function(*leaves, given[4])
        into += [y, state, *torch.autograd.grad(y.square().sum() + state.sum(), leaves)]
        if into is not kept:
            first = into
    found.append(("compiled", max((a - b).abs().max().item() for a, b in zip(first, kept)), 0.0))
found.append(("graphs", float(counter.frame_count != 1), 0.0))

try:
    convolution.short_convolution(*given[:4], cu_seqlens=given[4], backend="triton")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], given[0])
        short_convolution(dual, given[1], backend="triton")
    found.append(("forward mode is refused", 1.0, 0.0))
except NotImplementedError as error:
    found.append(("forward mode is refused", float("backend='torch'" not in str(error)), 0.0))
"""


@needs_triton
def test_interpreted():
    """Against PyTorch's form in float64; the op's registration, one graph for every length, the same bits in it."""
    errors = run(INTERPRETED + CASES, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert len(errors) > 90
    wrong = [(case, error) for case, error, tolerance in errors if not error <= tolerance]
    assert not wrong


COMPILED = """
import triton.language as tl
from metaplastic.ops.convolution import kernels, launch
from tests.ops.machine_code import sizes

types = dict.fromkeys(("x", "y", "state", "new_state", "dy", "d_new_state", "dx", "d_state"), "*bf16")
types |= dict.fromkeys(("weight", "bias", "sums"), "*fp32") | {"offsets": "*i64"}
options = dict.fromkeys(("BIAS", "STATE", "FINAL", "SILU", "PACKED"), True) | dict(W=4, REAL=tl.float32)
given = []
for kernel, blocks in ((kernels.forward_kernel, launch.FORWARD), (kernels.backward_kernel, launch.BACKWARD)):
    shape = dict(BT=blocks.tokens, BC=blocks.channels, ROWS=blocks.rows, num_warps=blocks.warps)
    given.append((kernel, options | shape))
found = sizes(given, types)
"""


@needs_triton
def test_kernels_compile():
    """By the compiler itself, for an NVIDIA and an AMD GPU."""
    assert min(run(COMPILED, TRITON_INTERPRET="0")) > 1000  # bytes of machine code


def test_a_named_backend_runs_that_or_raises(monkeypatch):
    x, weight = torch.randn(1, 3, 2), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"ops.convolution: backend 'triton' runs on cuda, xpu tensors, not on cpu"):
        short_convolution(x, weight, backend="triton")
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', 'triton', 'torch', got 'cuda'"):
        short_convolution(x, weight, backend="cuda")
    with pytest.raises(ValueError, match=r"activation must be one of 'silu', None, got 'relu'"):
        short_convolution(x, weight, activation="relu")
    assert convolution.choose("auto", "cpu") == "torch"
    monkeypatch.setattr(fused, "_installed", lambda package: True)
    monkeypatch.setattr(fused.shutil, "which", lambda name: "/bin/cc" if name == "clang" else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(fused, "_unable", fused._unable.__wrapped__)
    reason = convolution.reason_against
    assert reason("triton", "cuda") is None
    assert reason("triton", "cuda", wide=True) == "takes weights of up to 8 tokens"
    dispatch.block({"short_convolution/triton/cuda": "test"})
    assert "failed its check" in reason("triton", "cuda")
    assert convolution.choose("auto", "cuda") == "torch"
    with dispatch.block_list_ignored():
        assert convolution.choose("auto", "cuda") == "triton"
    monkeypatch.setattr(fused.shutil, "which", lambda name: None)
    assert "C compiler" in reason("triton", "cuda")
    monkeypatch.setattr(fused, "_installed", lambda package: False)
    assert "the package triton" in reason("triton", "cuda")


def test_what_the_kernels_would_read_past_is_refused():
    x, weight, offsets = torch.randn(2, 3, 2), torch.randn(2, 4), torch.tensor([0, 3])
    for given, message in (
        ({"weight": torch.randn(2)}, r"weight must be \[C, W\] with W >= 1, got \[2\]"),
        ({"weight": torch.randn(2, 0)}, r"weight must be \[C, W\] with W >= 1, got \[2, 0\]"),
        ({"weight": torch.ones(2, 4).int()}, r"weight must be floating point"),
        ({"x": x[0]}, r"x must be \[B, T, 2\], got \[3, 2\]"),
        ({"bias": torch.randn(1)}, r"bias must be \[2\], got \[1\]"),
        ({"state": torch.randn(1, 3, 2)}, r"state must be \[2, 3, 2\], got \[1, 3, 2\]"),
        ({"cu_seqlens": offsets}, r"with cu_seqlens the batch size must be 1 \(.*\), got 2"),
        ({"cu_seqlens": offsets.float(), "x": x[:1]}, r"cu_seqlens must be an int32 or int64 tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            short_convolution(**{"x": x, "weight": weight} | given)


def test_the_check_finds_errors():
    """What the doctor and the GPU tests run: PyTorch's own passes, a wrong backend does not."""
    case = check.Case(5, 4, check.PACKED)
    errors = check.measure(case, torch.float32, "cpu", "torch")
    assert not failures(errors, torch.float32)
    assert set(errors) == {"output", "state", *(f"gradient of {n}" for n in ("x", "weight", "bias", "state"))}
    assert set(failures(dict.fromkeys(errors, 2e-4) | {"state": 0.0}, torch.float32)) == set(errors) - {"state"}
    assert failures(dict.fromkeys(errors, float("nan")), torch.float32)
