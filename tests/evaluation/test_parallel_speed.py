"""``bench parallel``: what is compared with what, and (slow) all of it on a CPU at the size of a toy."""

import copy
import dataclasses
import json
import os
import re

import pytest
import torch
from typer.testing import CliRunner

from metaplastic.cli_bench import bench
from metaplastic.evaluation import parallel_speed
from metaplastic.evaluation.parallel_page import compared_rows, parallel_page, way_rows
from metaplastic.evaluation.parallel_speed import WAYS, Setting, bench_parallel, compared, jobs, last_error, start
from metaplastic.evaluation.parallel_steps import do, end_with_parent
from metaplastic.recipes.language import find

TOY = Setting(batch=1, length=32, long=64, few=16, alike=(1, 16), repetitions=2, part=2)
DEBUG = "palimpsa_d-debug"


@pytest.fixture
def models():
    return {DEBUG: (find(DEBUG).network(), find(DEBUG).config(accumulation=1))}


def step(losses, norms=(2.0, 3.0), rows=2, **other):
    found = {"losses": losses, "gradient norms": list(norms), "rows of a step": rows, "bf16": False}
    found |= {"products": ["torch.float32"]}
    return found | {"weights, gradients, optimiser GB": 4.0} | other


FOUND = {
    "one": {
        "m, same run": step([4.0, 3.0], **{"tokens per second": 110.0, "peak memory GB": 10.0}),
        "m, rows of a GPU": step([5.0, 5.0], rows=1, **{"tokens per second": 100.0, "peak memory GB": 8.0}),
        "m, few activations": step([4.5], [1.0], rows=1, **{"peak memory GB": 5.0}),
        "m, resume": step([3.0, 2.0], **{"began at step": 1, "ended at step": 2}),
        "m, undisturbed": step([3.0, 2.0, 1.0, 0.5], **{"began at step": 0, "ended at step": 4}),
        "NCCL": "2.28.9",
    },
    "ddp": {
        "m, same run": step([4.0, 3.00002], **{"tokens per second": 190.0, "peak memory GB": 8.5}),
        "m, resume": step([3.0], **{"began at step": 0, "ended at step": 1}),
        "not run": "ended with 1",
    },
    "fsdp2": {
        "m, same run": step([4.0, 3.1]),
        "m, few activations": step([4.2], [1.0], **{"peak memory GB": 3.0, "weights, gradients, optimiser GB": 2.0}),
    },
}


def test_ways_are_compared_with_one_process():
    found = compared(FOUND)
    ddp, fsdp2 = found["m, same run"]["ddp"], found["m, same run"]["fsdp2"]
    assert ddp["difference of losses"] == pytest.approx(0.00002 / 3)
    assert ddp["equal"] and not fsdp2["equal"]  # 1e-5 in float32
    assert ddp["tokens per second, ratio"] == 1.9  # of as many rows of a GPU
    assert ddp["tokens per second, ratio at the same run"] == pytest.approx(190 / 110)
    assert ddp["peak memory GB, ratio"] == 8.5 / 8
    few = found["m, few activations"]["fsdp2"]  # other rows in all: nothing to be equal to
    assert few == {"peak memory GB, ratio": 0.6, "weights, gradients, optimiser GB, ratio": 0.5}
    resumed = found["m, resume"]
    assert resumed["parts"] == {"ddp": [0, 1], "one": [1, 2]} and resumed["equal"]
    said = dict(compared_rows(found))
    differences = "losses 3.3e-02, tolerance 1e-05; gradient norms 0.0e+00, tolerance 1e-04"
    assert said["m, same run: fsdp2"].startswith(f"NOT EQUAL (differences: {differences})")
    assert "tokens per second 1.900 times;" in said["m, same run: ddp"]
    on_a_cpu = copy.deepcopy(FOUND)
    on_a_cpu["ddp"]["m, same run"]["exchange"] = "gloo"
    said_there = dict(compared_rows(compared(on_a_cpu)))["m, same run: ddp"]
    assert "tokens per second 1.900 times (processes share this CPU: no statement about speed);" in said_there
    assert said["m, resume"].startswith("ddp > one: equal")


def test_products_of_another_dtype_are_not_the_same_run():
    found = copy.deepcopy(FOUND)
    found["ddp"]["m, same run"]["products"] = ["torch.bfloat16"]
    assert not compared(found)["m, same run"]["ddp"]["equal"]


@pytest.mark.parametrize("change", ["losses", "gap"])
def test_a_part_that_does_not_go_on_is_seen(change):
    found = copy.deepcopy(FOUND)
    part = found["one"]["m, resume"]
    if change == "losses":
        part["losses"][1] = 2.001
    else:
        part["began at step"] = 0
    assert not compared(found)["m, resume"]["equal"]


def test_one_run_whatever_the_way(models):
    """In nothing but flags that decide nothing do jobs of one name differ; steps of one row of a GPU are named so."""
    by_name = {}
    for way in WAYS:
        for job in jobs(way, models, {}, models, TOY):
            by_name.setdefault(job.name, []).append((way, job))
    assert {way for way, _ in by_name[f"{DEBUG}, same run"]} == set(WAYS)
    assert {way for way, _ in by_name[f"{DEBUG}, one long row"]} == {"one", "context"}
    for name, each in by_name.items():
        shared = ("parallel", "context_parallel")
        runs = [{key: value for key, value in job.config.items() if key not in shared} for _, job in each]
        if not name.endswith(("few activations", "waits")):
            assert runs[1:] == runs[:-1], name
        assert all(job.config["parallel"] == (way if way in ("ddp", "fsdp2") else None) for way, job in each)
        assert all(job.config["context_parallel"] == (2 if way == "context" else 1) for way, job in each)
    parts = [job.until for _, job in by_name[f"{DEBUG}, resume"]]
    assert parts == [2, 4, 6, 8] and by_name[f"{DEBUG}, undisturbed"][0][1].until == 8


def test_what_one_process_does(models, tmp_path):
    """Steps of which loss and gradient are kept, those that are timed, and a run that goes on where it was left."""
    wanted = {job.name.split(", ")[1]: job for job in jobs("one", models, {}, models, TOY)}
    timed = do(wanted["same run"], tmp_path)
    assert len(timed["losses"]) == len(timed["gradient norms"]) == 3 and timed["ended at step"] == 6
    assert len(timed["all ms"]) == 2 and timed["ms"] > 0 and timed["accumulation"] == 2
    assert timed["bf16"] and timed["products"] == ["torch.bfloat16"]
    assert do(wanted["float32"], tmp_path)["products"] == ["torch.float32"]
    assert 2.9 < timed["weights, gradients, optimiser GB"] / (4 * timed["parameters"] / 1e9) - 1 < 3.1
    left = do(wanted["resume"], tmp_path)  # the first to come: from the beginning
    assert (left["began at step"], left["ended at step"]) == (0, 4) and len(left["losses"]) == 4
    whole = do(wanted["undisturbed"], tmp_path)
    assert whole["losses"][:4] == left["losses"] and len(whole["losses"]) == 8
    assert whole["losses"][-1] < whole["losses"][0]


BEGINS = "Traceback (most recent call last):"
FAILING = """#!/bin/sh
test -p /dev/stdin || exit 9
if [ "$RANK" = 1 ]; then
    printf '%s\\n' '[rank1]: Traceback (most recent call last):' '[rank1]:   File "/home/a/b.py", line 1, in c' \\
        '[rank1]:     fail()' "[rank1]: OSError: no '/home/a/b c/d.pt' at https://e.org/f" '[rank1]: Or else.' >&2
    exit 3
fi
echo begins
exec sleep 60
"""


def executable(file, monkeypatch, text):
    """Every process runs this instead of Python; each holds an end of a pipe, which closes when this one is gone."""
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(file))


def test_processes_that_fail_or_hang_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert start(tmp_path, "one", 1, 60.0) == "ended with 1, one-0.log"
    executable(tmp_path / "sleeping", monkeypatch, "#!/bin/sh\ntest -p /dev/stdin && exec sleep 60\n")
    assert start(tmp_path, "ddp", 2, 0.2) == "no end in 0.2 seconds"
    executable(tmp_path / "killed", monkeypatch, "#!/bin/sh\necho working\nkill -9 $$\n")
    assert start(tmp_path, "one", 1, 60.0) == "killed by SIGKILL, one-0.log"


def test_a_way_that_cannot_run_says_why(models, tmp_path, monkeypatch):
    """In the results, in the table and on the page; without a path of the machine."""
    executable(tmp_path / "failing", monkeypatch, FAILING)
    (way, found), (name, beside) = bench_parallel(models, {}, models, tmp_path, TOY, ["ddp"])
    said = "OSError: no 'b c/d.pt' at https://e.org/f: process 1 ended with 3, ddp-1.log"
    assert (way, name) == ("ddp", "compared") and found["not run"].startswith(said)
    assert f"(0 of 4 jobs done, then '{DEBUG}, same run')" in found["not run"]
    assert ("not run", found["not run"]) in way_rows(found)
    assert compared_rows(beside) == [("ddp", found["not run"])]
    record = {"measurements": {way: found, name: beside}}
    shown = parallel_page(record, tmp_path).read_text().split("<details>")[0]
    assert shown.count("OSError: no &#x27;b c/d.pt&#x27;") == 2  # beside one process, and among what the way found


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", None),
        ("a warning\nterminate called\n\n", "terminate called"),
        (f"{BEGINS}\n  a\nKeyError: 1\n\n{BEGINS}\n  b\nE: 2\nend", "E: 2"),
        (f"{BEGINS}\n  cut short", "cut short"),
        ("ValueError: " + 400 * "x", "ValueError: " + 284 * "x" + " ..."),
    ],
)
def test_the_last_error_of_a_log(log, expected):
    assert last_error(log) == expected


def test_processes_end_with_who_started_them(monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as pipe:
        watching = end_with_parent(pipe)
        watching.join(0.05)
        assert watching.is_alive() and not ended
        os.close(writing)
        watching.join(60)
    assert ended == [1]


def test_wrong_settings_are_named(models, tmp_path):
    with pytest.raises(ValueError, match="processes must be at least 2, which are compared with one, got 1"):
        Setting(processes=1)
    with pytest.raises(ValueError, match="repetitions must be > 0, got 0"):
        Setting(repetitions=0)
    with pytest.raises(ValueError, match="ways: got tensor, expected some of ddp, one, fsdp2, context"):
        next(bench_parallel(models, {}, {}, tmp_path, TOY, ["tensor"]))
    with pytest.raises(ValueError, match="ways: got one, one, expected different ones"):
        next(bench_parallel(models, {}, {}, tmp_path, TOY, ["one", "one"]))


def test_a_toy_is_of_the_sizes_that_were_asked_for(tmp_path, monkeypatch):
    """--alike names a recipe; a setting of the same name is no option."""
    settings = []
    monkeypatch.setattr(parallel_speed, "bench_parallel", lambda *given: settings.append(given[4]) or [])
    command = ["parallel", "--quick", "--output", str(tmp_path), "--alike", DEBUG]
    for options in ([], ["--length", "48", "--repetitions", "3"], ["--batch", "0"]):
        CliRunner().invoke(bench, command + options)
    toy = dataclasses.replace(TOY, seconds=settings[0].seconds)
    assert settings == [toy, dataclasses.replace(toy, length=48, repetitions=3)]  # no batch of 0 was begun


@pytest.mark.slow
def test_the_command(tmp_path):
    """A minute: eight models in four groups of processes, over gloo."""
    check_all(tmp_path)


def check_all(output):
    """Runs all of it; every run has to be that of one process."""
    shown = CliRunner().invoke(bench, ["parallel", "--quick", "--output", str(output)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    text = (output / "results.json").read_text()
    assert str(output) not in text
    measured = json.loads(text)["measurements"]
    assert shown.output.count("compared with one process") == 1
    assert [name for name in measured if name != "compared"] == list(WAYS)
    assert not any("not run" in found for found in measured.values()), measured
    found = measured["compared"]
    equal = {(name, way): entry["equal"] for name, ways in found.items() if "parts" not in ways
             for way, entry in ways.items() if "equal" in entry}  # fmt: skip
    assert len(equal) == 13 and all(equal.values()), equal
    assert found[f"{DEBUG}, resume"]["equal"] and list(found[f"{DEBUG}, resume"]["parts"]) == list(WAYS)
    kept = found[f"{DEBUG}, same run"]["fsdp2"]["weights, gradients, optimiser GB, ratio"]
    assert 0.5 <= kept < 0.51
    exchange = "nccl" if torch.cuda.is_available() else "gloo"
    assert all(exchange in measured[way][f"{DEBUG}, same run"]["exchange"] for way in WAYS if way != "one")
    html = (output / "index.html").read_text()
    assert "ddp &gt; one &gt; fsdp2 &gt; context: equal" in html and not re.search(r"NOT EQUAL", html)
    return measured
