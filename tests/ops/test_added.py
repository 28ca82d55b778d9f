"""The kernels of what a shard adds: on the CPU by Triton's interpreter and compiled, and on a GPU as they are.

The batched products that they are compared with, and gradients by autograd: tests/training/test_added.py.
"""

import pytest
import torch

from metaplastic.ops import added

from .added_cases import CASES, errors, inputs
from .test_short_convolution import needs_triton, run

INTERPRETED = """
import torch
from metaplastic.ops.added import launch
from tests.ops.added_cases import CASES, errors, inputs

launch.PIECE = 128
found = [errors(*inputs(*case, torch.float16)) for case in CASES]
"""
COMPILED = """
from metaplastic.ops.added import kernels, launch
from tests.ops.machine_code import sizes

types = dict.fromkeys(("left", "sums", "d_left"), "*fp32")
types |= dict.fromkeys(("k", "v_1", "v_2", "of_sums", "d_k", "d_v_1", "d_v_2"), "*bf16")
shape = dict(N=2, EACH=False, KEYS=96, VALUES=192, PIECE=launch.PIECE)
both = ((kernels.sums_kernel, launch.SUMS), (kernels.gradients_kernel, launch.GRADIENTS))
found = sizes([(kernel, shape | blocks.options(96)) for kernel, blocks in both], types)
"""


@needs_triton
def test_interpreted():
    """In float16 (the interpreter's products take no bfloat16): sums of two parts are float32's, results rounded."""
    for sums, (of_k, of_left, *of_values) in run(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        assert max(*sums, of_left, 0) < 1e-6
        assert max(of_k, *of_values) < 1e-3


@needs_triton
def test_kernels_compile():
    assert min(run(COMPILED, TRITON_INTERPRET="0")) > 1000  # bytes of machine code


def test_who_computes():
    k, left = torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 1)
    assert added.choose(k.bfloat16(), left, [k.bfloat16()]) == "torch"  # no GPU
    assert added.sums(k, left, [k])[0].tolist() == [[[[4.0, 4.0], [4.0, 4.0]]]]


@pytest.mark.gpu
def test_on_a_device():
    """In bfloat16: parts of 16 bits, the same bits in every run."""
    for case in (*CASES, (1, 3000, 3, 96, 192, False, 2)):
        k, left, values = inputs(*case, torch.bfloat16, "cuda")
        assert added.choose(k, left, values) == "triton"
        sums, (of_k, of_left, *of_values) = errors(k, left, values)
        assert max(*sums, of_left, 0) < 2e-5
        assert max(of_k, *of_values) < 4e-3
        first, again = (added.sums(k, left, values) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        assert added.choose(k.float(), left, values) == "torch"
