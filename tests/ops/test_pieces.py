"""All chunks at once: many groups of chunks equal one and the rule, in few operations whatever the length."""

import collections
import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from metaplastic.ops import accuracy
from metaplastic.ops.accuracy import Case
from metaplastic.ops.pieces import Pieces

OPS = ("additive", "delta")


def at_once(monkeypatch, op, elements, size=64):
    """As on an accelerator: chunks of ``size`` tokens, groups of as many as fit into arrays of ``elements``."""
    module = importlib.import_module(f"metaplastic.ops.{op}.chunked")
    monkeypatch.setattr(module, "budget" if op == "additive" else "_at_once", lambda *_: elements)
    monkeypatch.setattr(module, "chunk_size", lambda *_: size)
    return module


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("most", [1, 2, 13, 1000])
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2, length=70, decay="mixed", key_size=5, value_size=3),
        Case(batch=1, length=64, decay="mixed", key_size=4, value_size=6, final=False),
        Case(batch=2, length=65, decay="uneven", key_size=4, value_size=6, initial=False),
        Case(batch=3, length=1, key_size=4, value_size=6),
        Case(batch=1, length=75, offsets=(0, 3, 3, 36, 37, 53, 69), decay="mixed", key_size=4, value_size=6),
        Case(batch=1, length=40, offsets=(0, 0, 40), decay="none", key_size=4, value_size=6, initial=False),
        Case(batch=1, length=5, offsets=(0, 0), key_size=4, value_size=6),
        Case(batch=1, length=330, offsets=(0, 330, 330), decay="mixed", key_size=2, value_size=3),  # places in blocks
        Case(batch=1, length=330, offsets=(0, 20, 330), decay="mixed", key_size=2, value_size=3),
        Case(batch=2, length=37, decay="per key", key_size=4, value_size=6),
        Case(batch=1, length=75, offsets=(0, 3, 3, 36, 37, 53, 69), decay="per key", key_size=4, value_size=6),
    ],
    ids=str,
)
def test_groups_of_chunks(op, most, case, monkeypatch):
    """Chunks of 16 in groups of one, two, thirteen and all: outputs, states and every gradient are the rule's."""
    module = at_once(monkeypatch, op, 0, 16)
    kind, seen = module.Pieces, []

    def pieces(batch, length, offsets, size, _, device):
        seen.append(kind(batch, length, offsets, size, most, device))
        return seen[-1]

    monkeypatch.setattr(module, "Pieces", pieces)
    errors = accuracy.measure(op, "chunked", case, torch.float64)
    assert not accuracy.failures(op, "chunked", errors, torch.float64), errors
    assert {f"gradient of {x}" for x in ("q", "k", "v", "g")} <= set(errors) and seen
    for p in seen:
        for group in p.groups():
            assert sum(group.counts) <= max(most, group.counts[0])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(op, dtype, monkeypatch):
    at_once(monkeypatch, op, 1 << 26)  # five chunks of 64, as on an accelerator
    for case in (Case(length=300, decay="uneven"), Case(batch=1, length=300, offsets=(0, 0, 130, 131, 280))):
        errors = accuracy.measure(op, "chunked", case, dtype)
        assert not accuracy.failures(op, "chunked", errors, dtype), errors


class Count(TorchDispatchMode):
    """Counts operations that compute or copy: each is at least one kernel on an accelerator."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or "empty" in str(func) or "unsafe_view" in str(func)):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("op", "form", "forward", "backward"),
    [
        ("additive", "dense", 60, 130),
        ("additive", "packed", 120, 200),
        ("additive", "per key", 75, 165),
        ("delta", "dense", 110, 180),
        ("delta", "packed", 160, 230),
        ("delta", "per key", 210, 280),
    ],
)
def test_few_operations(op, form, forward, backward, monkeypatch):
    """What a layer launches on an accelerator at 2048 tokens: for each of 32 places (128 per key) two at most, and a
    constant. One chunk after another it was a thousand and more."""
    length, heads, keys, values = 2048, 1, 4, 4
    per_key = form == "per key"
    module = at_once(monkeypatch, op, 1 << 26, 16 if per_key else 64)
    inputs = [torch.randn(1, length, heads, size) for size in (keys, keys, values)]
    inputs += [torch.rand(1, length, heads)] if op == "delta" else []
    inputs += [-torch.rand(1, length, heads, keys) if per_key else -torch.rand(1, length, heads)]
    offsets = torch.tensor([0, 300, 1400, 1401, 2048]) if form == "packed" else None
    with Count() as there:
        output, state, *kept = module.apply._init_fn(*inputs, None, offsets, 1.0)
    with Count() as back:
        module._backward._init_fn(output, state, *inputs, None, *kept, offsets, 1.0)
    assert there.found.total() < forward, there.found
    assert back.found.total() < backward, back.found


def test_pieces_know_their_places():
    """Longest first; the pieces at a place continue the first of those before, and put undoes take."""
    pieces = Pieces(1, 20, torch.tensor([0, 3, 3, 12, 17]), 4, 3, torch.device("cpu"))
    assert [group.counts for group in pieces.groups()] == [[3], [2, 1]]
    x = torch.arange(20.0).view(1, 20, 1, 1)
    first, second = (group.take(x, torch.float64)[:, 0, :, 0].tolist() for group in pieces.groups())
    assert first == [[3, 4, 5, 6], [12, 13, 14, 15], [0, 1, 2, 0]]
    assert second == [[7, 8, 9, 10], [16, 0, 0, 0], [11, 0, 0, 0]]
    out = torch.zeros(1, 20, 1, 1)
    for group in pieces.groups():
        group.put(out, group.take(x, torch.float64))
    assert out.flatten().tolist() == [*range(17), 0, 0, 0]
    states = torch.arange(4.0)
    assert pieces.ordered(states).tolist() == [2, 3, 0, 1]
    assert pieces.restored(pieces.ordered(states)).tolist() == states.tolist()


@pytest.mark.parametrize("places", [12, 13, 16, 31, 64, 127, 128])
@pytest.mark.parametrize("sequences", [1, 3])
def test_blocks_of_places_side_by_side(places, sequences):
    """The same recurrence as one place after another, forward and back, with decays of 0 and 1 in between."""
    torch.manual_seed(places)
    group = Pieces(sequences, places, None, 1, 10**6, torch.device("cpu")).groups()[0]
    assert group.in_blocks
    written, state = torch.randn(places * sequences, 2, 3, dtype=torch.float64), torch.randn(sequences, 2, 3).double()
    kept = torch.rand(places * sequences, 2, 1, dtype=torch.float64)
    kept[::5], kept[1::7] = 0, 1
    for scan in (group.scan, group.scan_back):
        fast, slow = state.clone(), state.clone()
        group.in_blocks = True
        found = scan(written, kept, fast)
        group.in_blocks = False
        torch.testing.assert_close(found, scan(written, kept, slow), rtol=0, atol=1e-12)
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


def test_walking_back_over_many_groups():
    """More groups than states that are kept: each comes with the state before it, and few are alive at once."""
    pieces = Pieces(1, 400, None, 1, 1, torch.device("cpu"))
    order = []
    for group, state in pieces.walk_back(torch.zeros(1), lambda group, state: state.add_(1)):
        order.append((group.first, state.item()))
        state.add_(7)  # what is yielded is the caller's
    assert order == [(n, float(n)) for n in reversed(range(400))]
