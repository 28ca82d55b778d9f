"""torch.compile(fullgraph=True): equal to eager, and no compilation for a new length, batch size, cache or packing.

What does cost a graph of its own, in PyTorch as it is: whether there are labels, a mask, a cache or gradients; sizes of
0 and 1 (PyTorch specialises them); from 16 rows on (its choice of a depthwise convolution on CPUs); and a batch size
that equals another size of a state, which a graph cannot tell apart (hence the odd sizes below).
"""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from metaplastic.layers import MIXERS
from metaplastic.models import fork_cache

from .conftest import make, same_numbers, tokens

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
QUICK = "palimpsa_d"  # one layer of it in a usual run, every mixer with -m slow


@pytest.fixture(params=[n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*MIXERS, "mixed")])
def kind(request):
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def small(kind):
    return make(kind) if kind == "mixed" else make(kind, num_hidden_layers=1, mixers=kind)


class Compiled:
    """A compiled model that says how many graphs a call has added."""

    def __init__(self, model, backend):
        self.run = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)

    def __call__(self, *args, **kwargs):
        before = counters["stats"]["unique_graphs"]
        out = self.run(*args, **kwargs)
        self.added = counters["stats"]["unique_graphs"] - before
        return out


def test_training_equals_eager_in_one_graph(kind):
    model = small(kind).train()
    compiled = Compiled(model, "aot_eager")
    names, weights = zip(*model.named_parameters(), strict=True)
    for first, (batch, length) in zip((1, 0, 0), ((5, 6), (5, 11), (7, 33)), strict=True):
        ids = tokens(batch, length)
        loss, expected = compiled(ids, labels=ids).loss, model(ids, labels=ids).loss
        assert compiled.added == first
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
        pairs = zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True)
        for name, (a, b) in zip(names, pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_decoding_equals_eager_in_one_graph(kind):
    """Other caches, batch sizes and token counts use the same graph; a prompt has one graph, going on another."""
    model, first = small(kind), 1
    compiled = Compiled(model, "eager")
    for batch in (5, 7, 20):
        ids = tokens(batch, 9)
        expected = model(ids, use_cache=False).logits
        for cache in (model(ids[:, :6], use_cache=True).cache, model(ids[:, :6], use_cache=True).cache):
            fork = fork_cache(cache)
            for t in (6, 7, 8):
                out = compiled(ids[:, t : t + 1], cache=fork)
                assert compiled.added == first
                first = 0
                same_numbers(out.logits, expected[:, t : t + 1])
            assert int(fork.tokens_seen) == 9
            assert int(cache.tokens_seen) == 6
    added = []
    for batch, length in ((5, 9), (7, 12), (9, 10)):
        ids = tokens(batch, 2 * length)
        out = compiled(ids[:, :length], use_cache=True)
        added.append(compiled.added)
        out = compiled(ids[:, length:], cache=out.cache)
        added.append(compiled.added)
        same_numbers(out.logits, model(ids, use_cache=False).logits[:, length:])
    assert added == [1, 1, 0, 0, 0, 0]


@torch.no_grad()
def test_padded_and_packed_batches_in_one_graph_each(kind):
    model, added = small(kind), []
    compiled = Compiled(model, "eager")
    for batch, length in ((5, 9), (7, 12), (9, 6)):
        ids = tokens(batch, length)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        out = compiled(ids, attention_mask=mask, use_cache=False).logits
        added.append(compiled.added)
        same_numbers(out, model(ids, attention_mask=mask, use_cache=False).logits)
    assert added == [1, 0, 0]


@pytest.mark.slow
def test_the_usual_mix_stays_below_the_limit():
    """Of one model: training, evaluation, decoding and prompts, rows of one and single tokens, padding, no token."""
    torch._dynamo.reset()
    model = small(QUICK)
    compiled = Compiled(model, "eager")
    total = 0
    with torch._dynamo.config.patch(recompile_limit=8):
        for batch, length in ((5, 9), (7, 12), (1, 9)):
            ids = tokens(batch, length)
            compiled(ids, labels=ids, use_cache=False).loss.backward()
            total += compiled.added
        with torch.no_grad():
            for batch, length in ((5, 9), (7, 12), (5, 0)):
                compiled(tokens(batch, length), use_cache=False)
                total += compiled.added
            for batch in (5, 7, 9, 1):
                cache = model(tokens(batch, 4), use_cache=True).cache
                compiled(tokens(batch, 1), cache=cache)
                total += compiled.added
            ids = tokens(5, 9)
            compiled(ids, attention_mask=(torch.arange(9) > 2).expand(5, -1), use_cache=False)
            total += compiled.added
    assert total == 7
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoints_in_a_compiled_step(reentrant):
    torch._dynamo.reset()
    ids, found = tokens(5, 9), []
    for checkpointing in (False, True):
        model = small(QUICK).train()
        run = model
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        run(ids, labels=ids).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for name, d in found[0].items():
        torch.testing.assert_close(d, found[1][name], rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_positions_must_be_read():
    model, ids = small(QUICK), tokens(1, 9)
    run = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="give cu_seqlens or cu_seq_lens_q instead of position_ids"):
        run(ids, position_ids=torch.arange(9)[None] % 5, use_cache=False)
    torch._dynamo.reset()


def test_a_mixed_model_in_a_fresh_process():
    """Nothing has chosen a backend before torch.compile traces the choice."""
    code = (
        "import torch; from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM\n"
        "torch.manual_seed(0); mixers = ['palimpsa_d', 'mamba2']\n"
        "config = MetaplasticConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, mixers=mixers)\n"
        "model = MetaplasticForCausalLM(config).train(); ids = torch.randint(0, 9, (3, 5))\n"
        "loss = torch.compile(model, fullgraph=True, backend='eager')(ids, labels=ids).loss; loss.backward()\n"
        "torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=0, atol=1e-5); print('equal')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.stdout.strip() == "equal", found.stderr[-2000:]
