"""``bench kernels`` where there is no CUDA device: what it says, what it would run, and its measurements with fakes."""

import contextlib
import functools
import json
from types import SimpleNamespace

import pytest
import torch

from metaplastic import cli_bench, ops, results
from metaplastic.evaluation import kernel_measures, kernel_page, kernel_speed
from metaplastic.evaluation.kernel_shapes import FILTER, FILTER_SIDES, MORE_FILTERS, SHAPES, SIDES, WIDTHS, Shape
from metaplastic.ops import dispatch, fla, fla_tuning
from metaplastic.rules import mesa

MESA = FILTER_SIDES[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device():
    with pytest.raises(ValueError, match=r"measures a CUDA device, and there is none here \(bench ops"):
        next(kernel_speed.bench_kernels())


def test_parts_that_are_not_there():
    with pytest.raises(
        ValueError,
        match="only must be of bayesian, decode, shapes, filter shapes, one head, training step, got decoding",
    ):
        next(kernel_speed.bench_kernels(only=["shapes", "decoding"]))


def test_the_published_shapes():
    """Elements by hand, and every side is an operator's backend, or MesaNet, with inputs of its own."""
    assert SHAPES["760M-D"].elements == SHAPES["760M-D, one long text"].elements == 16 * 2048 * 16 * 96 * 192
    for _, op, backend in (*SIDES, *FILTER_SIDES):
        inputs = kernel_speed.kernel_inputs(op, Shape(1, 5, 2, 4, 4), "cpu")
        if op != "mesa":
            assert backend == "auto" or backend in dispatch.BACKENDS[op]
            assert getattr(ops, op)(**inputs).output.shape == (1, 5, 2, 4)
        gates = {"g", "prior", "prior_variance", "process_noise", "observation_noise", "ridge"}
        gates |= {"beta"} if op == "mesa" else set()
        assert {n for n, x in inputs.items() if x.dtype == torch.float32} == gates & set(inputs)
    per_key = kernel_speed.kernel_inputs("bayesian", Shape(1, 5, 2, 3, 4, "per key"), "cpu")
    assert per_key["g"].shape == per_key["process_noise"].shape == (1, 5, 2, 3)
    assert ops.bayesian(**per_key).output.shape == (1, 5, 2, 4)
    assert [shape.decays for shape in MORE_FILTERS.values()] == ["per key", "mild"]


def test_what_mesanet_approximates():
    """All tokens side by side are the rule token by token."""
    inputs = {n: x.double() for n, x in kernel_speed.kernel_inputs("mesa", Shape(2, 9, 3, 4, 4), "cpu").items()}
    inputs["ridge"] = 0.5 + torch.rand(3, 4, dtype=torch.float64)
    inputs["g"] = 20 * inputs["g"]
    expected, _, _ = mesa.scan(**inputs)
    torch.testing.assert_close(kernel_measures.mesa_in_float64(**inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def fakes(monkeypatch):
    """``fakes(**functions)`` of the module; no device, and nothing that compiles. Calls that would be compiled."""
    compiled = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fla_tuning, "compile_all", lambda calls: compiled.append(list(calls)) or True)
    monkeypatch.setattr(fla_tuning, "quick", contextlib.nullcontext)

    def put(**functions):
        for name, function in functions.items():
            monkeypatch.setattr(kernel_speed, name, function)
        return compiled

    return put


MEASURED = {
    "device": lambda: {"copied": 1.0},
    "bench_decode_step": lambda *of: {"ms": 2.0},
    "bench_shape": lambda shape, sides: {
        label: {"heads": shape.heads, "forward ms": 1.0 + len(op), "forward + backward ms": 5.0, "extra peak GB": 0.0}
        for label, op, _ in sides
    },
    "bench_width": lambda width, side: float(width),
    "bench_training_step": lambda sizes, steps, compiled=False: {f"{m} ({b})": {"ms": 4.0 + len(b)} for m, b in steps},
    "_reason": lambda op, backend: None,
}


def test_what_matters_most_comes_first(fakes):
    """In order, without a device: a run that is cut off keeps the filter and its peers, then ours; a name adds up."""
    compiled = fakes(**MEASURED)
    names, measured = [], {}
    for name, found in kernel_speed.bench_kernels():
        names.append(name)
        measured[name] = measured.get(name, {}) | found
    decode = f"decode: {FILTER}, 64 sequences"
    assert names[:9] == ["device", FILTER, decode, "seconds", "peers", FILTER, FILTER, "seconds", names[8]]
    second = names.index("peers", 5)
    ours = {*SHAPES, *MORE_FILTERS, "decode 760M-D, 64 sequences", "one head", *kernel_speed.TRAINING}
    assert set(names[8:second]) == ours | {"seconds"}
    compiled_steps = {f"{name}, compiled" for name in kernel_speed.TRAINING}
    assert set(names[second:]) <= set(names[8:second]) | compiled_steps | {"peers"}
    parts = ["bayesian", "bayesian, peers", *kernel_speed.PARTS[1:]]
    parts += ["shapes, peers", "one head, peers", "training step, peers"]
    assert list(measured["seconds"]) == parts and all(0 <= x < 1 for x in measured["seconds"].values())
    assert set(measured["peers"]) == {
        "of bayesian compiled",
        f"of {', '.join(kernel_speed.PARTS[1:])} compiled",
        "tuning",
    }

    def sides(*labels):
        return {labels[0], *(x for label in labels[1:] for x in (label, f"{labels[0]} over {label}"))}

    assert all(set(measured[name]) == sides(*(label for label, _, _ in SIDES)) for name in SHAPES)
    assert set(measured[FILTER]) == sides(*(label for label, _, _ in FILTER_SIDES))
    assert measured[FILTER]["Bayesian Layer over " + MESA[0]] == {"forward": 9 / 5, "forward + backward": 1.0}
    assert set(measured["one head"]) == {SIDES[0][0], SIDES[1][0]}
    for name in ("training step 170M-D", "training step 170M-D, compiled"):
        assert measured[name]["palimpsa over the fastest additive"] == 8 / 7
    assert compiled[0] == [fla_tuning.Call(op, 16, 4, 128, 128, True) for op in ("delta", "mesa")]
    wanted = {(op, s.heads, s.key_size, s.value_size) for _, op, _ in SIDES[1:] for s in SHAPES.values()}
    assert wanted <= {(c.operator, c.heads, c.key_size, c.value_size) for c in compiled[1] if c.gradients}
    assert {c.key_size for c in compiled[1] if not c.gradients} == set(WIDTHS)
    assert len(set(compiled[1])) == len(compiled[1]) and len(compiled) == 2
    rows = kernel_page.kernel_rows(measured["one head"])
    assert [row[0] for row in rows] == [SIDES[0][0], SIDES[1][0]] and "256 256" in rows[0][1]


def test_each_part_can_be_run_alone(fakes):
    compiled = fakes(**MEASURED)

    def names(**options):
        return list(dict.fromkeys(name for name, _ in kernel_speed.bench_kernels(**options)))

    assert names(only=["decode"]) == ["device", "decode 760M-D, 64 sequences", "seconds"] and not compiled
    assert names(only=["filter shapes"]) == ["device", *MORE_FILTERS, "seconds"] and not compiled
    assert names(only=["bayesian"], peers=False)[-1] == "seconds" and not compiled
    assert names(only=["bayesian"])[-1] == "peers" and len(compiled) == 1
    first = next(iter(SHAPES))
    assert names(quick=True) == ["device", "decode 760M-D, 64 sequences", "seconds", first, "peers"]


def test_peers_that_do_not_compile_end_nothing(fakes, monkeypatch):
    """What they lack is said; ours go on."""

    def fails(calls):
        raise RuntimeError("2 of 2 processes that compile failed with [1, 1]")

    fakes(**MEASURED)
    monkeypatch.setattr(fla_tuning, "compile_all", fails)
    found = list(kernel_speed.bench_kernels(only=["bayesian", "shapes"]))
    assert [found for name, found in found if name == "peers"] == [
        {"of bayesian not run": "2 of 2 processes that compile failed with [1, 1]"},
        {"of shapes not run": "2 of 2 processes that compile failed with [1, 1]"},
    ]
    assert {*SHAPES, FILTER} <= {name for name, _ in found}


@pytest.fixture
def on_the_cpu(fakes, monkeypatch):
    """Measurements that really run, but for their time: the same milliseconds every time."""
    taken, called = iter([4.0, 10.0, 2.0, 8.0] * 3), iter([5.0, 12.0, 4.0, 8.0] * 3)
    inputs = functools.partial(kernel_speed.kernel_inputs, device="cpu")

    def timed(run):
        run()
        return next(taken)

    fakes(
        kernel_inputs=inputs,
        milliseconds=timed,
        host_milliseconds=lambda run: 0.5,
        called_milliseconds=lambda run: next(called),
        as_graph=lambda run: run,
        extra_memory=lambda both: len(both()) * 1e9,
        device=lambda: {"copied bytes per second": 1e9, "multiply-adds per second": 1e9},
        _reason=lambda op, backend: None,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        fla, "mesa", lambda **x: kernel_measures.mesa_in_float64(**{n: y.double() for n, y in x.items()}).bfloat16()
    )


def test_mesanet_beside_the_filter(on_the_cpu, tmp_path):
    """Times, memory, errors of everything, ratios; and all of it on the page."""
    shape, sides = Shape(2, 6, 2, 4, 4), (("Bayesian Layer", "bayesian", "auto"), MESA)
    measured = {"filter": kernel_speed.bench_shape(shape, sides[:1])}
    ours = measured["filter"]["Bayesian Layer"]
    assert ours["20 runs equal"] and ours["extra peak GB"] == 7 and "note" not in ours
    ((name, found),) = kernel_speed._beside("filter", shape, sides, measured)
    theirs = found[MESA[0]]
    assert theirs["forward ms"] == 2 and theirs["forward + backward ms"] == 8 and theirs["extra peak GB"] == 6
    ratios = {"forward": 2.0, "forward + backward": 1.25, "forward called": 1.25, "forward + backward called": 1.5}
    assert found["Bayesian Layer over " + MESA[0]] == ratios
    assert set(theirs["errors"]) == {"output", *(f"gradient of {n}" for n in ("q", "k", "g", "v", "beta", "ridge"))}
    assert max(theirs["errors"].values()) < 1e-2 and "30 steps of conjugate gradients" in theirs["note"]
    both = {name: measured[name] | found, "seconds": {"bayesian": 1.5}}
    record = results.record("bench kernels", both, seeds=[0], settings={})
    page = kernel_page.kernel_page(record, tmp_path).read_text()
    for words in (MESA[0], "2 / 8 ms, 6.00 GB extra", "forward 2, forward + backward 1.25", "lambda of 1", "1.5"):
        assert words in page, words


def test_a_peer_whose_backward_fails(on_the_cpu, monkeypatch):
    """Its forward counts, and why there is no more is said; ours must not fail."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise ValueError("out of shared memory\n/a/path")

    monkeypatch.setattr(fla, "mesa", lambda v, **x: Fails.apply(v))
    monkeypatch.setattr(ops, "bayesian", lambda v, backend, **x: ops.MemoryRead(Fails.apply(v), None, None))
    found = kernel_speed.bench_shape(Shape(1, 3, 2, 4, 4), [MESA])[MESA[0]]
    assert set(found) == {"forward ms", "forward host ms", "forward called ms", "note"}
    assert "ValueError: ['out of shared memory']" in found["note"]
    assert [row[0] for row in kernel_page.kernel_rows({MESA[0]: found})] == [
        MESA[0], "  the host takes", "  called again and again", "  note",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="out of shared memory"):
        kernel_speed.bench_shape(Shape(1, 3, 2, 4, 4), [("Bayesian Layer", "bayesian", "auto")])


def test_a_decode_step_beside_a_copy_of_its_states(on_the_cpu, monkeypatch):
    copied = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: copied.append(cat(parts)) or copied[-1])
    found = kernel_speed.bench_decode_step("bayesian", Shape(9, 9, 2, 4, 6), sequences=3)
    numbers = 3 * 2 * 4 * (6 + 4)
    assert copied[0].numel() == numbers and copied[0].dtype == torch.float32
    assert found["ms"] == 4 and found["copy of the states ms"] == 10 and found["over the copy"] == 0.4
    assert found["floor ms"] == pytest.approx(1e3 * 2 * 4 * numbers / 1e9)


def test_errors_of_two_heads():
    """The measurement itself, on the CPU, where auto is the chunked backend in bf16."""
    for op, size in (("palimpsa", 3), ("bayesian", 4)):
        inputs = kernel_speed.kernel_inputs(op, Shape(2, 5, 3, size, 4), "cpu")
        run, exact = (kernel_speed._function(op, backend) for backend in ("auto", "chunked"))
        found = kernel_measures.errors(run, exact, inputs, torch.randn(2, 5, 3, 4).bfloat16())
        assert set(found) == {"output", *(f"gradient of {n}" for n in inputs)}
        assert 0 < found["output"] < 5e-3 and max(found.values()) < 1e-2, found


@pytest.fixture
def slow_host(monkeypatch):
    """``slow_host("run")`` on a clock of its own: the host takes 1 ms to start a run and 20 us a sum, and hears after
    100 us that the device is done, which takes 0.4 ms for a run and 60 us for a sum."""
    now, line = [0.0], []  # what was started since the host last waited, and when
    device = {"sum": 60e-6, "run": 0.4e-3}

    def start(name, host=1e-3):
        now[0] += host
        line.append((name, now[0]))

    def done(started):
        end = 0.0
        for name, at in started:
            end = max(end, at) + device[name]
        return end

    def wait():
        now[0] = max(now[0], done(line)) + 100e-6
        line.clear()

    class Event:
        def __init__(self, **_): ...

        def record(self):
            self.before = [*line]

        def elapsed_time(self, later):
            return 1e3 * (done(later.before) - done(self.before))

    filler = SimpleNamespace(sum=lambda: start("sum", 20e-6))
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: filler)
    monkeypatch.setattr(kernel_measures.time, "perf_counter", lambda: now[0])
    return start


def test_a_slow_host_is_not_in_the_time(slow_host):
    """Nor does how long the device is kept busy beforehand hang on it: a run is two kernels, with the host between."""

    def run():
        slow_host("run"), slow_host("run")

    assert kernel_measures.milliseconds(run) == pytest.approx(0.8)
    assert kernel_measures.host_milliseconds(run) == pytest.approx(2.0)
    assert kernel_measures.called_milliseconds(run) == pytest.approx(2.0, rel=0.1)


@pytest.mark.gpu
def test_a_small_shape_on_a_device():
    found = kernel_speed.bench_shape(Shape(2, 300, 2, 32, 48), SIDES[:1])
    ours = found["Palimpsa"]
    assert ours["20 runs equal"]
    assert all(error < 5e-3 for error in ours["errors"].values()), ours
    assert 0 < ours["forward floor share"] < 1
    assert all(0 < ours[f"forward {kind}ms"] < 100 for kind in ("", "host ", "called "))
    assert ours["forward called ms"] > 0.5 * max(ours["forward ms"], ours["forward host ms"])
    assert 0 < ours["forward + backward floor share"] < 1


def test_a_run_that_was_cut_off_says_so(monkeypatch, tmp_path):
    def made(*_):
        yield "device", {"copied bytes per second": 1.0}
        if cut:
            raise KeyboardInterrupt
        yield "decode 760M-D, 64 sequences", {"ms": 1.0}

    monkeypatch.setattr(kernel_speed, "bench_kernels", made)
    for cut in (True, False):
        with pytest.raises(KeyboardInterrupt) if cut else contextlib.nullcontext():
            cli_bench.bench_kernels(tmp_path)
        record = json.loads((tmp_path / "results.json").read_text())
        assert record["settings"]["complete"] is not cut and len(record["measurements"]) == 2 - cut
