"""``bench kernels`` where there is no CUDA device: what it says, and what it would run."""

import pytest
import torch

from metaplastic import ops
from metaplastic.evaluation import kernel_speed
from metaplastic.evaluation.kernel_speed import SHAPES, SIDES, Shape
from metaplastic.ops import dispatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device():
    with pytest.raises(ValueError, match=r"measures a CUDA device, and there is none here \(bench ops"):
        next(kernel_speed.bench_kernels())


def test_the_published_shapes():
    """Elements by hand, and every side is an operator's backend with inputs of its own."""
    assert SHAPES["760M-D"].elements == SHAPES["760M-D, one long text"].elements == 16 * 2048 * 16 * 96 * 192
    for _, op, backend in SIDES:
        assert backend == "auto" or backend in dispatch.BACKENDS[op]
        inputs = kernel_speed.operator_inputs(op, **vars(Shape(1, 5, 2, 3, 4)))
        assert getattr(ops, op)(**inputs).output.shape == (1, 5, 2, 4)


@pytest.mark.gpu
def test_a_small_shape_on_a_device():
    found = kernel_speed.bench_shape(Shape(2, 300, 2, 32, 48))
    ours = found["Palimpsa"]
    assert ours["20 runs equal"]
    assert all(error < 5e-3 for error in ours["errors"].values()), ours
    assert 0 < ours["forward floor share"] < 1
    assert 0 < ours["forward + backward floor share"] < 1
