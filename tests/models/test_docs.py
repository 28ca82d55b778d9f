"""docs/models.md: its code runs from top to bottom, and its table is what ``size`` says."""

import re
from pathlib import Path

import pytest
import torch

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticForCausalLM, size

from .test_size import PUBLISHED, published

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 12
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["several"].shape == (4, 48)
    assert names["merged"].lm_head.weight.shape == (50, 32)
    mixers = [block.mixer for block in MetaplasticForCausalLM(names["pair"]).model.layers]
    for mixer in mixers:
        memory = sum(x.nbytes for x in mixer.init_state(1).memory) // mixer.num_heads
        assert f"a head's memory takes {memory:,} bytes in either" in PAGE
    told = " and ".join(f"{sum(p.numel() for p in mixer.parameters()):,}" for mixer in mixers)
    assert f"the layers have {told} parameters" in PAGE


@pytest.mark.parametrize(("name", "millions"), [pair for pair in PUBLISHED if pair[0] in MIXERS])
def test_the_table_is_true(name, millions):
    config = published(name, millions)
    found, options = size(config), config.mixer_arguments(0)
    sizes = [config.hidden_size, config.num_hidden_layers, options["num_heads"], options.get("num_groups", "-")]
    sizes += [options["key_size"], options["value_size"], config.intermediate_size or "-"]
    assert (config.vocab_size, config.tie_word_embeddings) == (32000, True)
    row = [
        f"Palimpsa-{name[-1].upper()} {millions}M",
        *map(str, sizes),
        f"{found.parameters / 1e6:.1f} M",
        f"{found.state_bytes(torch.bfloat16) / 1e6:.1f} MB",
        f"{found.forward_flops / 1e9:.3f} G",
        f"{100 * found.memory_rule / found.forward_flops:.1f}%",
    ]
    assert f"| {' | '.join(row)} |" in PAGE


def test_the_command_gives_its_row():
    from typer.testing import CliRunner

    from metaplastic.cli import app

    (line,) = re.findall(r"^    metaplastic (size .*)$", PAGE, re.M)
    shown = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    found = size(published("palimpsa_m", 170))
    for value in (found.parameters, found.forward_flops, found.memory_rule):
        assert f"{value:,}" in shown.output
    assert "18.2 MB" in shown.output
