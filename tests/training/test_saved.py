import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from metaplastic.training.generation import stream
from metaplastic.training.saved import find_model, load_model, load_tokenizer


def test_a_run_is_its_final_model_then_its_last_checkpoint(undisturbed):
    assert find_model(undisturbed) == undisturbed / "final"
    assert find_model(undisturbed / "final") == undisturbed / "final"
    assert find_model(undisturbed / "checkpoint-9") == undisturbed / "checkpoint-9"
    shutil.rmtree(undisturbed / "final")
    assert find_model(str(undisturbed)) == undisturbed / "checkpoint-10"
    shutil.rmtree(undisturbed / "checkpoint-10")
    assert find_model(undisturbed) == undisturbed / "checkpoint-9"


def test_where_there_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model: .*nowhere does not exist, expected a saved model"):
        find_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"model: .* holds no model, expected a saved model"):
        find_model(tmp_path)


def test_a_model_is_read_in_float32(undisturbed, tmp_path):
    model = load_model(undisturbed)
    saved = load_file(undisturbed / "final" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    model.bfloat16().save_pretrained(tmp_path / "half")
    assert load_model(tmp_path / "half").dtype == torch.float32


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights, next(name for name in weights if "q_proj" in name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shorten(weights, name):
    weights[name] = weights[name][:3].contiguous()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: change_weights(f, lambda w, name: w.pop(name)), r"missing keys: .*q_proj"),
        (lambda f: change_weights(f, lambda w, name: w.update(bogus=torch.ones(1))), "unexpected keys: bogus"),
        (lambda f: change_weights(f, shorten), r"q_proj.weight is \[3, 16\], expected \[16, 16\]"),
        (lambda f: (f / "model.safetensors").write_bytes(b"nonsense"), "weights in .* cannot be read"),
        (lambda f: (f / "config.json").write_text(json.dumps({"model_type": "gpt2"})), "'gpt2' model, expected 'meta"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json names no model_type, expected 'metaplastic'"),
        (lambda f: (f / "config.json").write_text('{"model'), "config.json is no configuration of a model"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is no configuration of a model"),
    ],
    ids=["missing", "unexpected", "shape", "file", "kind", "empty", "cut", "list"],
)
def test_a_model_that_does_not_fit_is_an_error(undisturbed, damage, expected):
    damage(undisturbed / "final")
    with pytest.raises(ValueError, match=expected):
        load_model(undisturbed)


@pytest.mark.parametrize("content", ["{}", "{", "[]", ""])
def test_a_broken_tokenizer_is_named(undisturbed, content):
    (undisturbed / "final" / "tokenizer.json").write_text(content)
    with pytest.raises(OSError, match=r"tokenizer: got '.*final', expected 'bytes', a folder .*\(.+\)$") as error:
        load_tokenizer(undisturbed / "final")
    assert "\n" not in str(error.value)


def test_a_broken_configuration_is_not_blamed_on_the_tokenizer(undisturbed):
    (undisturbed / "final" / "config.json").write_text('{"model_type": "meta')
    with pytest.raises(ValueError, match=r"model: .*config.json is no configuration of a model"):
        stream(undisturbed, "the memory")
