"""A whole model from its ablation to its metaplastic form: same function at plasticity 0, saved as what it computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from metaplastic.layers import MIXERS
from metaplastic.layers.plasticity import metaplastic_form as layer_form
from metaplastic.layers.plasticity import plasticity, set_plasticity
from metaplastic.models import metaplastic_form
from metaplastic.models.plasticity import FORMS

from .conftest import make, same_numbers, tokens
from .test_saving import same_bits

MAMBA = {"mamba2": {"num_heads": 2, "num_groups": 2, "norm_groups": 1, "conv_bias": False, "dt_limit": (0.0, 0.5)}}


def test_which_mixers_have_a_form():
    assert FORMS == {"mamba2": "palimpsa_m", "palimpsa_d_additive": "palimpsa_d"}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_function_at_plasticity_zero(name, tied, tmp_path):
    model, ids = make(name, tie_word_embeddings=tied, intermediate_size=24), tokens()
    before, expected = copy.deepcopy(model.state_dict()), model(ids).logits
    new = metaplastic_form(model, plasticity=0)
    assert new.config.mixers == [FORMS[name]] * 2
    assert [type(block.mixer) for block in new.model.layers] == [MIXERS[FORMS[name]]] * 2
    same_numbers(new(ids).logits, expected)
    assert (new.lm_head.weight is new.model.embed_tokens.weight) == tied
    # The original is as it was, shares nothing, and every weight it has is in the new one.
    assert model.config.mixers == [name] * 2 and list(model.config.mixer_options) == [name]
    same_bits(model.state_dict(), before)
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in new.parameters()}
    same_bits(before, {n: new.state_dict()[n] for n in before})
    # Saved and loaded it is the same, and it goes on as any model.
    set_plasticity(new, 0.7)
    new.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    same_bits(new.state_dict(), loaded.state_dict())
    assert torch.equal(loaded(ids).logits, new(ids).logits)
    assert not torch.allclose(new(ids).logits, expected, atol=1e-3)
    assert loaded.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (3, 14)
    loaded.train()(ids, labels=ids).loss.backward()
    assert all(block.mixer.b_scale.grad.any() for block in loaded.model.layers)


def test_options_of_a_layer_are_kept_and_new_ones_written(tmp_path):
    model, ids = make("mamba2", mixer_options=MAMBA), tokens()
    new = metaplastic_form(model, plasticity=0, beta_rank=3, train_prior=True)
    assert new.config.mixer_options == {"palimpsa_m": MAMBA["mamba2"] | {"beta_rank": 3, "train_prior": True}}
    same_numbers(new(ids).logits, model(ids).logits)
    new.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.layers[0].mixer.beta_down.weight.shape == (3, 16)
    assert loaded.model.layers[0].mixer.prior_log.requires_grad
    assert torch.equal(loaded(ids).logits, new(ids).logits)


def test_some_layers():
    model, ids = make("mamba2", mixers="mamba2", num_hidden_layers=3), tokens()
    new = metaplastic_form(model, plasticity=0, layers=[1])
    assert new.config.mixers == ["mamba2", "palimpsa_m", "mamba2"]
    assert set(new.config.mixer_options) == {"mamba2", "palimpsa_m"}
    same_numbers(new(ids).logits, model(ids).logits)
    rest = metaplastic_form(new, plasticity=0)  # the options agree with those of the layer that was there
    assert rest.config.mixers == ["palimpsa_m"] * 3 and list(rest.config.mixer_options) == ["palimpsa_m"]
    same_numbers(rest(ids).logits, model(ids).logits)
    cache = new(ids[:, :5], use_cache=True).cache
    out = new(ids[:, 5:], cache=cache).logits
    same_numbers(out, new(ids, use_cache=False).logits[:, 5:])


def test_dials_drawn_or_given():
    model = make("mamba2")
    torch.manual_seed(3)
    for name, dial in plasticity(metaplastic_form(model)).items():  # as published: b_scale from U(0.1, 1)
        assert name.endswith("mixer")
        assert ((dial >= F.softplus(torch.tensor(0.1))) & (dial <= F.softplus(torch.tensor(1.0)))).all()
    heads = torch.tensor([0.25, 2.0])
    for dial in plasticity(metaplastic_form(model.bfloat16(), plasticity=heads)).values():
        torch.testing.assert_close(dial, heads, rtol=1e-2, atol=0)
    base = metaplastic_form(model.model, plasticity=1.0)  # without an output layer
    assert base.config.mixers == ["palimpsa_m"] * 2
    new = metaplastic_form(make("mamba2", hidden_size=64, initializer_range=0.02), plasticity=1.0)
    mixer = new.model.layers[0].mixer  # what is new is drawn as in a new model
    assert mixer.beta_down.weight.detach().std() == pytest.approx(0.02, rel=0.2)
    assert mixer.beta_up.weight.detach().abs().max() <= mixer.beta_up.uniform_range


def test_what_cannot_be_converted():
    model = make("mamba2")
    for call, message in (
        (lambda: metaplastic_form(make("palimpsa_m")), "must have a layer that is an ablation .*got .'palimpsa_m'"),
        (lambda: metaplastic_form(model, layers=[2]), r"layers must be .* some of \[0, 1\], got \[2\]"),
        (lambda: metaplastic_form(model, layers=[]), r"layers must be .*got \[\]"),
        (lambda: metaplastic_form(model, layers=1), "layers must be a list of indices .*got 1"),
        (lambda: metaplastic_form(model, layers="0"), "layers must be a list of indices .*got '0'"),
        (lambda: metaplastic_form(model, num_groups=2), "unknown option 'num_groups': .*not of 'mamba2'"),
        (lambda: metaplastic_form(model, rank=2), "unknown option 'rank'"),
        (lambda: metaplastic_form(model, plasticity=-1), "plasticity .* must be >= 0"),
        (lambda: metaplastic_form(model, prior=2.0), "prior must be 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="model must be a metaplastic language model, got Linear"):
        metaplastic_form(torch.nn.Linear(2, 2))
    options = {"mamba2": {"num_heads": 2}, "palimpsa_m": {"num_heads": 2, "num_groups": 2}}
    both = make(mixers=["mamba2", "palimpsa_m"], mixer_options=options)
    with pytest.raises(ValueError, match="'palimpsa_m' would have num_groups = 1, but .* with num_groups = 2"):
        metaplastic_form(both)


def test_a_model_that_is_not_its_configuration_is_not_saved(tmp_path):
    """Mamba2's and Palimpsa-D's weights have no names that would betray it at loading."""
    model = make("mamba2")
    model.model.layers[1].mixer = layer_form(model.model.layers[1].mixer, plasticity=0)
    for function in (model.save_pretrained, model.model.save_pretrained, lambda _: metaplastic_form(model)):
        with pytest.raises(ValueError, match="layer 1 is 'palimpsa_m', but config.mixers says 'mamba2'"):
            function(tmp_path)
    assert not list(tmp_path.iterdir())
    model.model.layers[1].mixer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="layer 1 is 'Linear'"):
        model.save_pretrained(tmp_path)
