"""The kernels of vectors of length 1, by Triton's interpreter; PyTorch's form is in layers/test_norms.py."""

import pytest
import torch

from metaplastic.layers.norms import l2_normalize
from metaplastic.ops import fused, l2
from metaplastic.ops.l2.check import exact, example

from .test_short_convolution import needs_triton, run

CODE = """
import torch
from metaplastic.ops import fused
from metaplastic.ops.fused_accuracy import failures
from metaplastic.ops.l2.check import measure
from tests.ops.test_l2 import wrong

fused.DEVICES = ("cpu",)
half = torch.float16
found = [[*wrong(width, half), failures(measure(width, half, "cpu"), half)] for width in (1, 5, 48, 200)]
"""
COMPILED = """
from metaplastic.ops import l2
from metaplastic.ops.l2 import kernels
from metaplastic.ops.rows import blocks
from tests.ops.machine_code import sizes

options = dict(EPS=l2.EPS, WIDTH=96) | blocks(96)
both = kernels.forward_kernel, kernels.backward_kernel
found = sizes([(kernel, options) for kernel in both], dict.fromkeys(("x", "y", "dy", "dx"), "*bf16"))
"""


def wrong(width, dtype, device="cpu"):
    """Errors of the output and of its gradient beside what rounding once allows; and whether the kernels ran."""
    x, d = example(width, dtype, device)
    y = l2_normalize(x.requires_grad_())
    (found,) = torch.autograd.grad(y, x, d)
    expected, gradient = exact(x, d).values()
    half = torch.finfo(dtype).eps / 2
    sizes = (d.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).abs().amax(-1, keepdim=True)
    of_y = (y.double() - expected).abs() / (half * expected.abs() + 1e-6)
    of_x = (found.double() - gradient).abs() / (half * gradient.abs() + 1e-5 * sizes + 1e-7)
    return [float(of_y.detach().max()), float(of_x.detach().max()), l2.runs(x)]


@needs_triton
def test_interpreted():
    for output, gradient, ran, failed in run(CODE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        assert output < 1.0 and gradient < 1.0 and ran and not failed


@needs_triton
def test_kernels_compile():
    assert min(run(COMPILED, TRITON_INTERPRET="0")) > 1000  # bytes of machine code


def test_who_computes(monkeypatch):
    x = example(48, torch.bfloat16)[0]
    assert not l2.runs(x)  # no GPU
    monkeypatch.setattr(fused, "reason_against", lambda name, device: None if name == "l2" else "not this one")
    assert l2.runs(x) and not l2.runs(x.float()) and not l2.runs(x[0]) and not l2.runs(x.new_zeros(1, 1, 1, 5000))
    taken = []
    monkeypatch.setattr(l2, "forward", lambda x: taken.append(x) or x)
    assert not l2_normalize(x, "torch").equal(x) and not taken
    assert l2_normalize(x).equal(x) and taken


@pytest.mark.gpu
def test_on_a_gpu():
    if (reason := fused.reason_against("l2", "cuda")) is not None:
        pytest.skip(reason)
    for width in (1, 5, 48, 96, 128, 4096):
        for dtype in (torch.bfloat16, torch.float16):
            output, gradient, ran = wrong(width, dtype, "cuda")
            assert output < 1.0 and gradient < 1.0 and ran
