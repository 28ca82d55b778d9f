"""The Python in docs/inspection.md, as a reader would paste it."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inspection.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_runs(block, capsys):
    exec(block, {})
    assert "tensor(" in capsys.readouterr().out


def test_there_are_some():
    assert len(BLOCKS) == 3
