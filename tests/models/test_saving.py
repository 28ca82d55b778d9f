"""Weights: bitwise there and back whatever their values, dtype and number of files; nothing missing, nothing left."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticForCausalLM, MetaplasticModel

from .conftest import config, make, tokens


def same_bits(a, b):
    """Also of zeros with a sign and of values that are no numbers."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert x.dtype == y.dtype and x.shape == y.shape, name
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name


@torch.no_grad()
def odd_values(model):
    """Every tensor gets values that a careless loader would change: drawn anew, flushed, rounded or clamped."""
    for number, x in enumerate(model.state_dict().values()):
        tiny, huge = torch.finfo(x.dtype).smallest_normal, torch.finfo(x.dtype).max
        odd = torch.tensor([-0.0, tiny / 4, -tiny / 8, huge, -huge, 1e-4 * (number + 1), -30.0], dtype=x.dtype)
        x.add_(0.001 * (number % 7 + 1))
        x.view(-1)[: min(len(odd), x.numel())] = odd[: x.numel()].roll(number)[: x.numel()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_bitwise(kind, dtype, tied, tmp_path):
    model = make(kind, tie_word_embeddings=tied).to(dtype)
    odd_values(model)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    loaded = MetaplasticForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    same_bits(model.state_dict(), loaded.state_dict())
    loaded.save_pretrained(tmp_path / "again")
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_several_files(kind, tied, tmp_path):
    model = make(kind, tie_word_embeddings=tied)
    odd_values(model)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same_bits(model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())


def test_the_auto_classes(kind, tmp_path):
    model, ids = make(kind), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, MetaplasticForCausalLM)
    assert torch.equal(loaded(ids).logits, model(ids).logits)  # evaluation mode, as Hugging Face loads
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, MetaplasticModel)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert AutoConfig.from_pretrained(tmp_path).mixers == model.config.mixers
    for i in range(len(model.config.mixers)):
        a, b = loaded.config.mixer_arguments(i), model.config.mixer_arguments(i)
        assert {k: list(v) if isinstance(v, tuple) else v for k, v in b.items()} == a


def test_missing_and_unexpected_weights_are_errors(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    weights, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    gone = f"model.layers.0.mixer.{'o_proj' if kind == 'attention' else 'conv'}.weight"
    save_file({n: w for n, w in weights.items() if n != gone}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"does not fit .*1 missing keys: {gone}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(weights | {"model.extra": torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 unexpected keys: model.extra"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    path.write_bytes(b"half a file")
    with pytest.raises(Exception, match=r"(?i)header|safetensors|deserializ"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_missing_weight_is_drawn_and_its_neighbours_stay(kind, tmp_path):
    model = make(kind)
    odd_values(model)
    model.save_pretrained(tmp_path)
    weights, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    gone = f"model.layers.0.mixer.{'o_proj.weight' if kind == 'attention' else 'A_log'}"
    save_file({n: w for n, w in weights.items() if n != gone}, path, metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, strict=False, output_loading_info=True)
    assert set(info["missing_keys"]) == {gone}
    found, expected = loaded.state_dict(), model.state_dict()
    drawn = found.pop(gone)
    if kind == "attention":
        assert drawn.std() == pytest.approx(model.config.initializer_range, rel=0.25)
    else:
        assert ((drawn.exp() > 0.09) & (drawn.exp() < 1.01)).all()  # of the range in the options
    assert not torch.equal(drawn, expected.pop(gone))
    same_bits(found, expected)


@pytest.mark.parametrize("name", [n for n, m in MIXERS.items() if "prior_log" in m.no_weight_decay])
def test_a_loaded_prior_stays_constant(name, tmp_path):
    model = make(name)
    with torch.no_grad():
        model.model.layers[0].mixer.prior_log.fill_(0.3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    trained = {n for n, p in loaded.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad}
    assert loaded.model.layers[0].mixer.prior_log[0] == pytest.approx(0.3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_model_of_a_language_model(kind, tied, tmp_path):
    """Its output layer is left out; anything else that is left over is an error."""
    model, ids = make(kind, tie_word_embeddings=tied), tokens()
    model.save_pretrained(tmp_path)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.extra": torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 unexpected keys: .*extra"):
        AutoModel.from_pretrained(tmp_path)


def test_changes_to_the_configuration_while_loading(tmp_path):
    """Checked with the fields of the file, as if they had been written there."""
    model = make("mamba2")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mixer_options names 'mamba2', which no layer is: mixers are 'palimpsa_m'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, mixers="palimpsa_m")
    changes = {"mixers": "palimpsa_m", "mixer_options": {"palimpsa_m": model.config.mixer_options["mamba2"]}}
    with pytest.raises(ValueError, match="missing keys: .*b_scale"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **changes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, strict=False, **changes)
    assert loaded.config.mixers == ["palimpsa_m"] * 2
    assert isinstance(loaded.model.layers[0].mixer, MIXERS["palimpsa_m"])
    assert not AutoModelForCausalLM.from_pretrained(tmp_path, use_cache=False).config.use_cache
    with pytest.raises(ValueError, match="norm_eps must be a number > 0, got -1"):
        AutoModelForCausalLM.from_pretrained(tmp_path, norm_eps=-1)
    with pytest.raises(ValueError, match="num_hidden_layers is 3, got 2 names"):
        AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [53, 31])
def test_resized_embeddings(kind, tied, count, tmp_path):
    model = make(kind, tie_word_embeddings=tied)
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(count, mean_resizing=False)
    assert model.config.vocab_size == count
    kept, weight = min(count, 40), model.get_input_embeddings().weight
    assert torch.equal(weight[:kept], before[:kept])
    assert model.lm_head.weight.shape == (count, 16)
    assert (model.lm_head.weight is weight) == tied
    ids = tokens() % count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = model.train()(ids, labels=ids).loss
    first.backward()
    assert weight.grad.shape == weight.shape and model.lm_head.weight.grad.any()
    optimizer.step()
    assert model(ids, labels=ids).loss < first
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == count
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    assert loaded.generate(ids, max_new_tokens=2, pad_token_id=0).max() < count


def test_meta_device_and_initialisation(kind):
    with torch.device("meta"):
        model = MetaplasticForCausalLM(config(kind))
    assert all(p.is_meta for p in model.parameters())
    model = make(kind, initializer_range=0.02)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    for linear in linears:
        if (bound := getattr(linear, "uniform_range", None)) is not None:
            assert bound / 2 < linear.weight.detach().abs().max() <= bound
        elif linear.weight.numel() > 100:
            assert linear.weight.detach().std() == pytest.approx(0.02, rel=0.25)
        assert linear.bias is None or not linear.bias.any()
    assert model.model.embed_tokens.weight.detach().std() == pytest.approx(0.02, rel=0.2)
    for block in model.model.layers:
        assert not hasattr(block.mixer, "D") or torch.equal(block.mixer.D, torch.ones(2))
        assert not hasattr(block.mixer, "A_log") or (block.mixer.A_log.exp() < 1.01).all()
