"""Every rule's scan, without a state given, starts from its ``init_state`` in the dtype of the inputs."""

import pytest
import torch

from metaplastic import rules


def inputs(name, dtype):
    """Positional arguments up to the state; sizes that differ, so that none can stand in for another."""
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, keys, values = 2, 3, 4, 5, 6

    def draw(*more):
        return torch.rand(batch, length, heads, *more, generator=generator, dtype=dtype)

    q, k, v, rows, gate = draw(keys), draw(keys), draw(values), draw(values), draw()
    return {
        "palimpsa": (q, k, v, rows, -gate, 1 + draw()[0, 0]),
        "gaussian": (q, k, v, rows, -gate, 1 + draw()[0, 0]),
        "mean_field": (q, k, v, rows, -gate, 1 + draw()[0, 0]),
        "additive": (q, k, v, -gate),
        "delta": (q, k, v, gate, -gate),
        "longhorn": (q, k, v, rows),
        "mesa": (q, k, v, gate, -gate, 1 + draw(keys)[0, 0]),
    }[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["palimpsa", "gaussian", "mean_field", "additive", "delta", "longhorn", "mesa"])
def test_no_state_is_the_initial_state(name, dtype):
    rule, given = getattr(rules, name), inputs(name, dtype)
    start = rule.init_state(2, 4, 6, 5, dtype=dtype)
    *expected, expected_state = rule.scan(*given, start, 0.5)
    *found, state = rule.scan(*given, scale=0.5)
    for a, b in zip((*found, *state), (*expected, *expected_state), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
    assert state[0].abs().max() > 0
    empty = [x[:, :0] if x.dim() > 2 else x for x in given]  # nothing to promote it: the state as it was made
    for a, b in zip(rule.scan(*empty)[-1], start, strict=True):
        assert a.dtype == dtype and torch.equal(a, b)
    again = rule.scan(*given, state)[0]
    assert not torch.equal(again, rule.scan(*given)[0])  # a state that is given counts
