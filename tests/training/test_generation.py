import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from metaplastic.training.generation import stream


@pytest.mark.parametrize("prompt", ["the memory", "é 😀 日本", "spells <|endoftext|> out", " two\n\nlines ", "x" * 100])
def test_greedy_text_is_that_of_generate_and_is_printed_as_it_comes(undisturbed, capsys, prompt):
    text = stream(undisturbed, prompt, max_new_tokens=12, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "final")
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "final")
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = ids
    for _ in range(12):  # without a cache
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1), expected)
    new = expected[0, ids.shape[1] :].tolist()
    new = new[: new.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in new else new
    assert text == tokenizer.decode(new, skip_special_tokens=True)
    assert capsys.readouterr().out == tokenizer.decode([*ids[0].tolist(), *new], skip_special_tokens=True) + "\n"


def test_no_prompt_begins_a_document(undisturbed, capsys):
    text = stream(undisturbed, "", max_new_tokens=8, temperature=0)
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "final")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "final")
    begin = torch.tensor([[tokenizer.eos_token_id]])
    expected = model.generate(begin, max_new_tokens=8, do_sample=False)[0, 1:]
    assert text == tokenizer.decode(expected, skip_special_tokens=True)


def test_sampling_depends_on_the_seed_alone(undisturbed):
    torch.manual_seed(1)
    first = stream(undisturbed, "the", max_new_tokens=20, seed=3)
    torch.manual_seed(2)
    assert stream(undisturbed, "the", max_new_tokens=20, seed=3) == first
    assert stream(undisturbed, "the", max_new_tokens=20, seed=4) != first


def test_sampling_is_restricted_by_temperature_and_top_p_only(undisturbed, monkeypatch):
    """Hugging Face would leave out all but the 50 likeliest tokens unasked."""
    seen = {}
    original = torch.multinomial

    def watch(probabilities, *args, **kwargs):
        seen["kept"] = int((probabilities > 0).sum())
        return original(probabilities, *args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", watch)
    stream(undisturbed, "the", max_new_tokens=1, temperature=100.0, top_p=1.0)
    assert seen["kept"] == 258
    stream(undisturbed, "the", max_new_tokens=1, temperature=100.0, top_p=0.5)
    assert 100 < seen["kept"] < 140


def test_bytes_that_are_no_text_are_replaced(undisturbed, capsys):
    given = b"caf\xe9".decode(errors="surrogateescape")  # as Python hands over the arguments of a command
    text = stream(undisturbed, given, max_new_tokens=4, temperature=0)
    assert text == stream(undisturbed, "caf\ufffd", max_new_tokens=4, temperature=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan),
        ("max_new_tokens", 0),
    ],
)  # fmt: skip
def test_bad_settings_are_named(undisturbed, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        stream(undisturbed, "the", **{name: value})


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model: .*nowhere does not exist"):
        stream(tmp_path / "nowhere", "the")
