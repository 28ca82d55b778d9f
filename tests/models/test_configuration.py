"""Configurations: every value is checked when it is given; errors name the argument, what came, what was expected."""

import pytest

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.ops.dispatch import BACKENDS

from .conftest import config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixers": "palimpsa"}, "unknown mixer 'palimpsa'; known: palimpsa_d"),
        ({"mixers": ["palimpsa_d"]}, "num_hidden_layers is 2, got 1"),
        ({"mixers": 3}, "mixers must be a mixer name, or a list of one name per layer, got 3"),
        ({"mixers": None}, "mixers must be .* got None"),
        ({"mixers": ["palimpsa_d", 3]}, r"mixers must be .* got \['palimpsa_d', 3\]"),
        (
            {"mixer_options": {"palimpsa_d": {"heads": 2}}},
            "unknown option 'heads' of mixer 'palimpsa_d'; known: num_heads",
        ),
        ({"mixer_options": {"mamba": {}}}, "unknown mixer 'mamba'"),
        ({"mixer_options": {"palimpsa_d_additive": {"prior": 1.0}}}, "unknown option 'prior'"),
        ({"mixer_options": []}, r"mixer_options must be a dictionary: .* got \[\]"),
        ({"mixer_options": {"palimpsa_d": 2}}, "mixer_options must be a dictionary: .* got {'palimpsa_d': 2}"),
        (
            {"mixer_options": {"palimpsa_d": {"backend": "numpy"}}},
            "backend of mixer 'palimpsa_d' must be one of 'auto', .*'reference'.*, got 'numpy'",
        ),
        (
            {"mixer_options": {"palimpsa_d": {"num_heads": 2}, "mamba2": {"num_heads": 2}}},
            "mixer_options names 'mamba2', which no layer is: mixers are 'palimpsa_d'",
        ),
        ({"mixer_options": {"palimpsa_d": {"decays": 2}}}, "unknown option 'decays'"),
        ({"mixer_options": {"palimpsa_d_additive": {"backend": "cpu"}}}, "must be one of .* got 'cpu'"),
        ({"hidden_sizes": 3}, "unknown configuration key 'hidden_sizes'; known: vocab_size"),
        ({"vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
        ({"hidden_size": "64"}, "hidden_size must be an integer >= 1, got '64'"),
        ({"hidden_size": None}, "hidden_size must be an integer >= 1, got None"),
        ({"hidden_size": 64.5}, "hidden_size must be an integer >= 1, got 64.5"),
        ({"hidden_size": True}, "hidden_size must be an integer >= 1, got True"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer >= 1, got '2'"),
        ({"intermediate_size": 0}, "intermediate_size must be an integer >= 1, or None for no MLP, got 0"),
        ({"intermediate_size": 24.0}, "intermediate_size must be an integer >= 1, or None for no MLP, got 24.0"),
        ({"norm_eps": "small"}, "norm_eps must be a number > 0, got 'small'"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number > 0, got nan"),
        ({"initializer_range": -1}, "initializer_range must be a number >= 0, got -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be True or False, got 'yes'"),
        ({"use_cache": None}, "use_cache must be True or False, got None"),
        ({"pad_token_id": "0"}, "pad_token_id must be an integer or None, got '0'"),
        (
            {"hidden_size": 16, "mixer_options": {"palimpsa_d": {"num_heads": 3}}},
            "num_heads of mixer 'palimpsa_d' must divide hidden_size = 16 where key_size and value_size are not both "
            "given, got 3",
        ),
        ({"mixer_options": {"palimpsa_d": {"num_heads": 3, "value_size": 5}}}, "must divide hidden_size = 16 .* got 3"),
        ({"mixer_options": {"palimpsa_d": {"num_heads": 32}}}, "must divide hidden_size = 16 .* got 32"),
        ({"mixer_options": {"palimpsa_d": {"num_heads": 0}}}, "num_heads of .* must be an integer >= 1, got 0"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id must be an integer, a list of integers or None, got \[1, '2'\]"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if kind.operator is not None])
def test_every_backend_of_a_mixer_is_accepted(name):
    for backend in ("auto", *BACKENDS[MIXERS[name].operator]):
        assert config(name, mixer_options={name: {"num_heads": 2, "backend": backend}})
    with pytest.raises(ValueError, match=f"backend of mixer {name!r} must be one of"):
        config(name, mixer_options={name: {"backend": "triton?"}})


def test_a_file_there_and_back(kind, tmp_path):
    first = config(kind, eos_token_id=[1, 2], norm_eps=1e-6)
    first.save_pretrained(tmp_path)
    second = MetaplasticConfig.from_pretrained(tmp_path)
    assert second.mixers == first.mixers
    second.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_sizes_of_heads_that_do_not_divide_are_given():
    sizes = {"num_heads": 3, "key_size": 5, "value_size": 7}
    made = config("mamba2", mixer_options={"mamba2": sizes})
    assert {name: made.mixer_arguments(0)[name] for name in sizes} == sizes
    made = config("mamba2", hidden_size=12, mixer_options={"mamba2": {"num_heads": 8, "key_size": 2}})
    assert made.mixer_arguments(0)["value_size"] == 3  # 2 * 12 / 8


def test_the_options_given_stay_the_callers():
    options = {"palimpsa_d": {"num_heads": 2}}
    made = config(mixer_options=options)
    made.mixer_arguments(0)
    made.mixer_options["palimpsa_d"]["num_heads"] = 4
    assert options == {"palimpsa_d": {"num_heads": 2}}


def test_fields_that_are_assigned_are_checked_by_the_model():
    changed = config("palimpsa_d", mixer_options=None)
    changed.mixers = "mamba2"
    model = MetaplasticForCausalLM(changed)
    assert changed.mixers == ["mamba2"] * 2
    assert isinstance(model.model.layers[1].mixer, MIXERS["mamba2"])
    changed.mixers = ["mamba2"]
    with pytest.raises(ValueError, match="num_hidden_layers is 2, got 1 names"):
        MetaplasticForCausalLM(changed)
    changed.mixers, changed.hidden_size = "mamba2", "16"
    with pytest.raises(ValueError, match="hidden_size must be an integer >= 1, got '16'"):
        MetaplasticForCausalLM(changed)
