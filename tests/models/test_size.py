"""Sizes and costs against the real model: its parameters, its cache, its matrix products, the rule replayed."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from metaplastic import rules
from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticForCausalLM, ModelSize, size
from metaplastic.models.size import MEMORY_FLOPS, describe

from .conftest import OPTIONS, WINDOW, config, make, states, tokens


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"intermediate_size": 10}])
def test_parameters_by_part(kind, changes):
    model, found = make(kind, **changes), size(config(kind, **changes))
    assert isinstance(found, ModelSize)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    with torch.device("meta"):
        meta = MetaplasticForCausalLM(config(kind, **changes))
    assert found.parameters == sum(p.numel() for p in meta.parameters())
    parts = {"embeddings": 0, "mixers": 0, "mlps": 0, "norms": 0}
    for name, p in model.named_parameters():
        part = "mixers" if ".mixer." in name else "mlps" if ".mlp." in name else "embeddings"
        if part == "embeddings" and "norm." in name:
            part = "norms"
        parts[part] += p.numel()
    assert parts == {name: getattr(found, name) for name in parts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_state_bytes_are_those_of_a_cache(kind, dtype):
    model, ids = make(kind).to(dtype), tokens(3, 4)
    cache = model(ids, use_cache=True).cache
    found = size(model.config)
    assert sum(x.nbytes for x in states(cache)) == 3 * found.state_bytes(dtype, tokens=4)
    cache = model(tokens(1, 30), use_cache=True).cache  # longer than the window
    assert sum(x.nbytes for x in states(cache)) == found.state_bytes(dtype, tokens=30)
    memories = [x for layer in cache.layers for x in layer.recurrent_states.values() if x is not None]
    fixed = "attention" not in model.config.mixers
    assert not fixed or sum(x.nbytes for x in memories) == found.memory_bytes(dtype)


def elementwise(name):
    return {"num_heads": 2} | OPTIONS[name] | ({"backend": "reference"} if MIXERS[name].operator else {})


@pytest.mark.parametrize("length", [1, 24])
def test_matrix_products_are_those_that_run(kind, length):
    """PyTorch's counter sees matrix products and convolutions; those with a batch are the filter's own, of its rule."""
    used = MIXERS if kind == "mixed" else [kind]
    model = make(kind, mixer_options={name: elementwise(name) for name in used})
    found, ids = size(model.config), tokens(2, length)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    convolutions = counts.pop("aten.convolution", 0)
    counts.pop("aten.bmm", 0)
    assert sum(counts.values()) == 2 * length * found.matrix_products
    assert found.forward_flops == found.matrix_products + found.convolutions + found.memory_rule
    if length > 1:  # a window of length + 3 tokens gives length outputs
        assert convolutions == 2 * length * found.convolutions
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    counts = {op: flops for op, flops in counts.items() if "conv" not in op and "bmm" not in op}
    assert sum(counts.values()) == 3 * 2 * length * found.matrix_products
    assert found.training_flops == 3 * found.forward_flops


class CountElements(TorchDispatchMode):
    """Elements of the results (for a sum: of the argument) of every arithmetic operation on whole memories."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.total = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        of = args[0] if "sum" in str(function) else out
        if function.overloadpacket.__name__ in ("add", "mul", "div", "sum") and of.numel() == self.elements:
            self.total += of.numel()
        return out


@pytest.mark.parametrize("name", ["additive", "palimpsa", "delta"])
def test_the_rule_costs_what_its_reference_does(name):
    heads, value, key = 2, 3, 5
    module = getattr(rules, name)
    state = module.init_state(1, heads, value, key)
    q, k = torch.randn(2, 1, heads, key)
    v, beta = torch.rand(2, 1, heads, value)
    g, prior = -torch.rand(1, heads), torch.ones(heads)
    with CountElements(heads * value * key) as count:
        if name == "additive":
            state = module.step(state, k, v, g)
            module.readout(state, q)
            variance = 0
        elif name == "delta":
            state = module.step(state, k, v, torch.rand(1, heads), g)
            module.readout(state, q)
            variance = 0
        else:
            state = module.step(state, k, v, beta, g)
            module.readout(state, q, prior)
            variance = 2  # a division and the sum, which a model does not ask for
    costs = MEMORY_FLOPS[type(state)]
    assert count.total == (sum(costs.values()) + variance) * heads * value * key


def test_the_rule_in_a_model(kind):
    found = size(config(kind))
    expected = 0
    for block in make(kind).model.layers:
        memory = block.mixer.init_state(1).memory
        if block.mixer_name == "attention":
            continue
        expected += sum(MEMORY_FLOPS[type(memory)][name] * x.numel() for name, x in memory._asdict().items())
    assert found.memory_rule == expected
    if kind == "palimpsa_d":  # two layers of two heads of 8 x 8 elements, five operations on each of two fields
        assert found.memory_rule == 2 * 2 * 64 * 10


def test_what_attention_sees():
    """Four query heads that share two of keys (5) and values (3), in two layers."""
    options = {"attention": {"num_heads": 4, "num_key_heads": 2, "key_size": 5, "value_size": 3}}
    model = make("attention", mixer_options=options)
    found = size(model.config)
    assert (found.activations_per_token, found.positions_per_token) == (2 * 2 * 8, 2)
    cache, ids = model(tokens(1, 12), use_cache=True).cache, tokens(1, 1)
    assert sum(x.nbytes for x in states(cache)) == 12 * found.bytes_per_token()
    assert found.attention_per_token == 2 * 4 * 2 * (5 + 3)
    model = make("attention", mixer_options={"attention": options["attention"] | {"value_size": 5}})  # none is padded
    cache, found = model(tokens(1, 12), use_cache=True).cache, size(model.config)
    plain = sdpa_kernel(SDPBackend.MATH)  # the counter sees nothing of PyTorch's own kernel for CPUs
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain:
        model(ids, cache=cache)
    assert counter.get_total_flops() == found.matrix_products + 13 * found.attention_per_token


def test_growth_is_told_with_its_end():
    """By what, up to how many tokens, and the whole then; nothing of it where nothing grows."""
    options = {"num_heads": 4, "num_key_heads": 2, "key_size": 5, "value_size": 3}  # 2 layers (16 numbers, a position)
    for window, end in ((None, ""), (17, ", up to 16 tokens: 2.3 KB")):
        made = make("attention", mixer_options={"attention": options | {"window": window}})
        rows, found = dict(describe(made.config)), size(made.config)
        assert rows["state of a sequence (float32 model)"] == f"grows by 144 B per token seen{end}"
        assert "  memory" not in rows and "  convolution" not in rows
        flops = ("FLOPs per token, forward or decode", found.forward_flops, 128), (
            "FLOPs per token, training", found.training_flops, 384
        )  # fmt: skip
        for row, fixed, each in flops:
            last = f", up to 17 tokens: {fixed + 17 * each:,}" if window else ""
            assert rows[row] == f"{fixed:,}, grows by {each} per token seen{last}"
    rows, found = dict(describe(config("mixed"))), size(config("mixed"))
    last = f"up to {WINDOW - 1} tokens: {found.state_bytes(tokens=99) / 1000:.1f} KB"
    told = f"{found.state_bytes() / 1000:.1f} KB, grows by {found.bytes_per_token()} B per token seen, {last}"
    assert rows["state of a sequence (float32 model)"] == told
    rows, found = dict(describe(config(), "bfloat16")), size(config())
    memory, convolution = 4 * found.memory_state, 2 * found.convolution_state
    assert rows["state of a sequence (bfloat16 model)"] == f"{(memory + convolution) / 1000:.1f} KB"
    assert rows["  memory"] == f"{memory / 1000:.1f} KB" and rows["  convolution"] == f"{convolution} B"
    assert not any("token seen" in value for value in rows.values())


def test_a_rule_without_a_cost(monkeypatch):
    monkeypatch.delitem(MEMORY_FLOPS, rules.PalimpsaState)
    with pytest.raises(ValueError, match="MEMORY_FLOPS has AdditiveState, .*, but no PalimpsaState"):
        size(config())


# Palimpsa's published sizes (arXiv 2602.09075, Table 5), which name the models.
PUBLISHED = {
    ("palimpsa_d", 170): {"hidden_size": 768, "num_hidden_layers": 19, "key": 48, "value": 48, "mlp": 2048},
    ("palimpsa_d", 760): {"hidden_size": 1536, "num_hidden_layers": 19, "key": 96, "value": 192, "mlp": 4096},
    ("palimpsa_m", 170): {"hidden_size": 768, "num_hidden_layers": 30, "key": 48, "value": 96, "mlp": None},
    ("palimpsa_m", 760): {"hidden_size": 1536, "num_hidden_layers": 38, "key": 96, "value": 192, "mlp": None},
}


def published(name, millions):
    """The configuration of a published size."""
    sizes = dict(PUBLISHED[name, millions])
    options = {"num_heads": 16, "key_size": sizes.pop("key"), "value_size": sizes.pop("value")}
    groups = {"num_groups": 16} if name == "palimpsa_m" else {}
    mlp = sizes.pop("mlp")
    options = {name: options | groups}
    return config(name, vocab_size=32000, mixers=name, mixer_options=options, intermediate_size=mlp, **sizes)


@pytest.mark.parametrize(("name", "millions"), [pair for pair in PUBLISHED if pair[0] in MIXERS])
def test_published_sizes(name, millions):
    found = size(published(name, millions))
    assert found.parameters == pytest.approx(millions * 1e6, rel=0.04)
    assert found.memory_rule < 0.1 * found.matrix_products


def test_the_table_adds_up():
    rows = dict(describe(config("mixed"), "bfloat16"))
    found = size(config("mixed"))
    assert rows["parameters"] == f"{found.parameters:,}"
    parts = [rows[f"  {part}"] for part in ("embeddings", "mixers", "mlps", "norms")]
    assert sum(int(part.replace(",", "")) for part in parts) == found.parameters
    assert rows["weights (bfloat16)"] == f"{2 * found.parameters / 1000:,.1f} KB"
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, float64, got 'int8'"):
        describe(config(), "int8")


def test_the_command(tmp_path):
    """From options, and from a saved model; bad values are errors with a name."""
    from typer.testing import CliRunner

    from metaplastic.cli import app

    run = CliRunner().invoke
    shown = run(app, ["size", "--mixer", "palimpsa_d_additive", "--hidden-size", "32", "--layers", "1", "--no-tied"])
    assert shown.exit_code == 0, shown.output
    changes = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "mixers": "palimpsa_d_additive"}
    alike = size(config(**changes, mixer_options={}, intermediate_size=384, tie_word_embeddings=False))
    assert f"{alike.parameters:,}" in shown.output
    make("mixed").save_pretrained(tmp_path)
    shown = run(app, ["size", str(tmp_path), "--dtype", "bfloat16"])
    assert f"{size(config('mixed')).parameters:,}" in shown.output
    assert "weights (bfloat16)" in shown.output
    assert "dtype must be one of" in str(run(app, ["size", "--dtype", "int8"]).exception)
    assert "does not exist" in str(run(app, ["size", str(tmp_path / "nowhere")]).exception)
