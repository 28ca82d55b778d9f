"""The mixers on a CUDA device against themselves in float64 on the CPU. Run by hand: pytest -m gpu."""

import copy
import itertools

import pytest
import torch
import torch._dynamo.testing

from metaplastic.layers import ShortConvolution
from metaplastic.ops import dispatch, fused_accuracy
from metaplastic.ops.convolution import check, short_convolution

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
    operator = make(kind).operator
    reason = dispatch.reason_against(operator, backend, "cuda", dtype) or dispatch.no_gradients(operator, backend)
    if reason is not None:
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", check.CASES, ids=str)
def test_short_convolution(case, dtype):
    """One kernel forward, one backward, without waiting for the device; the same bits every time."""
    assert not fused_accuracy.failures(check.measure(case, dtype, "cuda", "auto"), dtype)
    inputs = check.example(case, dtype, "cuda")
    first, again = (check.results("triton", inputs, case.final) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    x = inputs["x"].requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = short_convolution(**inputs, backend="triton")
        y.backward(torch.ones_like(y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None


def test_compiled_convolution():
    """Inductor, one graph for all lengths and numbers of sequences."""
    torch._dynamo.reset()
    conv = ShortConvolution(96, 4, bias=True, activation="silu").cuda()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend=counter)
    for length, cuts in ((90, (0, 5, 90)), (200, (0, 5, 9, 150)), (301, (0, 0, 8, 100, 300))):
        x = torch.randn(1, length, 96, device="cuda", requires_grad=True)
        offsets = torch.tensor(cuts, device="cuda")
        (y, state), (expected, final) = compiled(x, cu_seqlens=offsets), conv(x, cu_seqlens=offsets)
        assert torch.equal(y, expected)
        assert torch.equal(state, final)
        found, wanted = (gradients(z.square().sum(), x, *conv.parameters()) for z in (y, expected))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_convolution_of_more_than_2_31_elements():
    """bf16, 4 GB for each tensor of x's size; the last tokens and the weight's gradient against a short call."""
    channels, length = 2048, 2**20 + 1000
    x = torch.zeros(1, length, channels, dtype=torch.bfloat16, device="cuda")
    x[:, -70:] = torch.randn(1, 70, channels, device="cuda")
    weight = torch.randn(channels, 4, device="cuda", requires_grad=True)
    tail = x[:, -80:].clone().requires_grad_()
    y, expected = (short_convolution(z, weight, activation="silu")[0] for z in (x.requires_grad_(), tail))
    assert torch.equal(y[:, -80:], expected)
    dy = torch.randn(1, 70, channels, device="cuda").bfloat16()
    found = torch.autograd.grad(y[:, -70:], (x, weight), dy)
    wanted = torch.autograd.grad(expected[:, -70:], (tail, weight), dy)
    assert torch.equal(found[0][:, -80:], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-3)
