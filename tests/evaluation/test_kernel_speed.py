"""``bench kernels`` where there is no CUDA device: what it says, and what it would run."""

import contextlib

import pytest
import torch

from metaplastic import ops
from metaplastic.evaluation import kernel_page, kernel_speed
from metaplastic.evaluation.kernel_speed import FILTER, FILTER_SIDES, SHAPES, SIDES, Shape
from metaplastic.ops import dispatch, fla_tuning


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device():
    with pytest.raises(ValueError, match=r"measures a CUDA device, and there is none here \(bench ops"):
        next(kernel_speed.bench_kernels())


def test_parts_that_are_not_there():
    with pytest.raises(
        ValueError, match="only must be of shapes, decode, bayesian, one head, training step, got decoding"
    ):
        next(kernel_speed.bench_kernels(only=["shapes", "decoding"]))


def test_the_published_shapes():
    """Elements by hand, and every side is an operator's backend with inputs of its own."""
    assert SHAPES["760M-D"].elements == SHAPES["760M-D, one long text"].elements == 16 * 2048 * 16 * 96 * 192
    for _, op, backend in (*SIDES, *FILTER_SIDES):
        assert backend == "auto" or backend in dispatch.BACKENDS[op]
        inputs = kernel_speed.kernel_inputs(op, Shape(1, 5, 2, 3, 4), "cpu")
        assert getattr(ops, op)(**inputs).output.shape == (1, 5, 2, 4)
        gates = {"g", "prior", "prior_variance", "process_noise", "observation_noise"}
        assert {n for n, x in inputs.items() if x.dtype == torch.float32} == gates & set(inputs)


def test_ours_come_first_and_the_peers_add_to_them(monkeypatch):
    """In order, without a device: a run that is cut off keeps ours, and one name gathers both."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compiled = []
    monkeypatch.setattr(fla_tuning, "compile_all", compiled.extend)
    monkeypatch.setattr(fla_tuning, "quick", contextlib.nullcontext)
    for name, found in {
        "device": lambda: {"copied": 1.0},
        "bench_decode_step": lambda *of: {"ms": 2.0},
        "bench_shape": lambda shape, sides: {label: {"heads": shape.heads} for label, _, _ in sides},
        "bench_width": lambda width, side: float(width),
        "bench_training_step": lambda sizes, steps: {f"{m} ({b})": {"ms": 4.0 + len(b)} for m, b in steps},
        "_reason": lambda op, backend: None,
    }.items():
        monkeypatch.setattr(kernel_speed, name, found)
    names, measured = [], {}
    for name, found in kernel_speed.bench_kernels():
        names.append(name)
        measured[name] = measured.get(name, {}) | found
    assert names.index("peers") == len(SHAPES) + 7 and names[:1] == ["device"]
    assert all(set(measured[name]) == {label for label, _, _ in SIDES} for name in SHAPES)
    assert set(measured[FILTER]) == {label for label, _, _ in FILTER_SIDES}
    assert set(measured["one head"]) == {SIDES[0][0], SIDES[1][0]}
    assert measured["training step 170M-D"]["palimpsa over the fastest additive"] == 8 / 7
    wanted = {(op, s.heads, s.key_size, s.value_size) for _, op, _ in SIDES[1:] for s in SHAPES.values()}
    wanted |= {("delta", 4, 128, 128)}
    assert wanted <= {(c.operator, c.heads, c.key_size, c.value_size) for c in compiled if c.gradients}
    assert {c.key_size for c in compiled if not c.gradients} == set(kernel_speed.WIDTHS)
    few = [name for name, _ in kernel_speed.bench_kernels(only=["decode"], peers=False)]
    assert few == ["device", "decode 760M-D, 64 sequences"]
    rows = kernel_page.kernel_rows(measured["one head"])
    assert [row[0] for row in rows] == [SIDES[0][0], SIDES[1][0]] and "256 256" in rows[0][1]


def test_errors_of_two_heads():
    """The measurement itself, on the CPU, where auto is the chunked backend in bf16."""
    for op, size in (("palimpsa", 3), ("bayesian", 4)):
        inputs = kernel_speed.kernel_inputs(op, Shape(2, 5, 3, size, 4), "cpu")
        found = kernel_speed.errors(op, inputs, torch.randn(2, 5, 3, 4).bfloat16(), "auto")
        assert set(found) == {"output", *(f"gradient of {n}" for n in inputs)}
        assert 0 < found["output"] < 5e-3 and max(found.values()) < 1e-2, found


@pytest.mark.gpu
def test_a_small_shape_on_a_device():
    found = kernel_speed.bench_shape(Shape(2, 300, 2, 32, 48))
    ours = found["Palimpsa"]
    assert ours["20 runs equal"]
    assert all(error < 5e-3 for error in ours["errors"].values()), ours
    assert 0 < ours["forward floor share"] < 1
    assert 0 < ours["forward + backward floor share"] < 1
