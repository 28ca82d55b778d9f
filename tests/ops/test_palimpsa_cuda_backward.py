"""The CUDA backward pass on the emulator of emulation.py: the kernels' own sources, on the CPU."""

import importlib
import math

import pytest
import torch

from metaplastic.ops import accuracy, nvrtc
from metaplastic.ops.accuracy import Case
from metaplastic.ops.palimpsa.cuda import layout, problem, walks

from .emulation import emulated, emulator, needs_compiler  # noqa: F401 (the first two are fixtures)

states = importlib.import_module("metaplastic.ops.palimpsa.cuda.states")
cuda = importlib.import_module("metaplastic.ops.palimpsa.cuda.backward")  # the package's `backward` is the function
NAMES = ("q", "k", "w", "beta", "g", "prior")
pytestmark = needs_compiler


def errors(case, dtype, *, variance=False, final=True, norm=False):
    """Relative error of every gradient: of its largest element, or in the Euclidean norm."""
    inputs = accuracy.example("palimpsa", case, dtype)
    exact = accuracy.as_reference(inputs)
    read = accuracy.OPERATORS["palimpsa"][0](**exact, backend="reference")
    source = torch.Generator().manual_seed(1)
    d_output, d_variance, d_m, d_j = (
        torch.randn(x.shape, generator=source, dtype=torch.float64).bfloat16().double()
        for x in (read.output, read.variance, *read.state)
    )
    loss = (read.output * d_output).sum()
    if variance:
        loss = loss + (read.variance * d_variance).sum()
    if final:
        loss = loss + (read.state[0] * d_m).sum() + (read.state[1] * d_j).sum()
    leaves = [exact[n] for n in NAMES] + list(exact.get("initial_state") or ())
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    real = inputs["g"].dtype
    state = inputs.get("initial_state") or (None, None)
    offsets = None if case.offsets is None else torch.tensor(case.offsets)
    found = cuda.backward(
        d_output.to(dtype), d_variance.to(real) if variance else None,
        *((d.to(real) if final else None) for d in (d_m, d_j)),
        *(inputs[n] for n in NAMES), *state, offsets, case.scale,
    )  # fmt: skip
    size = torch.Tensor.norm if norm else lambda x: x.abs().max()
    return {  # NaN would pass as the largest of several
        name: (size(x.double() - y) / size(y).clamp(min=1e-30)).nan_to_num(nan=math.inf).item()
        for name, x, y in zip((*NAMES, "M", "J"), found, expected, strict=False)
        if y.numel()
    }


@pytest.mark.parametrize(
    ("dtype", "variance"), [(torch.float32, True), pytest.param(torch.float64, False, marks=pytest.mark.slow)]
)
def test_plain_kernel(emulated, dtype, variance):  # noqa: F811
    bound = accuracy.TOLERANCES["palimpsa", "chunked"][dtype].gradient
    for case in accuracy.CASES:
        worst = errors(case, dtype, variance=variance)
        assert max(worst.values()) < bound, (case, worst)
    assert "backward" in emulated


KEYS, VALUES = 24, 40  # padded to two blocks of 16 and three


@pytest.mark.parametrize("decay", ["none", "mild", "mixed"])
def test_tensor_core_kernel(emulated, decay):  # noqa: F811
    case = Case(length=70, batch=1, key_size=KEYS, value_size=VALUES, decay=decay)
    worst = errors(case, torch.bfloat16, norm=True)
    assert "backward_tensor" in emulated
    assert max(worst.values()) < 5e-3, worst


@pytest.mark.parametrize(
    ("parts", "groups", "stream", "cache"),
    [(2, 1, 0, 0), (1, 2, 1, 0), pytest.param(1, 1, 1, 1 << 30, marks=pytest.mark.slow)],
)
def test_several_blocks_of_keys_and_values(emulated, monkeypatch, parts, groups, stream, cache):  # noqa: F811
    """As for large heads: warps share the keys, sums run over blocks of values, gradients wait in the cache."""
    blocks = {"KEY_BLOCKS": 6 // parts // groups, "KEY_PARTS": parts}
    shape = {**blocks, "ROW_GROUPS": groups, "VALUE_BLOCKS": 2 // groups, "STREAM": stream}
    walk = walks.Walk("backward_tensor", 16 * groups, 0, 1, 6 * 2048, shape, 8)
    monkeypatch.setattr(walks, "tensor_walk", lambda *_: walk)
    monkeypatch.setattr(cuda, "CACHE", cache)  # states before every 16th token, or every 8th
    case = Case(length=70, batch=1, key_size=96 // groups, value_size=32, decay="mixed")
    worst = errors(case, torch.bfloat16, norm=True)
    assert "backward_tensor" in emulated
    assert max(worst.values()) < 5e-3, worst


def test_tensor_core_kernel_packed_without_states(emulated):  # noqa: F811
    offsets = (0, 0, 1, 40, 40, 144)
    case = Case(length=150, batch=1, key_size=KEYS, value_size=VALUES, decay="mixed", offsets=offsets, initial=False)
    worst = errors(case, torch.bfloat16, final=False, norm=True)
    assert "backward_tensor" in emulated
    assert max(worst.values()) < 5e-3, worst


def test_every_strength_of_decay(emulated):  # noqa: F811
    """Decays from near 1 to 0, alone and side by side, within the same tile of 8 tokens."""
    generator = torch.Generator().manual_seed(3)
    for strength in (0.1, 1.0, 3.0, 8.0, 1000.0):
        case = Case(length=24, batch=1, heads=1, key_size=KEYS, value_size=VALUES)
        made = accuracy.example("palimpsa", case, torch.bfloat16)
        with torch.no_grad():
            made["g"].copy_(-strength * torch.rand(made["g"].shape, generator=generator))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accuracy, "example", lambda *_, made=made: made)
            worst = errors(case, torch.bfloat16, norm=True)
        assert worst["prior"] < 1e-4, (strength, worst)  # summed before anything is rounded
        assert max(worst.values()) < 5e-3, (strength, worst)


@pytest.mark.parametrize(("decay", "bound"), [(-0.65, 3e-3), (-0.45, 5e-3)])  # done carefully, and just not
def test_many_decays_that_are_not_strong(emulated, monkeypatch, decay, bound):  # noqa: F811
    """Each is near 1, together over a tile of 8 tokens they are not."""
    case = Case(length=128, batch=1, heads=1, key_size=KEYS, value_size=VALUES, initial=False)
    made = accuracy.example("palimpsa", case, torch.bfloat16)
    with torch.no_grad():
        made["g"].fill_(decay)
    monkeypatch.setattr(accuracy, "example", lambda *_: made)
    worst = errors(case, torch.bfloat16, final=False, norm=True)
    assert worst["g"] < bound, worst


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_side_by_side_change_nothing(emulated, monkeypatch, dtype):  # noqa: F811
    case = Case(length=200, batch=1, heads=1, decay="mild", key_size=KEYS, value_size=VALUES)
    whole = errors(case, dtype, norm=True)
    monkeypatch.setattr(layout, "span_length", lambda *_: 64)
    monkeypatch.setattr(walks, "LEAST_SPAN", 64)
    for budget in (1, 1 << 30):  # one span at a time, then all together
        monkeypatch.setattr(cuda, "BUDGET", budget)
        monkeypatch.setattr(layout, "_processors", lambda _, budget=budget: budget)
        emulated.clear()
        cut = errors(case, dtype, norm=True)
        assert emulated.count("backward" if dtype == torch.float32 else "backward_tensor") == (8 if budget == 1 else 2)
        assert max(cut.values()) < max(1e-5, 1.5 * max(whole.values())), (whole, cut)


def test_groups_fill_the_device():
    assert walks.group_size(16, 32, 132, 60, 40) == 16  # four rounds and one wait for the slowest block
    assert walks.group_size(16, 32, 132, 60, 11) == 8  # four rounds and two
    assert walks.group_size(16, 32, 132, 60, 2) == 2  # memory for no more
    assert walks.group_size(3, 1000, 132, 60, 0) == 1
    assert walks.group_size(8, 80, 132, 2048, 8) == 8
    assert walks.group_size(3, 60, 132, 2048, 3) == 3  # six quarters of a round, not one of 120 blocks and one of 60


def test_many_short_sequences_share_the_memory():
    """Their blocks' scratch is what counts: 100,000 sequences of 20 tokens would take 9 GB of it at once."""
    budget, slots = cuda.GROUP, 132
    states, scratch, blocks = 64 * 64 * 8 * 4, 23_000, 4
    assert walks.fitting(states, scratch, blocks, slots, budget) * (states + blocks * scratch) <= budget
    assert walks.fitting(75_500_000, 590_000, 16, slots, budget) == 21  # in turns: a scratch for those at work
    assert walks.fitting(167_772_160, 196_608, 80, slots, budget) == 8
    assert walks.fitting(1, 0, 0, slots, budget) == budget


@pytest.mark.parametrize(
    ("keys", "values", "sequences"), [(256, 16, 256), (48, 48, 1024), (16, 16, 2048), (96, 192, 64)]
)
def test_states_and_scratch_stay_within_the_budget(monkeypatch, keys, values, sequences):
    """Of 16 heads and sequences of 2048 tokens, whose states all together are more than that."""
    monkeypatch.setattr(layout, "_processors", lambda device: 132)
    shape = (sequences, 2048, 16)
    q, w = (torch.empty(*shape, size, dtype=torch.bfloat16) for size in (keys, values))  # nobody touches their memory
    inputs = (q, q, w, w, torch.empty(shape), torch.ones(16), None, None, None)
    walk, made = cuda._choose(*inputs, False)
    assert walk is not None and walk.name == "backward_tensor"
    backward = cuda._Backward(made, walk, w, None, 1.0)
    of_sequence = 2048 // 64 * 16 * made.shape[1] * made.shape[2] * 8
    items = backward.at_once * 16 * backward.blocks
    rooms = backward.slots if walks.turns_of(items, backward.slots, 2048) > 1 else items
    assert sequences * of_sequence > cuda.GROUP
    assert backward.together * of_sequence + rooms * backward.scratch <= cuda.GROUP


def test_a_device_with_less_shared_memory():
    """163 KB a block at compute capability 8.0; 99 KB at 8.6, where some sizes go token by token."""
    for room, without in ((163 << 10, []), (99 << 10, [(128, 64), (128, 128)])):
        found = {s: walks.tensor_walk(*s, 256, 2048, 108, room) for s in ((96, 192), (48, 48), (128, 64), (128, 128))}
        assert [sizes for sizes, walk in found.items() if walk is None] == without
        assert all(walk.shared_bytes <= room for walk in found.values() if walk)
        assert walks.plain_walk(128, torch.float32, False, room).shared_bytes <= room


def test_every_size_has_a_kernel_that_fits():
    for keys in range(16, 257, 16):
        for values in (16, 48, 64, 192, 256):
            found = walks.tensor_walks(keys, values)
            assert found, (keys, values)
            for walk in found:
                assert walk.shared_bytes <= walks.SHARED_BYTES
                assert walk.rows * walk.definitions["VALUE_BLOCKS"] == values
                assert walk.definitions["KEY_BLOCKS"] * walk.definitions["KEY_PARTS"] * walks.BLOCK == keys


@pytest.mark.parametrize(
    ("heads", "length", "expected"),
    [(16 * 16, 2048, (3, 1, 3, 1)), (8 * 16, 2048, (1, 3, 3, 1)), (16, 100, (1, 3, 3, 1)), (200, 70, (3, 1, 3, 1))],
)
def test_few_heads_get_more_warps_each(heads, length, expected):
    """With many heads a warp takes all keys of its values, and two blocks share a multiprocessor."""
    assert tuple(walks.tensor_walk(48, 48, heads, length, 132).definitions.values()) == (*expected, 0)


@pytest.mark.parametrize(("sequences", "groups"), [(1, 12), (2, 12), (3, 6), (4, 6), (5, 12), (16, 12)])
def test_states_take_half_the_values_where_that_fills_the_device(monkeypatch, sequences, groups):
    monkeypatch.setattr(layout, "_processors", lambda device: 132)
    q = torch.zeros(sequences, 1, 16, 96, dtype=torch.bfloat16)
    w, g = torch.zeros(sequences, 1, 16, 192, dtype=torch.bfloat16), torch.zeros(sequences, 1, 16)
    made = problem.prepare(q, q, w, w, g, g[0, 0], None, None, None)
    assert states._layout(made, sequences).definitions["ROW_GROUPS"] == groups


def test_blocks_of_slow_heads_start_first(emulated, monkeypatch):  # noqa: F811
    """In whatever order, every head and sequence gets its own gradients; of two sequences and all of their pieces."""
    case = Case(length=80, batch=2, heads=3, key_size=KEYS, value_size=VALUES)
    made, taken = accuracy.example("palimpsa", case, torch.bfloat16), []
    steep = torch.tensor([0.6, 0.0, 0.9])
    with torch.no_grad():
        made["g"].copy_(torch.where(torch.rand(2, 80, 3) < steep, -1.0, -0.1))

    def write_chunk_states(problem, pieces):
        found = states.write_chunk_states(problem, pieces)
        taken.append(found[0].tolist())
        return found

    monkeypatch.setattr(accuracy, "example", lambda *_: made)
    monkeypatch.setattr(cuda, "write_chunk_states", write_chunk_states)
    worst = errors(case, torch.bfloat16, norm=True)
    counts = (made["g"] < -0.7).sum((0, 1)).tolist()
    assert [ranks[:4] + ranks[5:] for ranks in taken] == [[2, 0, 1, counts[2], *counts]]
    assert max(worst.values()) < 5e-3, worst


def test_sizes_without_a_kernel():
    assert walks.plain_walk(256, torch.float32, True) is not None
    assert walks.plain_walk(257, torch.float32, False) is None  # then the chunked backend takes over


@pytest.mark.parametrize(("turns", "heads", "initial"), [(1, 2, True), (2, 2, False), (8, 2, True), (8, 1, False)])
def test_spans_walked_in_turns(emulated, monkeypatch, turns, heads, initial):  # noqa: F811
    """Sequences that are longer, shorter and empty, and tokens of none, in whatever turns; and one block alone."""
    offsets = (0, 5, 5, 70, 270, 275) if heads > 1 else None
    shape = {"length": 280, "batch": 1, "heads": heads, "key_size": KEYS, "value_size": VALUES}
    monkeypatch.setattr(walks, "TURNS", turns)
    monkeypatch.setattr(walks, "MOST_ROUNDS", 100)
    monkeypatch.setattr(cuda, "ALIKE", 0)  # the one head is
    monkeypatch.setattr(layout, "LEAST_SPAN", 1000)
    case = Case(**shape, decay="mixed" if initial else "mild", offsets=offsets, initial=initial)
    worst = errors(case, torch.bfloat16, norm=True)
    assert "backward_tensor" in emulated
    assert max(worst.values()) < 5e-3, worst


@pytest.mark.parametrize(("decay", "alone"), [("mild", False), ("uneven", False), ("few", True)])
def test_heads_that_are_alike_take_no_turns(emulated, monkeypatch, decay, alone):  # noqa: F811
    """Then blocks of the first launch do everything, and those of the others nothing. ``few``: 4% of a head's tokens
    are steep, less than makes it another kind; ``alone``: sequences one after the other, whose states are made at once.
    """
    done, kernel = [], nvrtc.kernel

    def watched(folder, name, device, **definitions):
        run = kernel(folder, name, device, **definitions)

        def launch(blocks, *arguments, early=False):
            run(blocks, *arguments, early=early)
            if name == "backward_tensor":
                progress = [x for x in arguments if isinstance(x, torch.Tensor)][-1]
                done.append(progress[:blocks].tolist())

        return launch

    monkeypatch.setattr(nvrtc, "kernel", watched)
    monkeypatch.setattr(walks, "MOST_ROUNDS", 100)
    case = Case(length=300, batch=2, heads=3, key_size=KEYS, value_size=VALUES, decay="mild" if alone else decay)
    if alone:
        monkeypatch.setattr(cuda, "GROUP", 1)
        monkeypatch.setattr(walks, "turns_of", lambda *_: 3)
        made = accuracy.example("palimpsa", case, torch.bfloat16)
        with torch.no_grad():
            made["g"][:, ::25, 1] = -1.0
        monkeypatch.setattr(accuracy, "example", lambda *_: made)
    worst = errors(case, torch.bfloat16, norm=True)
    at_once, launches = (3, 6) if alone else (6, 3)
    assert done == ([[3] * 6, [4] * 6, [5] * 6] if decay == "uneven" else [[5] * at_once] * launches)
    assert max(worst.values()) < 5e-3, worst


def test_sequences_one_after_the_other(emulated, monkeypatch):  # noqa: F811
    """Where there is memory for the states of one at a time: each is a launch, and gets its own gradients."""
    monkeypatch.setattr(cuda, "GROUP", 1)
    monkeypatch.setattr(cuda, "STATES", 0)
    offsets = (0, 5, 5, 40, 75, 124)
    case = Case(length=130, batch=1, heads=3, key_size=KEYS, value_size=VALUES, decay="uneven", offsets=offsets)
    worst = errors(case, torch.bfloat16, norm=True)
    assert emulated.count("backward_tensor") == emulated.count("states") == 5
    assert max(worst.values()) < 5e-3, worst
