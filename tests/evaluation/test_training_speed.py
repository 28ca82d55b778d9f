"""``bench training`` on a CPU, at the size of a toy: what it measures, and that it sees what makes a host wait."""

import contextlib
import copy
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from typer.testing import CliRunner

from metaplastic import ops
from metaplastic.cli_bench import bench
from metaplastic.evaluation import training_speed
from metaplastic.evaluation.speed import operator_inputs
from metaplastic.evaluation.training_page import kernel_rows
from metaplastic.evaluation.training_profile import PROFILED, SCALAR, kernels
from metaplastic.evaluation.training_speed import Setting, _Watch
from metaplastic.models import size
from metaplastic.recipes.language import find
from metaplastic.training.compiled import compile_blocks
from metaplastic.training.flops import model_flops

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # PyTorch's compiler hides its own warning, but not from who makes it an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return training_speed._shards(tmp_path_factory.mktemp("bench") / "shards")


def test_the_command(tmp_path, monkeypatch, shards):
    """Compiled, as far as PyTorch's frontend does it: its compiler takes a minute (tests/training/test_compile.py)."""
    monkeypatch.setattr(training_speed, "SECONDS", 0.1)
    monkeypatch.setattr(training_speed, "compile_blocks", lambda model: compile_blocks(model, "eager"))
    arguments = ["training", "--recipe", "palimpsa_d_additive-debug", "--batch", "2", "--length", "32", "--layout"]
    arguments += ["packed", "--repetitions", "2", "--checkpointing", "full", "--data", str(shards)]
    arguments += ["--output", str(tmp_path), "--peak-flops", "1e11", "--compile"]
    shown = CliRunner().invoke(bench, arguments, env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["measurements"]) == ["palimpsa_d_additive-debug, packed, compiled", "loader, 2 x 32"]
    found, read = record["measurements"].values()
    config = find("palimpsa_d_additive-debug").network()
    assert found["backends"] == ["additive_chunked"] and found["parameters"] == size(config).parameters
    assert found["tokens per second"] == pytest.approx(2 * 32 / found["ms"] * 1e3)
    assert found["least ms"] <= found["ms"] <= found["most ms"]
    assert found["model FLOP/s"] == pytest.approx(model_flops(size(config), 0) * found["tokens per second"])
    assert found["MFU"] == pytest.approx(found["model FLOP/s"] / 1e11) and found["peak FLOP/s"] == 1e11
    assert found[training_speed.LOADER] == pytest.approx(read["tokens per second"] / found["tokens per second"])
    assert found["compile"] and found["graphs"] == 1 and found["compile seconds"] > 0
    assert re.search(r"compiled\s+│ in [\d.]+ s, 1 graphs", shown.output)
    # On a CPU nothing waits for a device, and there is no word of what only a GPU has; nor an exponent.
    assert "waits" not in found and "peak memory GB" not in found
    assert not re.search(r"DtoH|in a step|peak memory|\de[+-]\d", shown.output)
    assert f"tokens per second              │ {found['tokens per second']:,.0f} " in shown.output
    html = (tmp_path / "index.html").read_text()
    assert "tokens_per_second.png" in {file.name for file in tmp_path.iterdir()} and "<figure>" in html
    assert "peak memory" not in html and not re.search(r"<td.*\de[+-]\d", html.split("<details>")[0])
    assert "palimpsa_d_additive-debug, packed, compiled" in html and "additive_chunked" in html
    assert "tokens per second" in shown.output and "checkpointing full" in shown.output


def test_peers_are_compiled_first_and_tuned_in_seconds(tmp_path, monkeypatch, shards):
    """Each size once, of those models alone that ask for their kernels. A failure there ends nothing."""
    models = {name: find(name).network() for name in ("palimpsa_d-debug", "mamba2-debug", "gated_deltanet-debug")}
    asked = {}
    for name in list(models)[1:]:
        config = models[name]
        (options,) = config.mixer_options.values()
        asked[f"{name} (fla)"] = copy.deepcopy(config)
        asked[f"{name} (fla)"].mixer_options = {mixer: options | {"backend": "fla"} for mixer in config.mixer_options}
    assert training_speed.peer_calls(models, 2) == []
    calls = training_speed.peer_calls(models | asked, 2)
    assert [(call.operator, call.batch) for call in calls] == [("additive", 2), ("delta", 2)]
    assert all(call.gradients for call in calls)
    options = models["gated_deltanet-debug"].mixer_options["gated_deltanet"]
    assert calls[1][2:5] == tuple(options[name] for name in ("num_heads", "key_size", "value_size"))

    within, seen = [], []

    @contextlib.contextmanager
    def quick():
        within.append(True)
        yield
        within.pop()

    def step(*given):
        seen.append(bool(within))
        return {"tokens per second": 1.0}

    def fail(*given):
        raise RuntimeError("here")

    monkeypatch.setattr(training_speed.fla_tuning, "quick", quick)
    monkeypatch.setattr(training_speed, "bench_step", step)
    monkeypatch.setattr(training_speed, "SECONDS", 0.1)
    given: Any = {"layouts": ("rows",), "data": str(shards)}
    for compiling, said in ((lambda calls: True, "compile seconds"), (fail, "not prepared")):
        monkeypatch.setattr(training_speed.fla_tuning, "compile_all", compiling)
        found = dict(training_speed.bench_training(asked, tmp_path, Setting(2, 32), **given))
        assert said in found["peers' kernels"] and len(found) == 4
    dict(training_speed.bench_training(models, tmp_path, Setting(2, 32), **given))
    assert seen == [True, True, False, False] + 3 * [False] and not within

    monkeypatch.setattr(training_speed, "bench_step", fail)  # a peer that cannot run ends nothing, ours does
    measured = training_speed.bench_training(asked | models, tmp_path, Setting(2, 32), **given)
    assert [found.get("not run") for _, found in itertools.islice(measured, 3)] == [None, *2 * ["RuntimeError: here"]]
    with pytest.raises(RuntimeError, match="here"):
        next(measured)


def test_peers_of_a_hybrid(monkeypatch):
    """Attention has no such kernels, and no such option."""
    monkeypatch.setattr(training_speed.dispatch, "reason_against", lambda *given: None)
    monkeypatch.setattr(training_speed.dispatch, "no_gradients", lambda *given: None)
    config = find("mamba2-debug").network()
    (options,) = config.mixer_options.values()
    sizes = {"num_heads": 2, "key_size": 8, "value_size": 8}
    hybrid = copy.deepcopy(config)
    hybrid.mixers = ["mamba2"] * (config.num_hidden_layers - 1) + ["attention"]
    hybrid.mixer_options = {"mamba2": options, "attention": sizes}
    models = training_speed.with_peers({"hybrid": hybrid})
    assert list(models) == ["hybrid", "hybrid (fla)"]
    assert models["hybrid (fla)"].mixer_options == {"mamba2": options | {"backend": "fla"}, "attention": sizes}
    assert [call.operator for call in training_speed.peer_calls(models, 2)] == ["additive"]


def test_a_step_that_fails_leaves_no_profiler(tmp_path, monkeypatch, shards):
    """Which would run on below the models behind it."""
    text, setting = training_speed.ShardedText(shards, 32, seed=0), Setting(2, 32, 2, False)
    config, forward, steps = find("mamba2-debug").network(), training_speed.MetaplasticForCausalLM.forward, []

    def fail(self, *given, **options):
        steps.append(torch.autograd._profiler_enabled())
        if steps[-1]:
            raise RuntimeError("here")
        return forward(self, *given, **options)

    monkeypatch.setattr(training_speed.MetaplasticForCausalLM, "forward", fail)
    with pytest.raises(RuntimeError, match="here"):
        training_speed.bench_step(config, text, tmp_path, setting, "rows")
    assert steps == [False] * (len(steps) - 1) + [True] and not torch.autograd._profiler_enabled()


def profiled(run):
    """What has watched steps, in the last of which ``run`` ran."""
    watch = _Watch(1)
    for step in range(1, 6):
        if step == 5:
            run()
        watch.on_step_end(None, SimpleNamespace(global_step=step), None)
    return watch


def test_a_step_is_seen_as_it_is(capfd):
    """Reading a scalar is counted as often as it is done; the backend is the one whose operator was called."""
    inputs = {name: x.detach() for name, x in operator_inputs("palimpsa", 1, 4, 2, 3, 4).items()}
    config = find("palimpsa_d-debug").network()

    def run():
        ops.palimpsa(**inputs, backend="chunked")

    run()  # the profiler keeps names of what an import runs and forgets
    few, x = profiled(run), torch.ones(2)
    many = profiled(lambda: (run(), [float(x.sum()) for _ in range(3)]))
    assert many.waits()["counts"][SCALAR] == few.waits()["counts"][SCALAR] + 3
    assert few.backends(config) == ["palimpsa_chunked"]
    assert len(few.clock.seconds()) == 1 and few.clock.seconds()[0] > 0
    assert profiled(lambda: None).waits()["where"] == {}
    # Values are read on a CPU, where that waits for nothing: those of the operators' checks, by where.
    where, counts = few.waits()["where"], few.waits()["counts"]
    assert counts[SCALAR] > 0 and counts["Memcpy DtoH"] == 0
    assert any("metaplastic/ops/contract.py" in place for place in where)
    assert not any(place.split(": ")[1].startswith("/") for place in where)
    assert "USDT" not in capfd.readouterr().err


def test_the_largest_kernels():
    """Of the device alone, without the span of the step itself and those that others mark."""
    device, host = DeviceType.CUDA, DeviceType.CPU

    def event(name, us, where=device, marked=False):
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=where, time_range=span, is_user_annotation=marked)

    events = [event("product", 30.0), event("copy", 5.0), event("product", 60.0), event("copy", 900.0, host)]
    events += [event(PROFILED, 500.0), event("Optimizer.step", 500.0, marked=True), event("sum", 5.0)]
    found = kernels(events)
    assert found[0] == {"name": "product", "ms": 0.09, "share": 0.9, "calls": 2}
    assert [row["name"] for row in found] == ["product", "copy", "sum"]
    assert kernel_rows({"kernels": found}, 1) == [("0.09 ms, 90.0%", "2 x product")] and kernel_rows({}, 1) == []


def test_a_graph_that_is_compiled_while_steps_are_timed(tmp_path, monkeypatch, shards):
    """Is an error: that time would be taken for the step's."""
    monkeypatch.setattr(training_speed, "compile_blocks", lambda model: None)
    monkeypatch.setattr(training_speed, "_graphs", itertools.count().__next__)
    text = training_speed.ShardedText(shards, 32, seed=0)
    config, setting = find("palimpsa_d_additive-debug").network(), Setting(2, 32, 2, False, compile=True)
    with pytest.raises(RuntimeError, match="2 graphs were compiled while steps were timed"):
        training_speed.bench_step(config, text, tmp_path, setting, "rows")


def test_rows_have_real_borders(shards):
    """What attention sees by the borders of documents, counted one by one."""
    text = training_speed.ShardedText(shards, 4096, seed=0)
    rows = training_speed._Rows(text, 100, 3)
    assert len({len(row["starts"]) for row in rows.rows}) > 1 and max(len(row["starts"]) for row in rows.rows) > 1
    seen = begun = 0
    for row in rows.rows:
        assert row["input_ids"].max() < 100 and (row["labels"][row["starts"]] == -100).all()
        starts = set(row["starts"].tolist())
        for token in range(4096):
            begun = token if token in starts else begun
            seen += token - begun + 1
    assert rows.seen("packed") == pytest.approx(seen / 3 / 4096)
    assert rows.seen("rows") == (4096 + 1) / 2


def test_bad_settings():
    for name, value in (("peak_flops", 0.0), ("batch", 0), ("repetitions", 0)):
        with pytest.raises(ValueError, match=f"{name} must be >=? ?[01].*, got {value}"):
            Setting(**{name: value})


def test_an_unknown_layout():
    with pytest.raises(ValueError, match="layouts: unknown layout 'padded'; known: packed, rows"):
        next(training_speed.bench_training({}, None, Setting(), layouts=("padded",)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ImportWarning")  # the library of the fused loss says what it lacks
@pytest.mark.parametrize("layout", training_speed.LAYOUTS)
def test_a_step_on_a_device_reads_nothing_from_it(tmp_path, shards, layout):
    """No copy to the host between logs, and a peak that is known."""
    text = training_speed.ShardedText(shards, 256, seed=0)
    config, setting = find("palimpsa_d-17M").network(), Setting(batch=2, length=256, repetitions=3)
    found = training_speed.bench_step(config, text, tmp_path, setting, layout)
    assert found["peak memory GB"] > 16 * found["parameters"] / 1e9
    assert found["waits"]["counts"]["Memcpy DtoH"] == 0, found["waits"]["where"]
    assert len(found["kernels"]) > 5 and sum(row["share"] for row in found["kernels"]) <= 1
