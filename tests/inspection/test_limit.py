"""The monitor against a brute-force trajectory in float64, and against the distance that it is said to bound."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from metaplastic import inspection, ops, rules
from metaplastic.layers import MIXERS, plasticity
from metaplastic.layers.mixer import AdditiveGates
from metaplastic.models import fork_cache
from metaplastic.rules import AdditiveState, PalimpsaState

from .watching import PRECISE, arguments, build, catch, quartiles, spans, tokens

ADDITIVE = [name for name, kind in MIXERS.items() if kind.memory_type is AdditiveState]


def brute_force(calls):
    """J after every counted token by ``rules.palimpsa.step``, one token and one sequence at a time, kept whole."""
    excess, windows = [], []
    for mixer, x, state, kwargs in calls:
        with torch.no_grad():
            gates = mixer.gates(x, state, **kwargs)
        gates = type(gates)(*(z.double() for z in gates))
        for b, start, end, n in spans(x, kwargs):
            k, w, beta, g = (z[b] for z in gates[1:5])
            memory = rules.palimpsa.init_state(1, *w.shape[1:], k.shape[-1], dtype=torch.float64)
            if state is not None:
                memory = PalimpsaState(*(s[n : n + 1].double() for s in state.memory))
            for t in range(start, end):
                memory = rules.palimpsa.step(memory, k[t][None], w[t][None], beta[t][None], g[t][None])
                if kwargs.get("mask") is None or kwargs["mask"][b, t]:
                    excess.append(memory.excess_precision[0])
                    windows.append(1 / (1 - g[t].exp()))
    return torch.stack(excess), torch.stack(windows), gates.prior


def check(layer, calls, tolerance=1e-9):
    excess, windows, prior = brute_force(calls)
    relative = excess / prior[:, None, None]
    precision = excess + prior[:, None, None]
    high, low = precision.amax((-2, -1)), precision.amin((-2, -1))
    close = {"rtol": tolerance, "atol": 0}
    assert layer.tokens == len(excess)
    torch.testing.assert_close(layer.limit, relative.amax((0, 2, 3)), **close)
    middle = relative.transpose(0, 1).flatten(1).sort().values
    torch.testing.assert_close(layer.limit_median, middle[:, (middle.shape[1] - 1) // 2], rtol=0.005, atol=0)
    for found, expected in ((layer.ratio, (high - low) / low), (layer.window, windows)):
        for a, b in zip(found, quartiles(expected), strict=True):
            torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("name", PRECISE)
@pytest.mark.parametrize("case", ["plain", "padded", "packed", "continued"])
def test_equals_brute_force(name, case):
    """Over several chunks (64 tokens each at this size), priors that differ, and whatever a batch can look like."""
    model, given = build(name, name), arguments(case)
    if case == "continued":
        cache = model(tokens(2, 9), use_cache=True).cache
        given["cache"] = cache
        before = fork_cache(cache)
    found = inspection.memories(model, **given)
    if case == "continued":  # the caller's cache is not moved on
        for a, b in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(a.recurrent_states[1], b.recurrent_states[1])
        assert torch.equal(cache.tokens_seen, before.tokens_seen)
    calls = catch(model, lambda: model(**given))
    assert [layer.name for layer in found] == list(calls) == ["model.layers.0.mixer", "model.layers.1.mixer"]
    for layer in found:
        assert layer.kind == type(calls[layer.name][0][0]).__name__ and layer.note == ""
        check(layer, calls[layer.name])


@pytest.mark.parametrize("name", PRECISE)
def test_small_pieces_of_the_same_text(name, monkeypatch):
    """Any chunking, any split through a cache and generation see what one call sees."""
    from metaplastic.inspection import kinds

    model, ids = build(name), tokens(2, 40)
    (whole,) = inspection.memories(model, ids)
    monkeypatch.setattr(kinds, "chunk_size", lambda elements, device: 7)
    (chunked,) = inspection.memories(model, ids)
    cache = None
    with torch.no_grad(), inspection.watch(model) as memory:
        for piece in ids.split([17, 1, 1, 21], 1):
            cache = model(piece, cache=cache, use_cache=True).cache
    (pieces,) = memory.report()
    for other in (chunked, pieces):
        assert other.tokens == 80
        for a, b in zip(flat(whole), flat(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=0)
    with inspection.watch(model) as memory:
        written = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    (generated,) = memory.report()
    assert generated.tokens == 2 * 44  # the last token written is never read
    (expected,) = inspection.memories(model, written[:, :-1])
    torch.testing.assert_close(generated.limit, expected.limit, rtol=1e-10, atol=0)


def flat(layer):
    return [layer.limit, layer.limit_median, *layer.ratio, *layer.window]


@pytest.mark.parametrize("name", PRECISE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision(name, dtype):
    """Gates in the model's dtype, the replay in float32."""
    model, ids = build(name, dtype=dtype), tokens(2, 100)
    (layer,) = inspection.memories(model, ids)
    (calls,) = catch(model, lambda: model(ids)).values()
    check(layer, calls, tolerance=2e-4)  # J is summed in float32; the window's brute force cancels in float64


@pytest.mark.parametrize("name", ADDITIVE)
def test_an_additive_rule_has_a_window_and_no_precision(name):
    model, ids = build(name), tokens(2, 30)
    (layer,) = inspection.memories(model, ids)
    assert layer.note == "additive: no precision"
    assert layer.limit is layer.limit_median is layer.ratio is None
    (((mixer, x, _, _),),) = catch(model, lambda: model(ids)).values()
    expected = quartiles((1 / (1 - mixer.gates(x).g.detach().exp())).flatten(0, 1))
    for a, b in zip(layer.window, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=0)


def test_decays_per_key_and_mixers_without_gates(monkeypatch):
    """Rules to come: a g [B, T, H, K] counts every key; without g or gates there is nothing, and nothing fails."""
    model, ids = build("mamba2", "mamba2"), tokens(1, 10)
    first, second = (b.mixer for b in model.model.layers)
    g = -torch.rand(1, 10, 3, 4, dtype=torch.float64)
    monkeypatch.setattr(first, "gates", lambda *a, **k: AdditiveGates(None, None, None, g))
    monkeypatch.setattr(second, "gates", None)
    a, b = inspection.memories(model, ids)
    torch.testing.assert_close(a.window.largest, (1 / (1 - g.exp())).amax((0, 1, 3)), rtol=1e-12, atol=0)
    assert b.window is None


def test_infinite_windows_and_a_memory_that_never_forgets():
    model = build("palimpsa_d")
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.A_log[0] = -math.inf  # g = 0
        mixer.A_log[1] = 20.0  # alpha = 0
    (layer,) = inspection.memories(model, tokens(1, 50))
    assert layer.window.median[:2].tolist() == [math.inf, 1.0]
    assert layer.window.low[2] < layer.window.largest[2] < math.inf
    (((_, x, _, _),),) = catch(model, lambda: model(tokens(1, 50))).values()
    with torch.no_grad():
        gates = mixer.gates(x)
    everything = torch.einsum("bthv,bthk->hvk", gates.beta, gates.k.square())
    assert layer.limit[0] == pytest.approx(float(everything[0].max() / gates.prior[0]), rel=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model, ids = build("palimpsa_d").train(training), tokens(2, 12)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before, expected = copy.deepcopy(model.state_dict()), model(ids).logits.detach()
    modules = list(model.modules())
    found = inspection.memories(model, ids)
    with inspection.watch(model) as memory:  # gradients flow through a watched call as ever
        assert torch.equal(model(ids).logits, expected)
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(m.training is training and not m._forward_pre_hooks for m in modules)
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())
    gradient = model.model.layers[0].mixer.b_scale.grad
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert torch.equal(model.model.layers[0].mixer.b_scale.grad, gradient)
    assert not any(x.requires_grad for report in (found, memory.report()) for x in flat(report[0]))


def test_hooks_go_when_something_fails():
    model = build("palimpsa_d")
    with pytest.raises(ValueError, match="attention_mask"):
        inspection.memories(model, tokens(2, 5), torch.ones(2, 4))

    def fail():
        with inspection.watch(model):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert not any(m._forward_pre_hooks for m in model.modules())


class Wrapper(nn.Module):
    """As adapters wrap: the model some way down, another signature, a copy that is never called."""

    def __init__(self, model):
        super().__init__()
        self.spare, self.base = copy.deepcopy(model), nn.ModuleDict({"model": model})

    def forward(self, *args, **kwargs):
        return self.base["model"](*args, **kwargs)


def test_wrapped_models_and_other_libraries_around_our_layers():
    model, ids = build("palimpsa_d"), tokens(2, 12)
    (expected,) = inspection.memories(model, ids)
    wrapped = Wrapper(model)
    with torch.no_grad(), inspection.watch(wrapped) as memory:
        wrapped(ids)
    (found,) = memory.report()  # not the spare, which did not run
    assert found.name == "base.model.model.layers.0.mixer"
    torch.testing.assert_close(found.limit, expected.limit, rtol=0, atol=0)

    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mixer = model.model.embed_tokens, model.model.layers[0].mixer

        def forward(self, input_ids):
            return self.mixer(self.embed(input_ids))[0]

    (found,) = inspection.memories(Host(), ids)
    assert found.name == "mixer" and found.tokens == 24


def test_a_compiled_model():
    model, ids = build("palimpsa_d").eval(), tokens(2, 12)
    (expected,) = inspection.memories(model, ids)
    compiled = torch.compile(model.model, backend="eager")
    with torch.no_grad():
        compiled(ids, use_cache=False)
        with inspection.watch(compiled) as memory:
            compiled(ids, use_cache=False)
    (found,) = memory.report()
    torch.testing.assert_close(found.limit, expected.limit, rtol=0, atol=0)


def test_errors():
    with pytest.raises(ValueError, match="must contain a mixer of metaplastic.layers, got a Linear"):
        inspection.memories(nn.Linear(2, 2), torch.zeros(1, 2))
    with inspection.watch(build("palimpsa_d", "mamba2")) as memory, pytest.raises(ValueError, match="none of its 2"):
        memory.report()


def test_no_tokens():
    model = build("palimpsa_d")
    (layer,) = inspection.memories(model, tokens(2, 5), torch.zeros(2, 5, dtype=torch.long))
    assert layer.tokens == 0 and layer.limit is None and layer.window is None


# What the number is for


@pytest.mark.parametrize("name", PRECISE)
def test_the_limit_bounds_the_distance_to_the_additive_rule(name):
    """|M / (prior + J) - M / prior| <= max(J / prior) |M / prior|: for every term of every answer, and it is near."""
    model, ids = build(name), tokens(2, 60)
    (layer,) = inspection.memories(model, ids)
    (((mixer, x, _, _),),) = catch(model, lambda: model(ids)).values()
    gates = mixer.gates(x)
    # Answers whose terms are all positive, so that the bound of the terms is that of their sum.
    q, k, w = gates.q.abs(), gates.k.abs(), gates.w.abs()
    with torch.no_grad():
        ours = ops.palimpsa(q, k, w, gates.beta, gates.g, gates.prior).output
        plain = ops.additive(q, k, w / gates.prior[:, None], gates.g).output
    distance = ((ours - plain).abs() / plain).amax((0, 1, 3))
    bound = layer.limit / (1 + layer.limit)  # J / (prior + J), the tighter form
    assert (distance <= bound).all()
    assert (distance >= 0.1 * bound).all()
    # Elementwise, with the signs as they are: one-hot queries read single elements.
    q = torch.eye(4, dtype=torch.float64)[torch.arange(60) % 4].expand(2, 3, 60, 4).transpose(1, 2)
    with torch.no_grad():
        ours = ops.palimpsa(q, gates.k, gates.w, gates.beta, gates.g, gates.prior).output
        plain = ops.additive(q, gates.k, gates.w / gates.prior[:, None], gates.g).output
    assert ((ours - plain).abs() <= layer.limit[:, None] * plain.abs()).all()


def test_the_additive_limit_is_reached_by_evidence_and_not_by_forgetting():
    """beta -> 0: the monitor and the distance vanish linearly. alpha -> 0 alone: both stay (review point 3)."""
    model, ids = build("palimpsa_d"), tokens(2, 60)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.prior_log.zero_()

    def measure():
        (layer,) = inspection.memories(model, ids)
        (((_, x, _, _),),) = catch(model, lambda: model(ids)).values()
        with torch.no_grad():
            gates = mixer.gates(x)
            q, k, w = gates.q.abs(), gates.k.abs(), gates.w.abs()
            ours = ops.palimpsa(q, k, w, gates.beta, gates.g, gates.prior).output
            plain = ops.additive(q, k, w, gates.g).output
        return layer.limit, ((ours - plain).abs() / plain).amax((0, 1, 3))

    with plasticity.set_plasticity(mixer, 1e-3):
        small, near = measure()
    with plasticity.set_plasticity(mixer, 1e-5):
        smaller, nearer = measure()
    torch.testing.assert_close(smaller, small / 100, rtol=1e-6, atol=0)
    torch.testing.assert_close(nearer, near / 100, rtol=1e-2, atol=0)  # second order in J / prior
    with plasticity.set_plasticity(mixer, 0):
        zero, same = measure()
    assert not zero.any() and same.max() < 1e-14
    plasticity.set_plasticity(mixer, 1.0)
    held = []
    for decay in (0.0, 5.0, 30.0):  # log A: from a long memory to none at all
        with torch.no_grad():
            mixer.A_log.fill_(decay)
        held.append(measure())
    windows = inspection.memories(model, ids)[0].window
    assert (windows.largest == 1).all()  # alpha is 0: everything but the last token is forgotten
    for limit, distance in held:
        assert (limit > 0.05).all() and (distance > 0.02).all()
    assert (held[0][0] > held[2][0]).all()


@pytest.mark.parametrize("name", PRECISE)
def test_the_monitor_rises_with_the_dial(name):
    model, ids = build(name), tokens(2, 60)
    rising = []
    for dial in (0.0, 0.01, 0.1, 1.0, 10.0):
        with plasticity.set_plasticity(model, dial):
            (layer,) = inspection.memories(model, ids)
        rising.append(torch.stack([layer.limit, layer.limit_median, layer.ratio.median]))
    assert not rising[0].any()
    assert all((b > a).all() for a, b in itertools.pairwise(rising))
    torch.testing.assert_close(rising[3][0], 10 * rising[2][0], rtol=1e-9, atol=0)
