"""Products with decays per key, halves of a chunk at a time, against those of all pairs of tokens."""

import pytest
import torch

from metaplastic.ops.bayesian.key_decay import KeyDecay
from metaplastic.ops.chunks import segment_sums

STRENGTHS = torch.tensor([0.0, -1e-3, -0.3, -50.0, -1000.0, -torch.inf], dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 3, 23, 64])
def test_products(length):
    """Decays of every strength side by side; what groups share, and what they do not."""
    source = torch.Generator().manual_seed(length)

    def new(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=source)

    g = STRENGTHS[torch.randint(len(STRENGTHS), (2, 3, 1, length, 6), generator=source)]
    decay, ratio = KeyDecay(g), segment_sums(g.mT).exp()  # [..., K, C, C]
    x, y, m = new(2, 3, 2, length, 6), new(2, 3, 1, length, 6), new(2, 3, 2, length, length)
    noise = new(2, 3, 1, length, 1)
    pairs = (
        (decay.entry, g.cumsum(-2).exp()),
        (decay.last, g.cumsum(-2).exp()[..., -1:, :]),
        (decay.tail, ratio[..., -1, :].mT),
        (decay.pairs(x, y), torch.einsum("...tk,...sk,...kts->...ts", x, y, ratio)),
        (decay.over_earlier(m, y), torch.einsum("...ts,...kts,...sk->...tk", m, ratio, y)),
        (decay.over_later(m, x), torch.einsum("...ts,...kts,...tk->...sk", m, ratio, x)),
        (decay.gathered(noise), torch.einsum("...kts,...sz->...tk", ratio.square(), noise)),
        (decay.gathered(x), torch.einsum("...kts,...sk->...tk", ratio.square(), x)),
        (decay.scattered(y), torch.einsum("...kts,...tk->...sk", ratio.square(), y)),
        (decay.of_pairs().gathered(y[..., ::2]), torch.einsum("...kts,...sk->...tk", ratio.square(), y)[..., ::2]),
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_what_a_decay_of_0_ends_is_gone():
    """Where all decays from one half to the other are exp(-1000) not even a rounding error gets through."""
    g = torch.zeros(8, 4)
    g[4] = -1000.0
    x, y, m = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    decay = KeyDecay(g)
    assert not decay.pairs(x[:, :4], y[:, :4])[4:, :4].any()
    early = torch.cat([m[:, :4], torch.zeros(8, 4)], 1)
    assert not decay.over_earlier(early, y[:, :4])[4:].any()
    assert not decay.entry[4:].any() and not decay.tail[:4].any()
