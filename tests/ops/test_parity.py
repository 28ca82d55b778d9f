"""Rungs 2 and 3 of the numerics ladder: every backend against the token-by-token rule, outputs and all gradients."""

import importlib
import itertools

import pytest
import torch

from metaplastic.ops import accuracy, chunks, dispatch
from metaplastic.ops.accuracy import Case

PACKED = (0, 0, 1, 40, 40, 84)
PAIRS = [(op, b) for op in dispatch.BACKENDS for b in dispatch.on_device(op, "cpu") if b != "reference"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def here(op, backend):
    if (reason := dispatch.reason_against(op, backend, "cpu", torch.float32)) is not None:
        pytest.skip(f"{op}/{backend} {reason}")


def check(op, backend, case, dtype):
    here(op, backend)
    errors = accuracy.measure(op, backend, case, dtype)
    assert not accuracy.failures(op, backend, errors, dtype), errors
    assert {f"gradient of {x}" for x in ("q", "k", "g")} <= set(errors)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", accuracy.CASES, ids=str)
def test_profile(op, backend, case, dtype):
    """The very cases ``metaplastic doctor`` runs."""
    check(op, backend, case, dtype)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("initial", [False, True])
def test_lengths(op, backend, length, initial):
    check(op, backend, Case(length=length, initial=initial, decay="mixed"), torch.float64)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize(
    ("key_size", "value_size"), [(1, 1), (1, 7), (3, 2), (33, 17), (48, 96), (130, 5), (5, 200), (256, 256)]
)
def test_head_sizes(op, backend, key_size, value_size):
    check(op, backend, Case(batch=1, length=34, key_size=key_size, value_size=value_size), torch.float64)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 90), (0, 1, 2, 3), (0, 70, 70, 71), (0, 0, 64, 64, 89)], ids=str)
@pytest.mark.parametrize("initial", [False, True])
def test_packed(op, backend, offsets, initial):
    """Empty and one-token sequences, a tail beyond the last offset, no sequence at all."""
    check(op, backend, Case(batch=1, length=90, offsets=offsets, decay="mixed", initial=initial), torch.float64)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("decay", ["none", "mild", "mixed"])
def test_decays(op, backend, decay):
    check(op, backend, Case(length=150, decay=decay), torch.float64)


@pytest.mark.parametrize("op", ["additive", "delta", "bayesian"])
@pytest.mark.parametrize(
    "case", [Case(decay="per key", length=40), Case(decay="per key", batch=1, length=90, offsets=PACKED)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decay_per_key(op, case, dtype):
    check(op, "chunked", case, dtype)


def forms():
    """All combinations, of which an even number of choices is quick: any four of them meet in every way with each
    number of groups. In float32 half of those, where any two do."""
    for groups, *chosen in itertools.product([0, 1, 3], *[[False, True]] * 5):
        per_key, noise_per_key, rotation, packed, initial = chosen
        marks = () if sum(chosen) % 2 == 0 else (pytest.mark.slow,)
        both = bool(marks) or (per_key + noise_per_key + packed) % 2 == 0
        case = Case(
            batch=1 if packed else 2, length=90, key_size=6, value_size=6, decay="per key" if per_key else "mixed",
            offsets=PACKED if packed else None, initial=initial, noise_groups=groups, noise_per_key=noise_per_key,
            rotation=rotation,
        )  # fmt: skip
        yield pytest.param(case, [torch.float64, torch.float32] if both else [torch.float64], marks=marks)


@pytest.mark.parametrize(("case", "dtypes"), forms())
def test_every_form_of_the_filter(case, dtypes):
    """Dynamics, process noise, groups and rotations, dense and packed, with and without a state."""
    for dtype in dtypes:
        check("bayesian", "chunked", case, dtype)


@pytest.mark.parametrize("op", list(accuracy.OPERATORS))
@pytest.mark.parametrize("size", [1, 7, 64, 1000, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 16))])
def test_every_chunk_size(op, size, monkeypatch):
    """The chunk is a matter of speed alone."""
    seen = []
    module = importlib.import_module(f"metaplastic.ops.{op}.chunked")
    monkeypatch.setattr(module, "chunk_size", lambda *a, **b: seen.append(size) or size)
    for case in (Case(decay="mixed"), Case(batch=1, length=90, offsets=PACKED, decay="mixed")):
        check(op, "chunked", case, torch.float64)
    if op != "palimpsa":
        check(op, "chunked", Case(decay="per key", length=50), torch.float64)
    assert seen


def test_chunk_size_is_bounded():
    cpu = torch.device("cpu")
    assert chunks.chunk_size(1, cpu) == 64
    assert chunks.chunk_size(2**17, cpu) == 16
    assert chunks.chunk_size(2**40, cpu) == 1


@pytest.mark.parametrize("op", list(accuracy.OPERATORS))
def test_mixed_input_dtypes(op):
    """q in bf16 beside float32 and float16 inputs: the output has q's dtype, gradients have their inputs'."""
    for backend in [b for o, b in PAIRS if o == op]:
        here(op, backend)
        inputs = accuracy.example(op, Case(), torch.float32)
        for name, dtype in (("q", torch.bfloat16), ("k", torch.float16)):
            inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
        expected = accuracy.results(op, "reference", accuracy.as_reference(inputs))
        found = accuracy.results(op, backend, inputs)
        for name, reference in expected.items():
            assert (found[name] - reference).abs().max() <= 8e-3 * reference.abs().max(), name
        read = accuracy.OPERATORS[op][0](**inputs, backend=backend)
        assert read.output.dtype == torch.bfloat16
        assert read.variance.dtype == torch.float32
        assert all(s.dtype == torch.float32 for s in read.state)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_gradcheck(op, backend):
    here(op, backend)
    case = Case(batch=1, length=5, heads=1, key_size=2, value_size=2)
    inputs = accuracy.example(op, case, torch.float64)
    state_type = accuracy.OPERATORS[op][1]
    state = inputs.pop("initial_state")
    names = [n for n, x in inputs.items() if isinstance(x, torch.Tensor)]
    rest = {n: x for n, x in inputs.items() if n not in names}

    def run(*tensors):
        given = dict(zip(names, tensors, strict=False))
        read = accuracy.OPERATORS[op][0](
            **given, **rest, initial_state=state_type(*tensors[len(names) :]), backend=backend
        )
        return read.output, read.variance, *read.state

    assert torch.autograd.gradcheck(run, [inputs[n] for n in names] + list(state))


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_long_sequence_in_float32(op, backend):
    """65,537 tokens, weak decay: errors do not grow with the length."""
    here(op, backend)
    case = Case(batch=1, length=65_537, heads=1, key_size=4, value_size=4, decay="none", initial=False)
    inputs = accuracy.example(op, case, torch.float32)
    exact = {n: x.detach().double() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    with torch.no_grad():
        found = accuracy.OPERATORS[op][0](**inputs, backend=backend)
        expected = accuracy.OPERATORS[op][0](**exact, backend="chunked")
    scale = expected.output.abs().max()
    assert (found.output.double() - expected.output).abs().max() / scale < 1e-4


def test_tolerances_cover_every_backend():
    assert set(accuracy.TOLERANCES) == {(op, b) for op, entries in dispatch.BACKENDS.items() for b in entries}


def test_the_harness_sees_a_wrong_gradient(monkeypatch):
    """A backend that is wrong in one gradient fails: the comparison is not vacuous."""
    module = importlib.import_module("metaplastic.ops.additive.chunked")
    right = module._Chunk.backward

    def wrong(self, q, dy, ds):
        dq, dk, dv, dg = right(self, q, dy, ds)
        return dq, dk, dv, dg * 1.001

    monkeypatch.setattr(module._Chunk, "backward", wrong)
    errors = accuracy.measure("additive", "chunked", Case(), torch.float64)
    assert set(accuracy.failures("additive", "chunked", errors, torch.float64)) == {"gradient of g"}
