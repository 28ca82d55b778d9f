"""The Python in docs/math.md, as a reader would paste it."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "math.md").read_text()


def test_the_code_runs(capsys):
    torch.manual_seed(0)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names = {}
    exec(block, names)
    assert "tensor(" in capsys.readouterr().out
    state, exact = names["state"], names["exact_state"]
    # What the page says beside it: the rules share the information, and Palimpsa's precision is the exact diagonal.
    torch.testing.assert_close(state.information, exact.information)
    torch.testing.assert_close(state.excess_precision, exact.excess_precision.diagonal(dim1=-2, dim2=-1))
    assert (names["mean"] - names["exact_mean"]).abs().max() > 1e-6
