"""What the compiler is told of the CUDA kernels' results is what they are: shapes, types and strides, at sizes that no
kernel takes as they are."""

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from metaplastic.ops import accuracy
from metaplastic.ops.accuracy import Case

from .emulation import emulated, emulator, needs_compiler  # noqa: F401 (the first two are fixtures)

palimpsa, bayesian = (importlib.import_module(f"metaplastic.ops.{op}.cuda") for op in ("palimpsa", "bayesian"))


def look(x):
    """Strides along axes of one element count for nothing."""
    return tuple(x.shape), x.dtype, [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def run(op, *given):
    """What it gives; compared with what its fake gives."""
    found = op(*given)
    with FakeTensorMode() as mode:
        told = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
    assert [look(x) for x in found] == [look(x) for x in told]
    return found


def gradients(outputs):
    """Of outputs: as they come from elsewhere, not contiguous."""
    return [torch.randn(*x.shape, 2).to(x.dtype)[..., 0] if x.numel() else None for x in outputs]


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case(length=70, key_size=6, value_size=5, variance=False, offsets=(0, 0, 1, 66), batch=1),
        Case(length=70, key_size=6, value_size=4, rotation=True, decay="per key"),
    ],
    ids=str,
)
def test_of_the_filter(emulated, emulator, case):  # noqa: F811
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    names = ("q", "k", "v", "g", "process_noise", "observation_noise", "rotation")
    given = [inputs[n].detach() if n in inputs else None for n in names]
    given += [x.detach() for x in inputs["initial_state"]]
    offsets = None if case.offsets is None else torch.tensor(case.offsets)
    *outputs, means, covariances, whitenings = run(bayesian._filter, *given, offsets, 0.5, case.variance, True)
    run(bayesian._filter, *given, offsets, 0.5, case.variance, False)
    run(bayesian._adjoint, *gradients(outputs), *given, means, covariances, whitenings, offsets, 0.5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offsets", [None, (0, 0, 1, 66)], ids=str)
def test_of_palimpsa(emulated, emulator, dtype, offsets):  # noqa: F811
    case = Case(length=70, batch=2 if offsets is None else 1, key_size=6, value_size=5, variance=False, offsets=offsets)
    inputs = accuracy.example("palimpsa", case, dtype)
    given = [inputs[n].detach() for n in ("q", "k", "w", "beta", "g", "prior")]
    given += [x.detach() for x in inputs["initial_state"]]
    packed = None if offsets is None else torch.tensor(offsets)
    outputs = run(palimpsa.apply, *given, packed, 0.5, False)
    run(torch.ops.metaplastic.palimpsa_cuda_backward, *gradients(outputs), *given, packed, 0.5)
