"""Caches in files: bitwise there and back, whole or not at all, and clear errors for anything else."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from metaplastic.models import fork_cache, load_cache, save_cache

from .conftest import OPTIONS, config, greedy, left_padding, make, states, tokens


@torch.no_grad()
def test_generating_from_a_file_is_generating_from_the_whole_text(kind, tmp_path):
    model, ids = make(kind), tokens()
    mask = left_padding(ids, 2)
    cache = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True).cache
    path = save_cache(cache, tmp_path / "story.safetensors")
    loaded = load_cache(path, model.config)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(states(cache), states(loaded), strict=True))
    assert int(loaded.tokens_seen) == 7
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, cache=loaded, **options), greedy(model, ids, 5, mask))
    with safe_open(path, "pt") as file:
        assert file.metadata()["tokens_seen"] == "7"
        assert file.metadata()["format"] == "metaplastic cache 1"
        assert set(load_file(path)) == set(file.keys())
    assert load_file(path)["layers.0.convolution"].shape[1] == 3


@torch.no_grad()
def test_half_precision_and_conversion(tmp_path):
    model, ids = make("mixed").bfloat16(), tokens()
    cache = model(ids[:, :7], use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache.safetensors")
    expected = model(ids[:, 7:], cache=fork_cache(cache)).logits
    assert torch.equal(model(ids[:, 7:], cache=load_cache(path, model.config)).logits, expected)
    wide = load_cache(path, model.config, device="cpu", dtype=torch.float64)
    assert {x.dtype for x in states(wide)} == {torch.float64}
    model.double()(ids[:, 7:], cache=wide)
    narrow = load_cache(path, model.config, dtype=torch.float32)
    assert {x.dtype for x in states(narrow)} == {torch.float32}


@torch.no_grad()
def test_a_convolution_of_one(tmp_path):
    model = make(mixer_options={"palimpsa_d": {"num_heads": 2, "conv_size": 1}})
    cache = model(tokens(), use_cache=True).cache
    loaded = load_cache(save_cache(cache, tmp_path / "cache"), model.config)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), states(loaded), strict=True))


@torch.no_grad()
def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    model, ids = make(), tokens()
    cache = model(ids, use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache.safetensors")
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            save_cache(model(ids[:, :3], use_cache=True).cache, path)
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]
    cache.reset()
    with pytest.raises(ValueError, match="cache has seen no token"):
        save_cache(cache, path)


@torch.no_grad()
def test_layers_that_do_not_fit(tmp_path):
    model, ids = make(), tokens()
    path = save_cache(model(ids, use_cache=True).cache, tmp_path / "cache.safetensors")
    two_heads = {"num_heads": 2} | OPTIONS["palimpsa_d"]
    for other, message in (
        (
            config("palimpsa_d_additive"),
            r"of mixers .'palimpsa_d', 'palimpsa_d'., expected .'palimpsa_d_add",
        ),
        (config(num_hidden_layers=3, mixers="palimpsa_d"), "holds states of mixers"),
        (config(hidden_size=24), r"layers.0.convolution is \[3, 3, 48\], expected \[3, 3, 72\]"),
        (config(mixer_options={"palimpsa_d": two_heads | {"conv_size": 2}}), r"convolution is \[3, 3, 48\]"),
        (
            config(mixer_options={"palimpsa_d": {"num_heads": 4, "key_size": 4, "value_size": 4}}),
            r"layers.0.information is \[3, 2, 8, 8\], expected \[3, 4, 4, 4\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_cache(path, other)


@torch.no_grad()
def test_files_that_are_not_ours(tmp_path):
    model, ids = make(), tokens()
    path = save_cache(model(ids, use_cache=True).cache, tmp_path / "cache.safetensors")
    data, tensors = path.read_bytes(), load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    broken = tmp_path / "broken.safetensors"
    for content in (b"", b"half", data[: len(data) // 2], data[:-1], b"\xff" * 100):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"broken.safetensors is not a whole safetensors file"):
            load_cache(broken, model.config)
    for change, message in (
        ({"format": "something"}, "has format 'something', expected 'metaplastic cache 1'"),
        ({"tokens_seen": "many"}, "metadata tokens_seen is 'many', expected a whole number > 0"),
        ({"mixers": "palimpsa_d"}, "metadata mixers is 'palimpsa_d', expected a JSON list"),
    ):
        save_file(tensors, broken, metadata | change)
        with pytest.raises(ValueError, match=message):
            load_cache(broken, model.config)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="has format 'pt', expected"):
        load_cache(tmp_path / "model" / "model.safetensors", model.config)
    save_file({k: v for k, v in tensors.items() if k != "layers.1.information"}, broken, metadata)
    with pytest.raises(ValueError, match=r"layers.1.information is missing, expected \[3, 2, 8, 8\]"):
        load_cache(broken, model.config)
    save_file(tensors | {"layers.7.mean": torch.ones(3)}, broken, metadata)
    with pytest.raises(ValueError, match="unexpected layers.7.mean"):
        load_cache(broken, model.config)
    save_file(tensors | {"layers.1.information": tensors["layers.1.information"].long()}, broken, metadata)
    with pytest.raises(ValueError, match=r"layers.1.information is torch.int64, expected floating point"):
        load_cache(broken, model.config)
    save_file({}, broken, metadata)
    with pytest.raises(ValueError, match="layers.0.convolution is missing"):
        load_cache(broken, model.config)
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "nowhere", model.config)
