"""The kernels of vectors of length 1, by Triton's interpreter; PyTorch's form is in layers/test_norms.py."""

import pytest
import torch

from metaplastic.layers.norms import l2_normalize
from metaplastic.ops import convolution, l2

from .test_short_convolution import needs_triton, run

CODE = """
import torch
from metaplastic.ops import convolution
from tests.ops.test_l2 import wrong

convolution.DEVICES = ("cpu",)
found = [wrong(width, torch.float16) for width in (1, 5, 48, 200)]
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
    torch.manual_seed(0)
    wide = torch.randn(2, 37, 3, width + 2, device=device)
    wide[0, 3] = 0.0
    x = wide.to(dtype)[..., :width].requires_grad_()
    d = torch.randn(2, 3, 37, width, device=device).to(dtype).transpose(1, 2)
    y = l2_normalize(x)
    (found,) = torch.autograd.grad(y, x, d)
    exact = x.detach().double().requires_grad_()
    expected = exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)
    (gradient,) = torch.autograd.grad(expected, exact, d.double())
    half = torch.finfo(dtype).eps / 2
    sizes = (d.double() / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt()).abs().amax(-1, keepdim=True)
    of_y = (y.double() - expected).abs() / (half * expected.abs() + 1e-6)
    of_x = (found.double() - gradient).abs() / (half * gradient.abs() + 1e-5 * sizes + 1e-7)
    return [float(of_y.detach().max()), float(of_x.detach().max()), l2.runs(x)]


@needs_triton
def test_interpreted():
    for output, gradient, ran in run(CODE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        assert output < 1.0 and gradient < 1.0 and ran


@needs_triton
def test_kernels_compile():
    assert min(run(COMPILED, TRITON_INTERPRET="0")) > 1000  # bytes of machine code


@pytest.mark.gpu
def test_on_a_gpu():
    if (reason := convolution.reason_against("triton", "cuda")) is not None:
        pytest.skip(reason)
    for width in (1, 5, 48, 96, 128, 4096):
        for dtype in (torch.bfloat16, torch.float16):
            output, gradient, ran = wrong(width, dtype, "cuda")
            assert output < 1.0 and gradient < 1.0 and ran
