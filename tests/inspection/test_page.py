"""What the command writes: true numbers as JSON, a figure of the right cells, one page."""

import io
import json
import math
import os
import re
import sys

import pytest
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

from metaplastic import cli, inspection
from metaplastic.inspection import page
from metaplastic.layers import plasticity
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.tasks.text import byte_tokenizer


@pytest.fixture
def model():
    """Three mixers with different numbers of heads, one of them additive."""
    torch.manual_seed(0)
    options = {"palimpsa_d": {"num_heads": 2}, "mamba2": {"num_heads": 4}, "palimpsa_m": {"num_heads": 3}}
    for option in options.values():
        option |= {"key_size": 4, "value_size": 5}
    config = MetaplasticConfig(
        vocab_size=258, hidden_size=12, num_hidden_layers=3, mixers=list(options), mixer_options=options
    )
    return MetaplasticForCausalLM(config)


def test_reads_a_text_in_pieces_and_writes_what_it_saw(model, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_PIECE", 7)
    text = "the memory knows — how sure it is <b>"
    layers, index = inspection.inspect_text(model, byte_tokenizer(), text, tmp_path / "out", title="a <model>")
    ids = torch.tensor([list(text.encode())])
    expected = inspection.memories(model, ids)
    for a, b in zip(layers, expected, strict=True):
        assert (a.name, a.kind, a.tokens, a.note) == (b.name, b.kind, b.tokens, b.note)
        torch.testing.assert_close(a.window.median, b.window.median, rtol=1e-4, atol=0)
        if b.limit is not None:
            torch.testing.assert_close(a.limit, b.limit, rtol=1e-4, atol=0)
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["settings"] == {
        "model": "a <model>", "mixers": list(model.config.mixers), "tokens": ids.shape[1], "whole_text": True,
    }  # fmt: skip
    assert "command" in record["environment"] and record["seeds"] == []
    stored = record["measurements"]["layers"]
    assert stored[0]["limit"] == layers[0].limit.tolist()
    assert stored[1]["limit"] is None and stored[1]["note"] == "additive: no precision"
    assert len(stored[1]["window"]["median"]) == 4
    html = index.read_text()
    assert "a &lt;model&gt;" in html and "<model>" not in html
    head = html.split("<h2>Heads</h2>")[1].split("</thead>")[0]
    columns = re.findall("<th>(.*?)</th>", head)
    assert len(set(columns)) == 9 and columns[-1] == "window, upper quartile"
    assert f'<img alt="{inspection.CAPTION}"' in html
    assert "the whole text" in html and "additive: no precision" in html
    assert f" to {float(layers[0].limit.max()):.3g}, ratio " in html
    windows = layers[2].window.median
    assert f"<td>{windows.min():.3g} to {windows.max():.3g}</td>" in html
    assert f">{float(layers[2].limit[2]):.4g}<" in html
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_beginning_is_read_and_the_page_says_so(model, tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes(b"knows\xff" + b" " * 5000)
    for limit, tokens, whole in ((10, 10, False), (300, 300, False), (9000, 5008, True)):  # the bad byte becomes three
        layers, index = inspection.inspect_text(model, byte_tokenizer(), file, tmp_path, max_tokens=limit)
        settings = json.loads((tmp_path / "results.json").read_text())["settings"]
        assert (settings["tokens"], settings["whole_text"]) == (tokens, whole)
        assert {m.tokens for m in layers} == {tokens}
        assert ("beginning of a longer text" in index.read_text()) is not whole


def test_the_figure_has_every_head_in_its_cell(model):
    plasticity.set_plasticity(model, {"model.layers.0.mixer": torch.tensor([0.0, 1.0])})
    layers = inspection.memories(model, torch.randint(256, (1, 20)))
    drawing = inspection.figure(layers)
    limit, window = (axes.images[0].get_array().filled(math.nan) for axes in drawing.axes[:2])
    assert limit.shape == (2, 3) and window.shape == (3, 4)
    assert limit[0, 0] == -12 and limit[0, 1] == pytest.approx(math.log10(layers[0].limit[1]))
    assert math.isnan(limit[0, 2]) and limit[1].tolist() == pytest.approx(layers[2].limit.log10().tolist())
    assert window[1].tolist() == pytest.approx(layers[1].window.median.log10().tolist())
    drawing.savefig(io.BytesIO())  # warnings are errors
    assert [axes.get_ylabel() for axes in drawing.axes[2:]] == ["log10 of the limit", "log10 of N in tokens"]
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawing.axes[:2]]
    assert labels == [["0  PalimpsaD", "2  PalimpsaM"], ["0  PalimpsaD", "1  Mamba2", "2  PalimpsaM"]]


def test_a_model_without_any_precision_still_draws(model):
    layers = inspection.memories(model, torch.randint(256, (1, 20)))[1:2]
    inspection.figure(layers).savefig(io.BytesIO())
    row = inspection.summary_row(layers[0])
    windows = layers[0].window.median
    assert row[2:] == ["additive: no precision", f"{windows.min():.3g} to {windows.max():.3g}"]


def test_json_has_no_infinity(model):
    with torch.no_grad():
        model.model.layers[0].mixer.A_log.fill_(-math.inf)
    layers = inspection.memories(model, torch.randint(256, (1, 20)))
    stored = inspection.as_dict(layers[0])
    assert stored["window"]["median"] == [None, None]
    json.dumps(stored, allow_nan=False)
    inspection.figure(layers).savefig(io.BytesIO())


def test_errors(model, tmp_path):
    with pytest.raises(ValueError, match="at least one token"):
        inspection.inspect_text(model, byte_tokenizer(), "", tmp_path)
    with pytest.raises(ValueError, match="max_tokens must be >= 1, got 0"):
        inspection.inspect_text(model, byte_tokenizer(), "a", tmp_path, max_tokens=0)
    with pytest.raises(FileNotFoundError):
        inspection.inspect_text(model, byte_tokenizer(), tmp_path / "missing.txt", tmp_path)


def test_the_command(model, tmp_path, monkeypatch):
    """The verb finds a saved model and its tokenizer, reads, writes, prints; its mistakes are one line each."""
    verbosity = transformers_logging.get_verbosity()
    monkeypatch.setattr(cli, "console", Console(width=120))
    monkeypatch.setattr(sys, "argv", ["metaplastic", "inspect"])
    for name in ("DATASETS_VERBOSITY", "HF_DATASETS_DISABLE_PROGRESS_BARS"):  # what the command sets, undone here
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    model.save_pretrained(tmp_path / "saved")
    byte_tokenizer().save_pretrained(tmp_path / "saved")
    (tmp_path / "a.txt").write_text("the memory knows")
    run = CliRunner().invoke
    out = ["--output", str(tmp_path / "out")]
    try:
        for source in ([str(tmp_path / "a.txt")], ["--text", "the memory knows"]):
            result = run(cli.app, ["inspect", str(tmp_path / "saved"), *source, *out])
            assert result.exit_code == 0, result.output
            assert "PalimpsaM" in result.output and "additive: no precision" in result.output
            assert "median over tokens, least to largest head" in " ".join(result.output.split())
            record = json.loads((tmp_path / "out" / "results.json").read_text())
            assert record["settings"]["model"] == "saved" and record["settings"]["tokens"] == 16
        for source in ([], [str(tmp_path / "a.txt"), "--text", "b"]):
            result = run(cli.app, ["inspect", str(tmp_path / "saved"), *source, *out])
            assert isinstance(result.exception, ValueError) and "one of the two" in str(result.exception)
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
