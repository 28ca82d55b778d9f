"""The dial: 0 is the ablation, changes are in place and undone bit for bit, forms keep the function."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metaplastic.layers import MIXERS, plasticity
from metaplastic.layers.evidence import Evidence

# Every metaplastic mixer with its ablation, and arguments that differ from all defaults of the two.
SIZES = {"hidden_size": 12, "num_heads": 4, "key_size": 3, "value_size": 5, "conv_size": 3, "norm_eps": 0.01}
PAIRS = {
    "palimpsa_d": ("palimpsa_d_additive", {"num_key_heads": 2}),
    "palimpsa_m": (
        "mamba2",
        {
            "num_groups": 2,
            "norm_groups": 4,
            "conv_bias": False,
            "bias": True,
            "dt_limit": (0.3, 0.9),
            "decay_range": (0.1, 0.2),
        },
    ),
}
METAPLASTIC = sorted(PAIRS)


def make(name, **options):
    special = next(special for form, (ablation, special) in PAIRS.items() if name in (form, ablation))
    return MIXERS[name](**SIZES, **special, **options).double()


class Nested(nn.Module):
    """Metaplastic layers, one ablation and a linear layer, some way down."""

    def __init__(self):
        super().__init__()
        layers = [make("palimpsa_d"), make("palimpsa_d_additive"), make("palimpsa_m")]
        self.inner = nn.ModuleDict({"stack": nn.ModuleList(layers), "linear": nn.Linear(2, 2)})


NAMES = ["inner.stack.0", "inner.stack.2"]


def inputs(length=70):
    return torch.randn(2, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_every_metaplastic_mixer_is_covered():
    assert {n for n, c in MIXERS.items() if issubclass(c, Evidence)} == set(PAIRS)


@pytest.mark.parametrize("name", METAPLASTIC)
def test_reads_and_sets_softplus(name):
    layer = make(name)
    torch.testing.assert_close(plasticity.plasticity(layer)[""], F.softplus(layer.b_scale))
    for value, error in ((1e-12, 1e-8), (0.01, 1e-12), (1.0, 1e-12), (19.9, 1e-12), (20.1, 0), (300.0, 0)):
        plasticity.set_plasticity(layer, value)  # far below 0, PyTorch's softplus itself is off by 1e-8
        torch.testing.assert_close(
            plasticity.plasticity(layer)[""], torch.full((4,), value, dtype=torch.float64), rtol=error, atol=0
        )
    heads = torch.tensor([0.0, 0.1, 2.0, 30.0], dtype=torch.float64)
    plasticity.set_plasticity(layer, heads)
    torch.testing.assert_close(plasticity.plasticity(layer)[""], heads, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_zero_is_exact_finite_and_has_a_zero_gradient(dtype):
    layer = make("palimpsa_d").to(dtype)
    plasticity.set_plasticity(layer, 0)
    assert layer.b_scale.isfinite().all()
    assert not F.softplus(layer.b_scale).any()
    assert not plasticity.plasticity(layer)[""].any()
    x = inputs(9).to(dtype)
    assert not layer.gates(x).beta.any()
    layer(x)[0].sum().backward()
    assert not layer.b_scale.grad.any()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    average = (layer.b_scale + layer.b_scale.detach()) / 2  # what minus infinity would not survive: b + (c - b) / 2
    assert (layer.b_scale + (average - layer.b_scale) / 2).isfinite().all()


@pytest.mark.parametrize("name", METAPLASTIC)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_zero_is_the_ablation(name, backend):
    layer = make(name, backend=backend)
    ablation = plasticity.ablation_form(layer)
    assert type(ablation) is MIXERS[PAIRS[name][0]]
    ablation.backend = "reference" if backend == "reference" else "auto"
    x = inputs()
    expected, state = ablation(x)
    before = layer(x)[0]
    with plasticity.set_plasticity(layer, 0):
        y, memory = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(memory.memory.information, state.memory.mean, rtol=0, atol=1e-12)
    assert (before - expected).abs().max() > 1e-3  # the dial was not at 0
    assert torch.equal(layer(x)[0], before)


@pytest.mark.parametrize("name", METAPLASTIC)
def test_the_write_and_the_decay_do_not_feel_the_dial(name):
    layer, x = make(name), inputs()
    gates = []
    for value in (0.0, 0.5, 5.0):
        with plasticity.set_plasticity(layer, value):
            gates.append(layer.gates(x))
    for other in gates[1:]:
        for field in ("q", "k", "w", "g", "prior"):
            assert torch.equal(getattr(other, field), getattr(gates[0], field))
    torch.testing.assert_close(gates[2].beta, 10 * gates[1].beta, rtol=1e-12, atol=0)


def test_many_layers_by_name_by_order_and_all_at_once():
    model = Nested()
    assert list(plasticity.plasticity(model)) == NAMES
    heads = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    def dials():
        return [d.tolist() for d in plasticity.plasticity(model).values()]

    plasticity.set_plasticity(model, [0.5, heads])
    assert dials() == [pytest.approx([0.5] * 4), pytest.approx(heads.tolist())]
    plasticity.set_plasticity(model, heads)
    assert dials() == [pytest.approx(heads.tolist())] * 2
    plasticity.set_plasticity(model, 2.0, layers=NAMES[1:])
    assert dials() == [pytest.approx(heads.tolist()), pytest.approx([2.0] * 4)]
    plasticity.set_plasticity(model, [7.0, heads], layers=NAMES[::-1])
    assert dials() == [pytest.approx(heads.tolist()), pytest.approx([7.0] * 4)]
    plasticity.set_plasticity(model, {NAMES[0]: 3.0})
    assert dials() == [pytest.approx([3.0] * 4), pytest.approx([7.0] * 4)]
    plasticity.scale_plasticity(model, 0.1, layers=NAMES[1:])
    assert dials() == [pytest.approx([3.0] * 4), pytest.approx([0.7] * 4)]
    plasticity.scale_plasticity(model, 0)
    assert dials() == [[0.0] * 4] * 2


def test_what_was_read_can_be_set_again():
    model, other = Nested(), Nested()
    plasticity.draw_plasticity(model, -3, 3)
    plasticity.set_plasticity(other, plasticity.plasticity(model))
    for a, b in zip(plasticity.plasticity(model).values(), plasticity.plasticity(other).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_changes_are_in_place_and_undone_bit_for_bit():
    """The optimiser keeps its parameters; a failing block restores too; changes nest."""
    model = Nested()
    plasticity.draw_plasticity(model, -2, 2)
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())

    def fail():
        with plasticity.set_plasticity(model, 0), plasticity.scale_plasticity(model, 3.0, layers=NAMES[:1]):
            plasticity.draw_plasticity(model)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.requires_grad for p in parameters)
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())
    change = plasticity.set_plasticity(model, 1.5)
    assert not torch.equal(model.state_dict()[f"{NAMES[0]}.b_scale"], before[f"{NAMES[0]}.b_scale"])
    change.restore()
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())


def test_an_optimiser_goes_on_from_the_new_value():
    layer, x = make("palimpsa_d"), inputs(8)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.01, weight_decay=0.1)
    for value in (0.5, 0):
        plasticity.set_plasticity(layer, value)
        held = layer.b_scale.detach().clone()
        optimiser.zero_grad()
        layer(x)[0].square().sum().backward()
        optimiser.step()
        assert layer.b_scale.isfinite().all() and not torch.equal(layer.b_scale, held)
        assert plasticity.plasticity(layer)[""].max() == (0 if value == 0 else pytest.approx(0.5, abs=0.02))


def test_the_published_draw():
    layers = nn.ModuleList([MIXERS["palimpsa_d"](4, 500, 1, 1) for _ in range(2)])
    plasticity.draw_plasticity(layers, generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([x.b_scale.detach() for x in layers])
    assert drawn.min() >= 0.1 and drawn.max() <= 1.0
    assert drawn.mean() == pytest.approx(0.55, abs=0.03) and drawn.std() == pytest.approx(0.9 / math.sqrt(12), abs=0.02)
    assert not torch.equal(layers[0].b_scale, layers[1].b_scale)
    again = copy.deepcopy(layers)
    plasticity.draw_plasticity(again, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([x.b_scale.detach() for x in again]), drawn)


@pytest.mark.parametrize("name", METAPLASTIC)
def test_the_form_of_an_ablation(name):
    ablation = make(PAIRS[name][0]).eval()
    with torch.no_grad():  # trained weights, not initial ones
        for p in ablation.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ablation.D.requires_grad_(False)
    x = inputs()
    expected, state = ablation(x)
    layer = plasticity.metaplastic_form(ablation, plasticity=0, beta_rank=2)
    assert type(layer) is MIXERS[name] and layer.beta_down.out_features == 2
    assert not layer.training and not layer.D.requires_grad and layer.b_scale.requires_grad
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-12)
    plasticity.set_plasticity(layer, 1.0)
    assert (layer(x)[0] - expected).abs().max() > 1e-3
    torch.testing.assert_close(plasticity.ablation_form(layer)(x)[0], expected, rtol=0, atol=0)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    torch.testing.assert_close(ablation(x)[0], expected, rtol=0, atol=0)  # nothing is shared
    drawn = plasticity.metaplastic_form(ablation)
    assert drawn.b_scale.min() >= 0.1 and drawn.b_scale.max() <= 1.0
    assert torch.equal(drawn.prior_log, torch.zeros(4, dtype=torch.float64))
    assert drawn.b_scale.dtype == torch.float64


@pytest.mark.parametrize("name", METAPLASTIC)
def test_a_layer_with_adapters_is_refused(name):
    """Weights under other names would be left out of the copy, silently."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

    for form, made in ((plasticity.ablation_form, name), (plasticity.metaplastic_form, PAIRS[name][0])):
        layer = make(made)
        projection = next(n for n, m in layer.named_children() if isinstance(m, nn.Linear))
        setattr(layer, projection, Adapter(getattr(layer, projection)))
        with pytest.raises(ValueError, match="merge adapters first"):
            form(layer)


def test_the_prior_is_a_scale_of_the_dial():
    """Rule: (w, beta, prior) and (c w, c beta, c prior) read out the same; so prior p with p w is the dial over p."""
    from metaplastic import ops

    gates = make("palimpsa_d").gates(inputs())
    a = ops.palimpsa(*gates)
    scaled = gates._replace(w=3 * gates.w, prior=3 * gates.prior)
    b = ops.palimpsa(*gates._replace(beta=gates.beta / 3))
    torch.testing.assert_close(ops.palimpsa(*scaled).output, b.output, rtol=0, atol=1e-13)
    assert (a.output - b.output).abs().max() > 1e-3


def test_errors():
    layer, model = make("palimpsa_d"), Nested()
    before = copy.deepcopy(model.state_dict())
    for call, error, words in [
        (lambda: plasticity.set_plasticity(layer, -0.1), ValueError, r"must be >= 0 .* got -0\.1"),
        (lambda: plasticity.set_plasticity(layer, math.nan), ValueError, "must be >= 0"),
        (lambda: plasticity.set_plasticity(layer, math.inf), ValueError, "finite"),
        (lambda: plasticity.set_plasticity(layer.half(), 1e5), ValueError, "finite torch.float16"),
        (lambda: plasticity.set_plasticity(layer, torch.ones(3)), ValueError, r"\[H\] = \[4\], got \[3\]"),
        (lambda: plasticity.set_plasticity(layer, torch.ones(1, 4)), ValueError, r"got \[1, 4\]"),
        (lambda: plasticity.set_plasticity(layer, [1.0] * 4), ValueError, "one entry per layer, 1, got 4"),
        (lambda: plasticity.set_plasticity(layer, "high"), TypeError, "value must be numbers, got the string 'high'"),
        (lambda: plasticity.set_plasticity(layer, None), TypeError, "a number or a tensor"),
        (lambda: plasticity.set_plasticity(model, [1.0, -1.0]), ValueError, "layer 'inner.stack.2'"),
        (lambda: plasticity.set_plasticity(model, 1.0, layers=["inner.stack.1"]), ValueError, "known: 'inner.stack.0'"),
        (lambda: plasticity.set_plasticity(model, {"x": 1.0}), ValueError, "unknown layer 'x'"),
        (lambda: plasticity.set_plasticity(model, 1.0, layers="inner.stack.0"), TypeError, "list of names"),
        (lambda: plasticity.set_plasticity(model, {NAMES[0]: 1.0}, layers=NAMES), ValueError, "layers must be None"),
        (lambda: plasticity.scale_plasticity(model, -1), ValueError, "factor must be a finite number >= 0, got -1"),
        (lambda: plasticity.draw_plasticity(model, 1, 0), ValueError, "low must be <= high"),
        (lambda: plasticity.draw_plasticity(model, 0, math.inf), ValueError, "both finite, got 0 and inf"),
        (lambda: plasticity.plasticity(make("mamba2")), ValueError, "must contain a metaplastic layer, got a Mamba2"),
        (lambda: plasticity.set_plasticity(nn.Linear(2, 2), 0), ValueError, "got a Linear"),
        (lambda: plasticity.metaplastic_form(layer), TypeError, "must be an ablation .*mamba2.*got PalimpsaD"),
        (lambda: plasticity.metaplastic_form(nn.Linear(2, 2)), TypeError, "got Linear"),
        (lambda: plasticity.metaplastic_form(make("mamba2"), prior=2.0), ValueError, "divide the plasticity"),
        (lambda: plasticity.metaplastic_form(make("mamba2"), rank=2), TypeError, "rank"),
        (lambda: plasticity.ablation_form(make("mamba2")), TypeError, "metaplastic layer with an ablation, got Mamba2"),
        (lambda: plasticity.ablation_form(make("palimpsa_d", prior=2.0)), ValueError, r"must be 1, got \[2\.0"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())
