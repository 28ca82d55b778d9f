"""The additive rule against closed forms."""

import pytest
import torch

from metaplastic.rules import additive

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def problem(per_key):
    shape = (2, 8, 3)
    g = -draw(*shape, 4, seed=3).abs() if per_key else -draw(*shape, seed=3).abs()
    return draw(*shape, 4), draw(*shape, 4, seed=1), draw(*shape, 5, seed=2), g


@pytest.mark.parametrize("per_key", [False, True])
def test_closed_form(per_key):
    """y_t = sum_{s <= t} (sum_k q_t k_s exp(g_{s+1} + ... + g_t)) v_s; g = 0 is linear attention."""
    q, k, v, g = problem(per_key)
    mean, variance, _ = additive.scan(q, k, v, g, additive.init_state(2, 3, 5, 4, dtype=F64), scale=0.5)
    for t in range(8):
        expected = torch.zeros_like(v[:, 0])
        for s in range(t + 1):
            decay = g[:, s + 1 : t + 1].sum(1).exp()
            decay = decay if per_key else decay[..., None]
            expected = expected + (q[:, t] * 0.5 * k[:, s] * decay).sum(-1, keepdim=True) * v[:, s]
        torch.testing.assert_close(mean[:, t], expected)
    torch.testing.assert_close(variance, (q * 0.5).square().sum(-1, keepdim=True).expand_as(v))


def test_no_decay_is_causal_linear_attention():
    q, k, v, g = problem(False)
    mean, _, state = additive.scan(q, k, v, 0 * g, additive.init_state(2, 3, 5, 4, dtype=F64))
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    torch.testing.assert_close(mean, torch.einsum("bhts,bshv->bthv", scores, v))
    torch.testing.assert_close(state.mean, torch.einsum("bthv,bthk->bhvk", v, k))


@pytest.mark.parametrize("per_key", [False, True])
def test_gradcheck(per_key):
    q, k, v, g = (x[:1, :3, :1] for x in problem(per_key))
    s = draw(1, 1, 5, 4, seed=5)

    def run(q, k, v, g, s):
        mean, _, state = additive.scan(q, k, v, g, additive.State(s), 0.7)
        return mean, state.mean

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in (q, k, v, g, s)])
