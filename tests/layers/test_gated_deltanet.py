"""Gated DeltaNet against the one of Hugging Face's Qwen3-Next: its own PyTorch path, the same weights.

What differs by design is mapped here: they fuse the projections group by group (a group is a key head with its value
heads: q, k, values, gates; then strengths, step sizes), we keep one matrix each. Their value heads have a strength of
at most 1.
"""

import pytest
import torch
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from metaplastic import layers

WIDTH, KEYS, VALUES = 24, 8, 6


def pair(key_heads, value_heads, dtype=torch.float32):
    """Hugging Face's module with odd weights, and ours with the same."""
    config = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
        linear_key_head_dim=KEYS, linear_value_head_dim=VALUES, linear_conv_kernel_dim=4, rms_norm_eps=1e-5,
        num_hidden_layers=1, layer_types=["linear_attention"], num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    with torch.no_grad():
        for p in (theirs.norm.weight, theirs.A_log, theirs.dt_bias):
            p.add_(0.5 * torch.randn_like(p))
    ours = layers.GatedDeltaNet(WIDTH, value_heads, KEYS, VALUES, num_key_heads=key_heads, norm_eps=1e-5)
    ours.load_state_dict(as_ours(dict(theirs.named_parameters()), key_heads, value_heads))
    return theirs.eval(), ours, config


def as_ours(theirs, key_heads, value_heads):
    """Their parameters (or gradients) by our names: every fused projection cut apart, group by group."""
    each = value_heads // key_heads
    parts = [KEYS, KEYS, each * VALUES, each * VALUES]
    fused = theirs["in_proj_qkvz.weight"].unflatten(0, (key_heads, sum(parts)))
    q, k, v, gate = (x.flatten(0, 1) for x in fused.split(parts, 1))
    strength, step = (
        x.flatten(0, 1) for x in theirs["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).split([each, each], 1)
    )
    return {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "gate_proj.weight": gate,
        "beta_proj.weight": strength, "dt_proj.weight": step, "conv.weight": theirs["conv1d.weight"].squeeze(1),
        "A_log": theirs["A_log"], "dt_bias": theirs["dt_bias"], "o_norm.weight": theirs["norm.weight"],
        "o_proj.weight": theirs["out_proj.weight"],
    }  # fmt: skip


HEADS = [(4, 4), (2, 4), (1, 3)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_hugging_face(heads):
    """Outputs and every gradient, at lengths around the chunk of 64 that both have (of one token, 0 for the decay)."""
    theirs, ours, _ = pair(*heads)
    leaves = dict(theirs.named_parameters())
    mine = dict(ours.named_parameters())
    for length in (1, 63, 64, 65, 150):
        x = torch.randn(3, length, WIDTH, requires_grad=True)
        weights = torch.randn(3, length, WIDTH)
        expected, (y, _) = theirs(x), ours(x)
        assert expected.abs().max() > 0.1
        assert (y - expected).abs().max() < 1e-5
        dx, *wanted = torch.autograd.grad((expected * weights).sum(), [x, *leaves.values()])
        wanted = {"x": dx} | as_ours(dict(zip(leaves, wanted, strict=True)), *heads)
        found = dict(zip(["x", *mine], torch.autograd.grad((y * weights).sum(), [x, *mine.values()]), strict=True))
        assert set(found) == set(wanted)
        for name, d in found.items():
            assert (d - wanted[name]).abs().max() <= 1e-4 * wanted[name].abs().max(), (name, length)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_and_decode_equal_hugging_face(heads):
    """With their cache and our state: outputs of prefill, of each step and of a later piece, and the states."""
    theirs, ours, config = pair(*heads)
    x, cache, state = torch.randn(2, 90, WIDTH), DynamicCache(config=config), None
    with torch.no_grad():
        for piece in x.split([9, 1, 1, 70, 1, 8], 1):
            expected = theirs(piece, cache=cache)
            y, state = ours(piece, state)
            assert (y - expected).abs().max() < 1e-5
    torch.testing.assert_close(state.memory.mean, cache.get_recurrent_state(0), rtol=0, atol=1e-5)
    convolution = cache.get_conv_state(0).transpose(1, 2)
    torch.testing.assert_close(state.convolution, convolution[:, -3:], rtol=0, atol=1e-6)


def test_left_padding_equals_hugging_face():
    theirs, ours, _ = pair(2, 4)
    x, mask = torch.randn(2, 12, WIDTH), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    y, expected = ours(x, mask=mask)[0], theirs(x, attention_mask=mask)
    assert (y - expected)[mask.bool()].abs().max() < 1e-5


def test_bfloat16_is_as_close_to_float64_as_theirs():
    theirs, ours, _ = pair(2, 4)
    x = torch.randn(2, 100, WIDTH)
    exact = ours.double()(x.double())[0]
    wanted = theirs.bfloat16()(x.bfloat16()).double()
    found = ours.bfloat16()(x.bfloat16())[0].double()
    assert (found - exact).norm() < 1.5 * (wanted - exact).norm()
