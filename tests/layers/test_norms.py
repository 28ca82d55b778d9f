"""Normalisation in 16 bits: rounded once, whatever autocast says, with gradients as exact; zero vectors have one."""

import pytest
import torch

from metaplastic.layers.norms import l2_normalize


def written_out(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_rounded_once(dtype, autocast):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 5, 3, 4 * 48, generator=generator, dtype=torch.float64)
    wide = wide * torch.tensor([1e-4, 1e-2, 1.0, 10.0, 30.0], dtype=torch.float64)[:, None, None]
    leaf = wide.to(dtype).requires_grad_()
    x = leaf.split(48, -1)[1]  # a part of a row, as queries are of what is projected
    d = torch.randn(x.shape, generator=generator).to(dtype)
    exact = x.detach().double().requires_grad_()
    expected = written_out(exact)
    expected.backward(d.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = l2_normalize(x)
    y.backward(d)
    rounding = torch.finfo(dtype).eps / 2 + 1e-6
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=1e-7)
    found, gradient = leaf.grad.split(48, -1)[1].double(), exact.grad
    # The difference of two float32 numbers of the size of s dy.
    sizes = (d.double() / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt()).abs()
    assert bool(((found - gradient).abs() <= rounding * gradient.abs() + 1e-5 * sizes.amax(-1, keepdim=True)).all())
    assert not leaf.grad.split(48, -1)[0].any()


def test_zero_vectors_in_half_precision():
    x = torch.zeros(1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    y = l2_normalize(x)
    y.sum().backward()
    assert not y.any() and torch.equal(x.grad, torch.full_like(x, 1000.0))  # 1e-6 stands for the square of its size


def test_the_compiler_sees_the_same():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    compiled = torch.compile(l2_normalize, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), l2_normalize(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_second_forward_mode_and_functional_derivatives_in_half_precision(dtype):
    """Those of x in float32, where another path to the same x would hide that one is missing."""

    def loss(x):
        return l2_normalize(x).float().pow(3).sum() + x.float().square().sum()

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for leaf in (x.clone().requires_grad_(), x.float().requires_grad_()):
        (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad(gradient.float().square().sum(), leaf, allow_unused=True)
        functional, along = (
            torch.func.grad(loss)(leaf.detach()),
            torch.func.jvp(loss, (leaf.detach(),), (leaf.detach(),))[1],
        )
        found.append([second, functional, along, torch.func.vmap(l2_normalize)(leaf.detach())])
    for half, exact in zip(*found, strict=True):
        torch.testing.assert_close(half.float(), exact.float(), rtol=0, atol=float(exact.abs().max()) / 100)
