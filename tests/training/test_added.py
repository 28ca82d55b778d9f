"""What a shard adds to a memory, summed in pieces, with its gradients written out."""

import pytest
import torch

from metaplastic.ops.added import plain
from metaplastic.training.added import added


@pytest.mark.parametrize("length", [3, 8, 11])  # less than a piece, whole ones, and a rest
@pytest.mark.parametrize("decays", [1, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_the_sum_and_its_gradients(monkeypatch, length, decays, count):
    monkeypatch.setattr(plain, "PIECE", 4)
    of_size = {"dtype": torch.float64, "requires_grad": True}
    k, left = torch.randn(2, length, 3, 5, **of_size), torch.rand(2, length, 3, decays, **of_size)
    values = [torch.randn(2, length, 3, 7, **of_size) for _ in range(count)]
    sums = added(k, left, *values)
    expected = [torch.einsum("bthv,bthk->bhvk", v, left * k ** (n + 1)) for n, v in enumerate(values)]
    weights = [torch.randn_like(x) for x in expected]
    for one, other in zip(sums, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(sum((x * y).sum() for x, y in zip(of, weights, strict=True)), (k, left, *values))
        for of in (sums, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_inputs_in_bfloat16_are_summed_in_float32():
    k, v = (torch.randn(1, 40, 2, size).bfloat16().requires_grad_() for size in (4, 6))
    left = torch.rand(1, 40, 2, 1, requires_grad=True)
    (total,) = added(k, left, v)
    expected = torch.einsum("bthv,bthk->bhvk", v.double(), left.double() * k.double())
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    total.sum().backward()
    assert (k.grad.dtype, v.grad.dtype, left.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
