"""The short convolution against torch's own, and its promises about state, padding and packing."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from metaplastic.layers import ShortConvolution


def layer(channels=6, kernel_size=4, **options):
    return ShortConvolution(channels, kernel_size, **options).double()


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 9])
def test_equals_torch(kernel_size, length):
    conv, x = layer(kernel_size=kernel_size), torch.randn(2, length, 6, dtype=torch.float64)
    y, state = conv(x)
    padded = F.pad(x.transpose(1, 2), (kernel_size - 1, 0))
    expected = F.conv1d(padded, conv.weight[:, None], groups=6).transpose(1, 2) if length else x
    torch.testing.assert_close(y, expected)
    assert state.shape == (2, kernel_size - 1, 6)
    torch.testing.assert_close(state, padded.transpose(1, 2)[:, length:])


def test_the_activation_is_on_the_output_alone():
    conv, x = layer(bias=True, activation="silu"), torch.randn(2, 9, 6, dtype=torch.float64)
    linear = layer(bias=True)
    linear.load_state_dict(conv.state_dict())
    keep = torch.rand(2, 9) > 0.3
    for given in ({}, {"mask": keep}, {"state": torch.randn(2, 3, 6, dtype=torch.float64)}):
        (y, state), (expected, final) = conv(x, **given), linear(x, **given)
        torch.testing.assert_close(y, F.silu(expected))
        assert torch.equal(state, final)


def test_any_split():
    conv, x = layer(), torch.randn(2, 11, 6, dtype=torch.float64)
    whole, final = conv(x)
    state, pieces = None, []
    for a, b in ((0, 1), (1, 3), (3, 3), (3, 4), (4, 11)):
        y, state = conv(x[:, a:b], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert torch.equal(state, final)


@pytest.mark.parametrize("mask", ["0001111", "1111000", "1010011", "0000000", "1111111", "0100000"])
@pytest.mark.parametrize("continued", [False, True])
def test_padding_is_not_there(mask, continued):
    """A masked row equals the row with its padding cut out, whatever the padding holds."""
    conv = layer()
    keep = torch.tensor([[c == "1" for c in mask]])
    x = torch.randn(1, 7, 6, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, 3, 6, dtype=torch.float64) if continued else None
    filled = x.masked_fill(~keep[..., None], torch.nan)
    y, state = conv(filled, start, mask=keep)
    short, expected = conv(x[:, keep[0]], start)
    torch.testing.assert_close(y[:, keep[0]], short)
    torch.testing.assert_close(state, expected)
    d = torch.autograd.grad(y[:, keep[0]].sum() + state.sum(), x, allow_unused=True, materialize_grads=True)[0]
    assert d.isfinite().all()
    assert not d[:, ~keep[0]].any()


@pytest.mark.parametrize("offsets", [[0, 9], [0, 0, 1, 3, 9], [0, 4, 4, 7], [0, 0], [0]])
@pytest.mark.parametrize("continued", [False, True])
def test_packed_equals_a_loop(offsets, continued):
    conv = layer()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    start = torch.randn(len(offsets) - 1, 3, 6, dtype=torch.float64) if continued else None
    y, state = conv(x, start, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, last = conv(x[:, a:b], None if start is None else start[n : n + 1])
        torch.testing.assert_close(y[:, a:b], alone)
        torch.testing.assert_close(state[n : n + 1], last)
    assert not y[:, offsets[-1] :].any()
    assert state.shape[0] == len(offsets) - 1


def test_state_is_a_value_and_checked():
    conv, x = layer(), torch.randn(2, 5, 6, dtype=torch.float64)
    start = torch.randn(2, 3, 6, dtype=torch.float64)
    before = start.clone()
    _, state = conv(x, start)
    state.add_(1)
    assert torch.equal(start, before)
    with pytest.raises(ValueError, match=r"state must be \[2, 3, 6\], got \[1, 3, 6\]"):
        conv(x, start[:1])
    with pytest.raises(ValueError, match="kernel_size must be an integer >= 1, got 0"):
        ShortConvolution(4, 0)


def test_reset_parameters_is_bounded_and_works_on_meta():
    conv = ShortConvolution(200, 4)
    assert conv.weight.abs().max() <= 0.5
    assert conv.weight.std() > 0.2
    with torch.device("meta"):
        ShortConvolution(4).reset_parameters()
