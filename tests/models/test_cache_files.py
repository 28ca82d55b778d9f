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
    assert load_file(path)["layers.0.convolution"].shape[1] == (0 if kind == "attention" else 3)


@torch.no_grad()
def test_half_precision_and_conversion(tmp_path):
    model, ids = make("mixed").bfloat16(), tokens()
    cache = model(ids[:, :7], use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache.safetensors")
    expected = model(ids[:, 7:], cache=fork_cache(cache)).logits
    assert torch.equal(model(ids[:, 7:], cache=load_cache(path, model.config)).logits, expected)
    wide = load_cache(path, model.config, device="cpu", dtype=torch.float64)
    assert {x.dtype for x in states(wide) if x.is_floating_point()} == {torch.float64}
    model.double()(ids[:, 7:], cache=wide)
    narrow = load_cache(path, model.config, dtype=torch.float32)
    assert {x.dtype for x in states(narrow) if x.is_floating_point()} == {torch.float32}


@torch.no_grad()
def test_attention_of_another_window_or_base(tmp_path):
    """Same sizes, other meaning: neither a file nor a living cache is taken."""

    def attention(**options):
        return make("attention", mixer_options={"attention": {"num_heads": 2} | options})

    model, ids = attention(window=5), tokens()
    cache = model(ids, use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache")
    for other in ({"window": 8}, {}, {"window": 5, "rotary_base": None}):
        with pytest.raises(ValueError, match=r"holds states of mixers .'attention \(window=5, rotary_base=10000.0\)'"):
            load_cache(path, attention(**other).config)
        with pytest.raises(ValueError, match=r"states of another model: of mixers .'attention \(window=5"):
            attention(**other)(ids, cache=cache)
    assert load_cache(path, attention(window=5).config)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
def test_slots_and_positions_are_checked(tmp_path, window):
    model, ids = make("attention", mixer_options={"attention": {"num_heads": 2, "window": window}}), tokens()
    cache = model(ids, attention_mask=left_padding(ids, 3, 0, 1), use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache")
    load_cache(path, model.config)
    tensors, broken = load_file(path), tmp_path / "broken"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    positions = tensors["layers.1.positions"]
    for change, message in (
        ({"tokens_seen": "3"}, r"layers.0.keys is \[3, (12|4), 2, 8\], expected \[3, 3, 2, 8\]"),
        ({"layers.1.keys": tensors["layers.1.keys"][:, 1:]}, r"layers.1.keys is \[3, (11|3), 2, 8\]"),
        ({"layers.1.positions": positions - 40}, "layers.1.positions are not positions"),
        ({"layers.1.positions": positions.flip(1)}, "layers.1.positions are not positions"),
        ({"layers.1.positions": positions * 0}, "layers.1.positions are not positions"),
        ({"layers.1.values": tensors["layers.1.values"] / 0}, "layers.1.values holds NaN or infinity"),
        ({"layers.1.positions": positions + 2**62}, "layers.1.positions are not positions"),
    ):
        told = {name: x for name, x in change.items() if isinstance(x, str)}
        changed = {name: x.contiguous() for name, x in change.items() if not isinstance(x, str)}
        save_file(tensors | changed, broken, metadata | told)
        with pytest.raises(ValueError, match=message):
            load_cache(broken, model.config)


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
        ({"tokens_seen": "many"}, "metadata tokens_seen is 'many', expected a whole number below"),
        ({"tokens_seen": "-1"}, "metadata tokens_seen is '-1'"),
        ({"tokens_seen": "1" * 30}, "metadata tokens_seen is '1111"),
        ({"tokens_seen": "9" * 5000}, "metadata tokens_seen is '9999"),
        ({"tokens_seen": "٣"}, "metadata tokens_seen is"),
        ({"mixers": "palimpsa_d"}, "metadata mixers is 'palimpsa_d', expected a JSON list"),
        ({"mixers": "[1, 2]"}, "expected a JSON list of a mixer"),
        ({"mixers": "[" * 100_000}, "expected a JSON list of a mixer"),
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
    with pytest.raises(ValueError, match=r"layers.1.information is torch.int64, expected one of torch.float32, "):
        load_cache(broken, model.config)
    save_file(tensors | {"layers.1.information": tensors["layers.1.information"].bfloat16()}, broken, metadata)
    with pytest.raises(ValueError, match=r"layers.1.information is torch.bfloat16, expected one of torch.float32"):
        load_cache(broken, model.config)
    small = tensors["layers.0.convolution"].to(torch.float8_e4m3fn)
    save_file(tensors | {"layers.0.convolution": small}, broken, metadata)
    with pytest.raises(ValueError, match=r"layers.0.convolution is torch.float8_e4m3fn, expected one of"):
        load_cache(broken, model.config)
    save_file({}, broken, metadata)
    with pytest.raises(ValueError, match="layers.0.convolution is missing"):
        load_cache(broken, model.config)
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "nowhere", model.config)


@torch.no_grad()
def test_arguments(tmp_path):
    model = make()
    cache = model(tokens(), use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache.safetensors")
    for wrong, error, message in (
        ({"dtype": torch.int64}, ValueError, "dtype must be one of torch.float32, .* got torch.int64"),
        ({"dtype": torch.complex64}, ValueError, "dtype must be one of"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype or None, got 'float32'"),
        ({"config": model.config.to_dict()}, TypeError, "config must be a MetaplasticConfig, got dict"),
        ({"path": tmp_path}, ValueError, "path must be a file, got the folder"),
        ({"device": "somewhere", "path": tmp_path / "nowhere"}, ValueError, "device must be .* got 'somewhere'"),
        ({"device": 1.5}, ValueError, "device must be .* got 1.5"),
    ):
        with pytest.raises(error, match=message):
            load_cache(**({"path": path, "config": model.config} | wrong))
    with pytest.raises(ValueError, match="path must be a file, got the folder"):
        save_cache(cache, tmp_path)


@torch.no_grad()
def test_after_a_call_without_tokens(tmp_path):
    """What can be saved can be loaded."""
    model, ids = make(), tokens()
    cache = model(ids[:, :0], use_cache=True).cache
    loaded = load_cache(save_cache(cache, tmp_path / "cache"), model.config)
    assert int(loaded.tokens_seen) == 0
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, cache=loaded, max_new_tokens=3, do_sample=False), expected)


@torch.no_grad()
def test_permissions_links_and_calls_at_the_same_time(tmp_path, monkeypatch):
    cache = make()(tokens(), use_cache=True).cache
    path = save_cache(cache, tmp_path / "cache.safetensors")
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    link = tmp_path / "link"
    (tmp_path / "far").mkdir()
    link.symlink_to(tmp_path / "far" / "real.safetensors")
    assert save_cache(cache, link) == link
    assert link.is_symlink()
    assert load_file(tmp_path / "far" / "real.safetensors").keys() == load_file(path).keys()
    save_cache(cache, tmp_path / ("n" * 250))
    staged, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (staged.append(a), replace(a, b)))
    for _ in range(2):
        save_cache(cache, path)
    assert len(set(staged)) == 2
