"""docs/models.md: its code runs from top to bottom, and its table is what ``size`` says."""

import re
from pathlib import Path

import pytest
import torch

from metaplastic.layers import MIXERS
from metaplastic.models import size

from .test_size import PUBLISHED, published

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 6
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["several"].shape == (4, 48)
    assert names["merged"].lm_head.weight.shape == (50, 32)


@pytest.mark.parametrize(("name", "millions"), [pair for pair in PUBLISHED if pair[0] in MIXERS])
def test_the_table_is_true(name, millions):
    found = size(published(name, millions))
    row = [
        f"Palimpsa-{name[-1].upper()} {millions}M",
        f"{found.parameters / 1e6:.1f} M",
        f"{found.state_bytes(torch.bfloat16) / 1e6:.1f} MB",
        f"{found.forward_flops / 1e9:.3f} G",
        f"{100 * found.memory_rule / found.forward_flops:.1f}%",
    ]
    assert f"| {' | '.join(row)} |" in PAGE
