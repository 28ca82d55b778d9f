"""Tiny models of every mixer, and of all mixers in one; a new mixer joins by its name in ``MIXERS``."""

import pytest
import torch

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM

# What a mixer needs beside two heads to be small and to forget slowly enough for a test to see it.
OPTIONS = {
    "palimpsa_d": {"decay_range": (0.1, 1.0)},
    "palimpsa_d_additive": {"decay_range": (0.1, 1.0)},
    "palimpsa_m": {"decay_range": (0.1, 1.0), "num_groups": 2},
    "mamba2": {"decay_range": (0.1, 1.0)},
    "bayesian": {"decay_range": (0.1, 1.0)},
    "gated_deltanet": {"decay_range": (0.1, 1.0)},
    "attention": {"window": 9},
}
KINDS = [*MIXERS, "mixed"]
WINDOW = OPTIONS["attention"]["window"]
VOCABULARY = 40


def config(kind: str = "palimpsa_d", **changes) -> MetaplasticConfig:
    mixers = list(MIXERS) if kind == "mixed" else [kind] * 2
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": len(mixers),
        "mixers": mixers,
        "mixer_options": {name: {"num_heads": 2} | OPTIONS.get(name, {}) for name in mixers},
        "intermediate_size": 24 if kind == "palimpsa_d" else None,
        "initializer_range": 0.4,  # far from the uniform guess, so that tokens differ
    }
    return MetaplasticConfig(**(settings | changes))


def make(kind: str = "palimpsa_d", **changes) -> MetaplasticForCausalLM:
    torch.manual_seed(0)
    model = MetaplasticForCausalLM(config(kind, **changes)).eval()
    model.generation_config.pad_token_id = 0
    return model


def tokens(batch: int = 3, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding(ids: torch.Tensor, *padded: int) -> torch.Tensor:
    mask = torch.ones_like(ids)
    for row, count in enumerate(padded):
        mask[row, :count] = 0
    return mask


@torch.no_grad()
def greedy(model, ids, count, mask=None):
    """Teacher-forced arg max, without a cache: what greedy generation must equal."""
    for _ in range(count):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return ids


def states(cache) -> list[torch.Tensor]:
    """Every tensor of a cache."""
    return [
        x for layer in cache.layers for d in (layer.conv_states, layer.recurrent_states) for x in d.values()
        if x is not None
    ]  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """Tiny models gain nothing from more threads and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_numbers(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same float32 computation in another order: relative to the largest element, as backends are measured."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * scale)
