"""What is said of Gaussian memories and of the delta rule, against the filter token by token in float64."""

import io
import json

import pytest
import torch

from metaplastic import inspection, rules
from metaplastic.inspection.kinds import Delta, Gaussian, Spread
from metaplastic.inspection.replay import LayerMemory
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.ops.bayesian.chunked import Plan
from metaplastic.rules import GaussianState
from metaplastic.tasks.text import byte_tokenizer

from .watching import arguments, build, catch, quartiles, spans, tokens

OPTIONS = {
    "head": {},
    "key, groups": {"decay": "key", "noise_groups": 2},
    "groups": {"noise_groups": 3},
    "rotations": {"rotation": True, "decay": "key", "conv_size": None},
    "free noise": {"rotation": True, "process_noise": "free"},
}
NAMES = ("uncertainty", "gain", "first_gain", "stationary", "window", "known", "condition")


def brute_force(calls):
    """Every quantity by ``rules.bayesian``, one token and one sequence at a time, covariances kept whole."""
    found = {name: [] for name in NAMES}
    for mixer, x, state, kwargs in calls:
        with torch.no_grad():
            gates = mixer.gates(x, state, **kwargs)
        gates = type(gates)(*(None if z is None else z.double() for z in gates))
        prior = gates.prior_variance
        keys = gates.k.shape[-1]
        for b, start, end, n in spans(x, kwargs):
            k, v, g, process, noise = (z[b, start:end] for z in gates[1:6])
            turns = [None] * (end - start) if gates.rotation is None else gates.rotation[b, start:end, None].unbind()
            memory = rules.bayesian.init_state(1, k.shape[1], v.shape[-1], keys, prior_variance=prior)
            if state is not None:
                memory = GaussianState(*(s[n : n + 1].double() for s in state.memory))
            kept = [kwargs.get("mask") is None or bool(kwargs["mask"][b, t]) for t in range(start, end)]
            for t, counts in enumerate(kept):
                before = rules.bayesian.predict(memory, g[t, None], process[t, None], turns[t])
                memory = rules.bayesian.update(before, k[t, None], v[t, None], noise[t, None])
                if not counts:
                    continue
                key = k[t] if prior.dim() == 1 else k[t][:, None].expand(*prior.shape, keys)
                surprise = torch.einsum("...i,...ij,...j->...", key, before.covariance[0], key)
                first = prior * key.square().sum(-1)
                variances = memory.covariance[0].diagonal(dim1=-2, dim2=-1)
                found["uncertainty"].append(variances.mean(-1) / prior)
                found["gain"].append(surprise / (noise[t] + surprise))
                found["first_gain"].append(first / (noise[t] + first))
                a = g[t].exp() if g.dim() == 3 else g[t, :, None].exp()
                found["window"] += list((1 / (1 - a)).T)
                if process.dim() == 3 and a.shape[1] not in (1, keys):
                    a = a.repeat_interleave(2, 1)
                added = process[t] if process.dim() == 3 else process[t, :, None]
                found["stationary"] += list((added / (1 - a**2)).T)
            if any(kept):
                values = torch.linalg.eigvalsh(memory.covariance[0])
                found["condition"].append(values.amax(-1) / values.amin(-1))
                found["known"].append((2 * values < prior[..., None]).sum(-1).double())
    return {name: torch.stack(values) for name, values in found.items()}, prior


def check(layer, calls, tolerance=1e-9):
    expected, prior = brute_force(calls)
    assert layer.tokens == len(expected["gain"]) and layer.note == ""
    for name, values in expected.items():
        for a, b in zip(layer.measures[name], quartiles(values), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(layer.prior, prior.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["plain", "padded", "packed", "continued"])
def test_equals_brute_force(options, case):
    """Over several chunks, priors and stationary variances that differ, and whatever a batch can look like."""
    model, given = build("bayesian", **OPTIONS[options]), arguments(case)
    if case == "continued":
        given["cache"] = model(tokens(2, 9), use_cache=True).cache
    found = inspection.memories(model, **given)
    calls = catch(model, lambda: model(**given))
    (layer,) = found
    assert layer.limit is None and layer.strength is None
    check(layer, calls[layer.name])


def test_any_chunking_and_any_split_through_a_cache(monkeypatch):
    """Per token the same; the spectra are those of the states that calls leave."""
    model, ids = build("bayesian"), tokens(2, 40)
    (whole,) = inspection.memories(model, ids)
    monkeypatch.setattr(Plan, "size", lambda *a: 7)
    (chunked,) = inspection.memories(model, ids)
    cache = None
    with torch.no_grad(), inspection.watch(model) as memory:
        for piece in ids.split([17, 1, 1, 21], 1):
            cache = model(piece, cache=cache, use_cache=True).cache
    (pieces,) = memory.report()
    for name in NAMES:
        for other in (chunked,) if name in ("known", "condition") else (chunked, pieces):
            for a, b in zip(whole.measures[name], other.measures[name], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=0)
    calls = catch(model, lambda: [model(ids[:, :n]) for n in (17, 18, 19, 40)])
    ends = brute_force(calls["model.layers.0.mixer"])[0]["condition"]
    torch.testing.assert_close(pieces.condition.median, quartiles(ends)[1], rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision(dtype):
    model, ids = build("bayesian", dtype=dtype), tokens(2, 100)
    (layer,) = inspection.memories(model, ids)
    (calls,) = catch(model, lambda: model(ids)).values()
    expected, _ = brute_force(calls)
    for name in ("uncertainty", "gain", "known"):
        torch.testing.assert_close(layer.measures[name].median, quartiles(expected[name])[1], rtol=1e-3, atol=0)


def test_what_the_numbers_mean():
    """Keys along two axes, seen often, no decay, little noise: two directions are known and further writes small."""
    model = build("bayesian", conv_size=None)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.A_log.fill_(-torch.inf)  # nothing is forgotten, and so nothing drifts
        mixer.noise_proj.weight.zero_()
        mixer.prior_variance.fill_(2.0)
        mixer.stationary_variance.fill_(2.0)
        mixer.noise_bias.fill_(-3.0)
        mixer.k_proj.weight.zero_()
        for head in range(3):
            mixer.k_proj.weight[4 * head, 0] = mixer.k_proj.weight[4 * head + 1, 1] = 1.0
    x = torch.zeros(1, 200, 12, dtype=torch.float64)
    x[0, ::2, 0], x[0, 1::2, 1] = 1.0, 1.0
    with inspection.watch(model) as memory:
        mixer(x)
    (layer,) = memory.report()
    assert layer.known.median.tolist() == [2.0] * 3
    prior, noise = layer.prior[0], mixer.gates(x).observation_noise[0, 0, 0].detach()
    left = 1 / (1 / prior + 100 / noise)  # of either, after 100 times
    torch.testing.assert_close(layer.uncertainty.low.min(), (2 * left + 2 * prior) / (4 * prior), rtol=0.02, atol=0)
    torch.testing.assert_close(layer.condition.median[0], prior / left, rtol=1e-4, atol=0)
    torch.testing.assert_close(layer.gain.largest, layer.first_gain.largest, rtol=1e-9, atol=0)  # the first token's
    assert (layer.gain.median < 0.03).all() and (layer.first_gain.low > 0.9).all()
    assert torch.isinf(layer.window.low).all() and not layer.stationary.largest.any()


def test_the_delta_rule_has_a_window_and_a_strength():
    model, ids = build("gated_deltanet"), tokens(3, 30)
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[0, :20] = 0
    (layer,) = inspection.memories(model, ids, mask)
    (((mixer, x, _, kwargs),),) = catch(model, lambda: model(ids, attention_mask=mask)).values()
    gates = mixer.gates(x, **kwargs)
    assert (layer.note, layer.tokens, layer.gain) == ("", 70, None)
    for found, values in ((layer.strength, gates.beta), (layer.window, 1 / (1 - gates.g.exp()))):
        for a, b in zip(found, quartiles(values.detach()[mask.bool()]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=0)


def test_a_row_is_what_its_heads_have():
    """Three heads, each the largest in another quantity: a range of each, and no sentence about a head of no layer."""

    def over_heads(*median):
        values = torch.tensor(median, dtype=torch.float64)
        return Spread(values / 2, values, values * 2, values * 3)

    measures = {
        "uncertainty": over_heads(0.977, 0.339, 0.5),
        "gain": over_heads(0.25, 0.25, 0.25),
        "known": over_heads(0, 27, 3),
        "condition": over_heads(1, 12345.6, 999.7),
        "window": over_heads(1.5, 5301, float("inf")),
    }
    row = inspection.summary_row(LayerMemory("layer", "BayesianLayer", 9, "", Gaussian, measures))
    told = "uncertainty 0.339 to 0.977, gain 0.25, known 0 to 27, condition 1 to 12,346"
    assert row == ["layer", "BayesianLayer", told, "1.5 to inf"]


def test_shares_above_one_are_drawn_whole():
    layer = LayerMemory("layer", "GatedDeltaNet", 9, "", Delta, {"strength": Spread(*torch.tensor([[0.5, 1.75]] * 4))})
    (axes, *_) = inspection.figure([layer]).axes
    assert axes.images[0].get_clim() == (0, 1.75) and axes.images[0].get_array().tolist() == [[0.5, 1.75]]


def test_attention_alone(tmp_path):
    model = build("attention")
    (layer,) = inspection.memories(model, tokens(2, 7))
    assert (layer.tokens, layer.window, layer.measures) == (14, None, {})
    assert inspection.legend([layer]) == ""
    inspection.figure([layer]).savefig(io.BytesIO())
    model = MetaplasticForCausalLM(
        MetaplasticConfig(vocab_size=258, hidden_size=8, num_hidden_layers=1, mixers="attention")
    )
    html = inspection.inspect_text(model, byte_tokenizer(), "the memory knows", tmp_path)[1].read_text()
    assert "no fixed memory to be sure of" in html and "The window N" not in html and "Heads</h2>" not in html


def test_a_page_for_every_kind_of_memory(tmp_path):
    names = ["palimpsa_d", "bayesian", "gated_deltanet", "attention"]
    sizes = {"num_heads": 2, "key_size": 4, "value_size": 6}
    options = {name: sizes | ({"noise_groups": 3} if name == "bayesian" else {}) for name in names}
    torch.manual_seed(0)
    model = MetaplasticForCausalLM(
        MetaplasticConfig(
            vocab_size=258, hidden_size=12, num_hidden_layers=4, mixers=names, mixer_options=options
        )
    )  # fmt: skip
    layers, page = inspection.inspect_text(model, byte_tokenizer(), "the memory knows", tmp_path)
    drawing = inspection.figure(layers)
    panels = {axes.get_title().split()[0]: axes for axes in drawing.axes if axes.get_title()}
    assert list(panels) == ["largest", "uncertainty", "gain", "write", "memory"]
    grids = {name: axes.images[0].get_array() for name, axes in panels.items()}
    for name, layer, words in (("gain", 1, "gain"), ("uncertainty", 1, "uncertainty"), ("write", 2, "strength")):
        shares = layers[layer].measures[words].median.flatten().tolist()  # group after group
        assert grids[name].tolist() == [pytest.approx(shares)]  # no row for a layer without it
        assert panels[name].images[0].get_clim() == (0, 1)
    assert grids["memory"].shape == (3, 2) and grids["largest"].shape == (1, 2)
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in panels.values()]
    assert labels[1] == labels[2] == ["1  BayesianLayer"] and labels[3] == ["2  GatedDeltaNet"]
    assert labels[4] == ["0  PalimpsaD", "1  BayesianLayer", "2  GatedDeltaNet"]
    assert [label.get_text() for label in panels["gain"].get_xticklabels()] == [
        "0.0",
        "0.1",
        "0.2",
        "1.0",
        "1.1",
        "1.2",
    ]
    drawing.savefig(io.BytesIO())
    stored = json.loads((tmp_path / "results.json").read_text())["measurements"]["layers"]
    assert stored[1]["gain"]["median"] == layers[1].gain.median.tolist() and stored[0]["gain"] is None
    told = [inspection.summary_row(layer)[2] for layer in layers]
    assert told[3] == layers[3].note == "keeps its tokens: no fixed memory to be sure of"
    words = [["limit", "ratio"], ["uncertainty", "gain", "known", "condition"], ["strength"]]
    assert [[part.split()[0] for part in told[i].split(", ")] for i in range(3)] == words
    for i, layer in enumerate(layers):  # no line for what the table above it does not have
        lines = inspection.legend(layers[i : i + 1]).splitlines()
        assert [line.split(":")[0] for line in lines] == ([] if i == 3 else [*words[i], "window"]), layer
    html = page.read_text()
    mixers, heads = html.split("<h2>Heads</h2>")
    others = ("first gain", "stationary", "prior", "limit, median")
    assert not any(f"<p>{word}: " in mixers for word in others) and all(f"<p>{word}: " in heads for word in others)
    assert mixers.count("<p>gain: ") == 1 and "<p>gain: " not in heads
    assert ">1.2</td>" in html and f">{float(layers[1].gain.median[1, 2]):.4g}<" in html
    assert "tr(P) / (K p0)" in html
