"""The mixers on a CUDA device against themselves in float64 on the CPU. Run by hand: pytest -m gpu."""

import copy
import itertools

import pytest
import torch

from metaplastic.ops import dispatch

from .mixers import KINDS, TOLERANCE, cells, close, cut, flat, gradients, inputs, make, masks, rebuilt, trained
from .test_guarantees import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*slow 'chunked' backend"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # advice; these tests want float32
]
ON_GPU = cells("cuda")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "backend"), ON_GPU)
@pytest.mark.parametrize("padding", ["none", "left", "right", "interior"])
def test_padding_and_cuts(kind, backend, dtype, padding):
    if (reason := dispatch.reason_against(make(kind).operator, backend, "cuda", dtype)) is not None:
        pytest.skip(reason)
    layer = make(kind, backend, dtype)
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    layer = layer.cuda()
    keep, x = masks(padding, 4, 75), inputs(4, 75, dtype=dtype)
    start = rebuilt(layer(inputs(4, 5, 7, dtype).cuda())[1], torch.Tensor.detach)
    x64, there = x.double().requires_grad_(), x.cuda().requires_grad_()
    expected, finals = oracle(exact, x64, keep, rebuilt(start, lambda s: s.cpu().double()))
    loss = expected.square().sum() + sum(s.square().sum() for s in finals)
    wanted = gradients(loss, x64, *trained(exact))
    if dtype in (torch.bfloat16, torch.float16):
        beside, xs = copy.deepcopy(layer).cpu(), x.clone().requires_grad_()
        beside.backend = "auto"
        y, state = beside(xs, rebuilt(start, torch.Tensor.cpu), mask=None if padding == "none" else keep)
        loss = y.double().square().sum() + sum(s.double().square().sum() for s in flat(state))
        found = gradients(loss, xs, *trained(beside))
        rounding = sum((a.double() - b).square().sum() for a, b in zip(found, wanted, strict=True)).sqrt()
    for split in ("whole", "pieces"):
        state, ys, at = start, [], 0
        for piece in there.masked_fill(~keep[..., None].cuda(), torch.nan).split(cut(75, split), 1):
            mask = None if padding == "none" else keep[:, at : at + piece.shape[1]].cuda()
            y, state = layer(piece, state, mask=mask)
            ys.append(y)
            at += piece.shape[1]
        y = torch.cat(ys, 1)
        assert not y.cpu()[~keep].any()
        close(y.cpu(), expected, dtype, f"{split}: output")
        for s, t in zip(flat(state), finals, strict=True):
            close(s.cpu(), t, dtype, f"{split}: state")
        loss = y.double().square().sum() + sum(s.double().square().sum() for s in flat(state))
        found = [d.cpu() for d in gradients(loss, there, *trained(layer))]
        assert not found[0][~keep].any()
        if dtype in (torch.float64, torch.float32):
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                close(a, b, dtype, f"{split}: gradient {i}")
        else:  # a layer may magnify 16-bit rounding; the device must not add to it
            a, b = (torch.cat([d.double().flatten() for d in ds]) for ds in (found, wanted))
            assert (a - b).norm() <= max(TOLERANCE[dtype] * b.norm(), 1.5 * rounding), f"{split}: gradients"


@pytest.mark.parametrize(("kind", "backend"), ON_GPU)
def test_packed_equals_a_loop(kind, backend):
    if (reason := dispatch.reason_against(make(kind).operator, backend, "cuda", torch.float64)) is not None:
        pytest.skip(reason)
    layer, offsets = make(kind, backend).cuda(), [0, 0, 1, 3, 90, 90, 160]
    x = inputs(1, 170).cuda().requires_grad_()
    y, state = layer(x, cu_seqlens=torch.tensor(offsets, device="cuda"))
    loss, expected = y.square().sum() + sum(s.square().sum() for s in flat(state)), 0
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, last = layer(x[:, a:b])
        torch.testing.assert_close(y[:, a:b], alone, rtol=0, atol=1e-12)
        for s, t in zip(flat(state), flat(last), strict=True):
            torch.testing.assert_close(s[n : n + 1], t, rtol=0, atol=1e-12)
        expected = expected + alone.square().sum() + sum(s.square().sum() for s in flat(last))
    leaves = [x, *trained(layer)]
    for a, b in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_training_and_decoding(kind):
    """Inductor, fullgraph: gradients of a sequence and a decode step."""
    torch._dynamo.reset()
    layer, x = make(kind, dtype=torch.float32).cuda(), inputs(2, 100, dtype=torch.float32).cuda()
    compiled = torch.compile(layer, fullgraph=True)
    (y, state), (expected, _) = compiled(x), layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad(expected.square().sum(), trained(layer))
    for a, b in zip(torch.autograd.grad(y.square().sum(), trained(layer)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, b.abs().max().item()))
    with torch.no_grad():
        state = rebuilt(state, torch.Tensor.detach)
        torch.testing.assert_close(compiled(x[:, :1], state)[0], layer(x[:, :1], state)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_given_on_the_cpu(kind):
    """The same numbers as from offsets on the device."""
    layer, x = make(kind).cuda(), inputs(1, 90).cuda()
    offsets = torch.tensor([0, 0, 1, 3, 50, 80], dtype=torch.int32)
    (y, state), (expected, final) = layer(x, cu_seqlens=offsets), layer(x, cu_seqlens=offsets.cuda())
    assert torch.equal(y, expected)
    assert all(torch.equal(s, t) for s, t in zip(flat(state), flat(final), strict=True))
