"""Each checkpoint, and the final model, is a folder to use on its own and says what it is."""

import json
import re
import shutil

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from metaplastic.tasks.text import byte_tokenizer
from metaplastic.training import train
from metaplastic.training.card import state_bytes
from metaplastic.training.data import load_data
from metaplastic.training.generation import stream
from metaplastic.training.saved import load_model

FOLDERS = ("checkpoint-9", "checkpoint-10", "final")


def card_of(folder):
    return ModelCard.load(folder / "README.md")


def row(card, name):
    return re.search(rf"^\| {re.escape(name)} \| (.*) \|$", card.text, re.M)[1]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_is_used_on_its_own(undisturbed, tmp_path, capsys, name):
    folder = shutil.copytree(undisturbed / name, tmp_path / "alone")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == byte_tokenizer().get_vocab() and tokenizer.padding_side == "left"
    assert tokenizer("é")["input_ids"] == list("é".encode())
    text = stream(folder, "the memory", max_new_tokens=5, temperature=0)
    assert capsys.readouterr().out == f"the memory{text}\n"


@pytest.mark.parametrize("name", FOLDERS)
def test_the_code_of_the_card_runs(undisturbed, monkeypatch, capsys, name):
    monkeypatch.chdir(undisturbed / name)
    (code,) = re.findall(r"```python\n(.*?)```", card_of(undisturbed / name).text, re.S)
    exec(code, {})
    assert capsys.readouterr().out.startswith("The memory")


def test_the_card_says_what_the_model_is_and_how_it_was_trained(undisturbed, tiny):
    result = json.loads((undisturbed / "results.json").read_text())
    data = load_data(tiny(), byte_tokenizer())
    true_share = f"{100 * len(data.held_out) / (len(data.held_out) + len(data.train)):.1f}"
    for name in FOLDERS:
        card, step = card_of(undisturbed / name), 9 if name == "checkpoint-9" else 10
        assert card.data.to_dict() == {
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["metaplastic", "palimpsa_d"],
        }  # no licence is claimed
        parameters = sum(parameter.numel() for parameter in load_model(undisturbed / name).parameters())
        assert row(card, "parameters") == f"{parameters:,}" and parameters == result["measurements"]["parameters"]
        assert row(card, "layers") == "1 x palimpsa_d"
        assert row(card, "heads of palimpsa_d") == "2, key size 8, value size 8"
        assert row(card, "so far").startswith(f"step {step} of 10, ")
        share = re.fullmatch(r"8 documents of texts\d; (\d+\.\d)% of the tokens held out", row(card, "data"))[1]
        assert share == true_share and share != "20.0"
        assert row(card, "begun from") == "random weights"
        data = json.loads((undisturbed / "run.json").read_text())["data_sha256"]
        assert row(card, "SHA-256 of the text") == f"`{data}`"
        assert row(card, "batch") == "9 rows of 32 tokens"
        assert re.match("adamw_torch[a-z_]*, betas 0.9 and 0.95, weight decay 0.1", row(card, "optimiser"))
        assert row(card, "learning rate") == "0.003, 2 steps of warm-up, then cosine"
        assert (row(card, "seed"), row(card, "precision")) == ("0", "weights in float32, products in float32")
        assert f"torch {result['environment']['versions']['torch']}" in row(card, "versions")
        assert "Not stated" in card.text
        assert str(undisturbed.parent.parent) not in card.text and "/tmp" not in card.text
    assert f"{result['measurements']['tokens_seen']:,} tokens" in row(card_of(undisturbed / "final"), "so far")


def test_the_state_is_what_a_sequence_keeps(undisturbed):
    model = load_model(undisturbed)
    ids = model.dummy_inputs["input_ids"][:1, :3]
    cache = model(input_ids=ids, use_cache=True).cache
    kept = [each for layer in cache.layers for d in (layer.conv_states, layer.recurrent_states) for each in d.values()]
    assert state_bytes(model) == sum(each.numel() * each.element_size() for each in kept if each is not None) > 0
    assert (
        row(card_of(undisturbed / "final"), "state of one sequence") == f"{state_bytes(model):,} bytes, at any length"
    )


def test_the_held_out_loss_is_one_that_was_measured(undisturbed, tiny, tmp_path):
    history = json.loads((undisturbed / "results.json").read_text())["measurements"]["history"]
    losses = {entry["step"]: f"loss {entry['eval_loss']:.4f} nats" for entry in history if "eval_loss" in entry}
    assert losses[8] in card_of(undisturbed / "checkpoint-9").text
    assert "at step 8; not measured since, at step 9." in card_of(undisturbed / "checkpoint-9").text
    assert losses[10] in card_of(undisturbed / "final").text
    assert "not measured" not in card_of(undisturbed / "final").text
    train(tiny(steps=2, save_every=1, eval_every=0), tmp_path / "run")
    text = card_of(tmp_path / "run" / "checkpoint-2").text
    assert "Not measured so far." in text and "nats" not in text
    assert "nats" in card_of(tmp_path / "run" / "final").text  # measured at the end


def test_the_card_of_a_stream_and_of_a_model_that_goes_on(streamed, undisturbed, tmp_path):
    sizes = {"hidden_size": 128, "layers": 4, "heads": 4, "intermediate_size": 384}
    config = streamed(model=str(undisturbed), steps=1, bf16=True, **sizes)
    train(config, tmp_path / "run")
    card = card_of(tmp_path / "run" / "final")
    assert row(card, "begun from") == "the model undisturbed"
    assert re.fullmatch(
        r"dataset corpus\d, split train, column text, streamed; held out: the first 10 documents of train",
        row(card, "data"),
    )
    assert re.fullmatch("`[0-9a-f]{64}`", row(card, "SHA-256 of its first documents"))
    assert row(card, "precision") == "weights in float32, products in bfloat16"
    assert "datasets" not in card.data.to_dict()  # a local folder is no dataset of the hub
