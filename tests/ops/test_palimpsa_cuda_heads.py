"""Some heads after the others in the CUDA backward pass, on the emulator of emulation.py."""

import pytest
import torch

from metaplastic.ops import accuracy
from metaplastic.ops.accuracy import Case

from .emulation import emulated, emulator, needs_compiler  # noqa: F401 (the first two are fixtures)
from .test_palimpsa_cuda_backward import KEYS, VALUES, cuda, errors

pytestmark = needs_compiler


def test_fewer_heads_at_once_where_that_takes_no_longer():
    assert cuda.heads_at_once(16, 16, 132, 11) == 8  # twice 128 blocks, not 176 and 80
    assert cuda.heads_at_once(80, 8, 132, 54) == 49  # three rounds and two
    assert cuda.heads_at_once(16, 16, 132, 7) == 16  # three rounds: rather all
    assert cuda.heads_at_once(16, 16, 132, 99) == 16
    assert cuda.heads_at_once(3, 2, 132, 0) == 3
    assert cuda.heads_at_once(0, 2, 132, 5) == 1


@pytest.mark.parametrize(("sequences", "launches"), [("together", 2), ("alone", 5)])
def test_heads_one_after_the_other(emulated, monkeypatch, sequences, launches):  # noqa: F811
    """Every head and sequence gets its own gradients, in whatever order and groups; states are made anew for each."""
    case = Case(length=130, batch=1, heads=3, key_size=KEYS, value_size=VALUES, offsets=(0, 5, 5, 40, 75, 124))
    made = accuracy.example("palimpsa", case, torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        made["g"].copy_(-torch.rand(1, 130, 3, generator=generator) * torch.tensor([1.5, 0.1, 4.0]))
    monkeypatch.setattr(accuracy, "example", lambda *_: made)
    monkeypatch.setattr(cuda, "heads_at_once", lambda *_: 2)
    if sequences == "alone":  # then all heads are done together, and a sequence of 5 tokens by itself
        monkeypatch.setattr(cuda, "GROUP", 1)
        monkeypatch.setattr(cuda, "STATES", 0)
    worst = errors(case, torch.bfloat16, norm=True)
    assert emulated.count("backward_tensor") == emulated.count("states") == launches
    assert max(worst.values()) < 5e-3, worst
