"""``metaplastic bench parallel``: the same run on one and on several GPUs of this machine: equal steps, speed, memory.

Started once, it starts the processes itself, a group for each way, one GPU a process (on a CPU they are processes and
gloo):

    one       one process                        fsdp2     all, --parallel fsdp2
    ddp       all of them, data parallel         context   all, --context-parallel

Each takes steps with the real Trainer (``parallel_steps.py``). What is compared, of every way with ``one``:

* **same run**: a recipe whose step is N x ``batch`` rows of ``length`` tokens; one process takes them N times a step,
  N processes each once. Losses and gradient norms of its first steps, in bf16 and, smaller, in float32.
* **speed** of ddp and fsdp2: tokens a second of that run over those of one process with ``batch`` rows a step, which
  is as many rows of a GPU (weak scaling), and over one process with the same run (``at the same run``); of context
  parallelism: one row of ``long`` tokens on one GPU and on all, blocks computed again on both.
* **memory**: the highest of a GPU, of the same run and of one with few activations (a row of 1,024 tokens, blocks
  computed again, the loss over logits on both sides), which is where sharding weights matters; and what outlives a
  layer: weights, gradients and the optimiser's state, by their sizes.
* **resume**: a run that ddp leaves, one process goes on with, fsdp2 after it and context parallelism at the end, each
  from the checkpoint of the one before, beside a run of one process, in float32.
* **waits**: what makes the host of the first process wait for the device in a step (``training_profile.py``).
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..models import MetaplasticConfig
from ..training import TrainConfig
from .parallel_steps import WARM, Job

WAYS = ("ddp", "one", "fsdp2", "context")  # in an order in which each can go on from the one before
FLAGS: dict[str, dict[str, Any]] = {"ddp": {"parallel": "ddp"}, "one": {}, "fsdp2": {"parallel": "fsdp2"}}
# bfloat16 rounds by up to 2^-9 of a number; a loss is a mean of thousands, a norm the root of millions of squares.
TOLERANCES = {True: {"losses": 1e-3, "gradient norms": 1e-2}, False: {"losses": 1e-5, "gradient norms": 1e-4}}
RESUMED = 1e-4  # float32 losses, whose differences grow from step to step
SAME, OWN, LONG, STATES, EXACT, RESUME, WHOLE, WAITS = (
    "same run", "rows of a GPU", "one long row", "few activations", "float32", "resume", "undisturbed", "waits",
)  # fmt: skip
SHARED = "processes share this CPU: no statement about speed"
SAID = 300  # characters of an error
GOING_ON = "going on"  # the folder of the run that is left and gone on with


@dataclasses.dataclass(frozen=True)
class Setting:
    """How large the steps are, and how many are timed."""

    processes: int = 2
    batch: int = 8
    length: int = 2048
    long: int = 65_536
    few: int = 1024  # tokens of the row with few activations
    alike: tuple[int, int] = (4, 512)  # rows of a process and their tokens where steps are compared only
    repetitions: int = 6
    part: int = 5  # steps of each part of the run that is left and gone on with
    compile: bool = False
    profiled: bool = True
    seconds: float = 1800.0  # after which the processes of a way are ended

    def __post_init__(self) -> None:
        for name in ("processes", "batch", "length", "long", "few", "repetitions", "part", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.processes < 2:
            raise ValueError(f"processes must be at least 2, which are compared with one, got {self.processes}")


Models = Mapping[str, tuple[MetaplasticConfig, TrainConfig]]  # of every recipe its network and its run


def jobs(way: str, timed: Models, alike: Models, resumed: Models, setting: Setting) -> list[Job]:
    """What the processes of ``way`` do: of models that are ``timed``, those only ``alike``, and runs to go on with."""
    n, every = setting.processes, setting.repetitions
    found: list[Job] = []

    def add(name: str, what: str, models: Models, batch: int, length: int, often: int = n, **options: Any) -> None:
        network, run = models[name]
        kept = {key: options.pop(key) for key in ("checkpointing", "bf16", "loss", "save_every") if key in options}
        logged, measured = options.get("logged", 3), options.get("timed", 0)
        steps = options.pop("steps", None) or logged + 1 + measured
        flags = {"context_parallel": n} if way == "context" else FLAGS[way]
        run = dataclasses.replace(
            run, **({"batch_size": batch, "accumulation": often, "block_length": length, "steps": steps, "warmup": 10,
            "schedule": "constant", "cooldown": None, "minimum_rate": 0.0, "save_every": 0, "eval_every": 0,
            "compile": setting.compile, "checkpointing": "none", "bf16": True} | kept | flags),
        )  # fmt: skip
        found.append(Job(f"{name}, {what}", network.to_dict(), dataclasses.asdict(run), **options))

    for name in timed:
        add(name, SAME, timed, setting.batch, setting.length, timed=every)
        if way == "one":
            add(name, OWN, timed, setting.batch, setting.length, 1, timed=every)
        if way in ("one", "fsdp2"):
            often = 1 if way == "one" else n
            add(name, STATES, timed, 1, setting.few, often, timed=2, checkpointing="full", loss="plain")
        if way in ("one", "context"):
            few = {"logged": 2, "timed": max(every // 2, 2)}
            add(name, LONG, timed, 1, setting.long, 1, packed=False, checkpointing="full", **few)
    both = {**timed, **alike}
    rows, length = setting.alike
    for name in alike:
        add(name, SAME, alike, rows, length)
    for name in both:
        add(name, EXACT, both, max(rows // 4, 1), length, bf16=False)
    for name in resumed:
        steps, part = setting.part * len(WAYS), setting.part
        options: dict[str, Any] = {"bf16": False, "save_every": part, "logged": 0, "steps": steps}
        add(name, RESUME, resumed, rows, length, until=part * (1 + WAYS.index(way)), run=GOING_ON, **options)
        if way == "one":
            add(name, WHOLE, resumed, rows, length, until=steps, run=WHOLE, **options)
    if way != "one" and setting.profiled:
        for name in resumed:
            add(name, WAITS, resumed, rows, length, profiled=True, logged=0, steps=WARM + 1)
    return found


def bench_parallel(
    timed: Models, alike: Models, resumed: Models, output: Path, setting: Setting, ways: Sequence[str] = WAYS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each way what its processes found, as they have; "compared" with one process after each."""
    if unknown := sorted(set(ways) - set(WAYS)):
        raise ValueError(f"ways: got {', '.join(unknown)}, expected some of {', '.join(WAYS)}")
    if len(set(ways)) < len(ways):
        raise ValueError(f"ways: got {', '.join(ways)}, expected different ones")
    if ways[0] == WAYS[0]:
        for folder in (GOING_ON, WHOLE):
            shutil.rmtree(output / folder, ignore_errors=True)
    found: dict[str, dict[str, Any]] = {way: kept for way in WAYS if way not in ways and (kept := _read(output, way))}
    for way in ways:
        wanted = [dataclasses.asdict(job) for job in jobs(way, timed, alike, resumed, setting)]
        (output / f"{way}.jobs.json").write_text(json.dumps(wanted))
        for old in output.glob(f"{way}-*.json"):
            old.unlink()
        ended = start(output, way, 1 if way == "one" else setting.processes, setting.seconds)
        found[way] = _read(output, way)
        if ended is not None:
            done = [job["name"] for job in wanted if job["name"] in found[way]]
            doing = wanted[len(done)]["name"] if len(done) < len(wanted) else "nothing more"
            found[way]["not run"] = f"{ended} ({len(done)} of {len(wanted)} jobs done, then {doing!r})"
        yield way, found[way]
        yield "compared", compared(found)


def start(output: Path, way: str, processes: int, seconds: float) -> str | None:
    """The processes of one way, as torchrun would start them; when one fails, or in so many ``seconds``, all end.

    So they do when this process is gone, however it went: each holds one end of a pipe, which then closes.
    What each says is in its ``WAY-RANK.log``.

    Returns None, or why a process failed (of several the one whose last words came first: the others miss it).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command, end = [sys.executable, "-m", f"{__package__}.parallel_steps", str(output), way], time.monotonic() + seconds
    logs = [output / f"{way}-{rank}.log" for rank in range(processes)]
    running: list[subprocess.Popen] = []
    try:
        for rank, file in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | group if processes > 1 else {}
            if processes > 1:
                own |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            with file.open("w") as log:
                running.append(
                    subprocess.Popen(command, env=os.environ | own, stdin=subprocess.PIPE, stdout=log, stderr=log)
                )
        while True:
            codes = [process.poll() for process in running]
            if bad := [rank for rank, code in enumerate(codes) if code]:
                return reason(logs, {rank: codes[rank] or 0 for rank in bad})
            if None not in codes:
                return None
            if time.monotonic() > end:
                return f"no end in {seconds:g} seconds"
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def reason(logs: Sequence[Path], codes: Mapping[int, int]) -> str:
    """In one line why the processes with those ``codes`` failed, from what they wrote; without paths of the machine."""
    rank = min(codes, key=lambda each: logs[each].stat().st_mtime_ns)
    code = codes[rank]
    told = code in (-signal.SIGKILL, -signal.SIGTERM)  # from without: what it said last is not why
    said = None if told else last_error(logs[rank].read_text(errors="replace"))
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    if len(logs) > 1:
        how = f"process {rank} {how}"
    return f"{said}: {how}, {logs[rank].name}" if said else f"{how}, {logs[rank].name}"


def last_error(log: str) -> str | None:
    """The line that names the last error in a log: the one below its traceback, or else the last one of all."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).rstrip() for line in log.splitlines()]
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    below = (line for line in lines[begins[-1] + 1 :] if line and not line[0].isspace()) if begins else ()
    found = next(iter(below), None) or next((line for line in reversed(lines) if line), None)
    if found is None:
        return None
    found = re.sub(r"(?<![\w:/.])/(?:[^\s/'\":,()]+/)+([^\s/'\":,()]*)", r"\1", found.strip())
    return found if len(found) <= SAID else f"{found[: SAID - 4]} ..."


def _read(output: Path, way: str) -> dict[str, Any]:
    """Of all processes: as the first has it, but the slowest's time and the largest memory."""
    files = sorted(output.glob(f"{way}-*.json"))
    of_each = [json.loads(file.read_text()) for file in files]
    if not of_each:
        return {}
    whole = of_each[0]
    for name, job in whole.items():
        for what, worst in (("ms", max), ("peak memory GB", max)):
            if isinstance(job, dict) and what in job:
                each = [other[name][what] for other in of_each if name in other]
                job |= {what: worst(each), f"{what} of each": each}
        if isinstance(job, dict) and "ms" in job:
            job["tokens per second"] = 1e3 * job["rows of a step"] * job["tokens of a row"] / job["ms"]
    return whole


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every way beside one process: is it the same run, how fast, in how much memory; and the run that goes on.

    A way that did not get to its end: why.
    """
    one, result = found.get("one", {}), {}
    for way in (way for way in WAYS if way != "one"):
        own = found.get(way, {})
        for name, job in own.items():
            model, _, what = name.partition(", ")
            beside = one.get(name, {})
            if what in (SAME, EXACT, LONG, STATES) and beside.get("losses") and "losses" in job:
                entry = result.setdefault(name, {}).setdefault(way, {})
                if beside["rows of a step"] == job["rows of a step"]:
                    entry |= _alike(beside, job)
                _ratios(entry, beside, job, one.get(f"{model}, {OWN}", {}) if what == SAME else beside)
    for name, job in one.items():
        model, _, what = name.partition(", ")
        if what == WHOLE:
            again = f"{model}, {RESUME}"
            result[again] = _resumed(job, {way: found.get(way, {}).get(again, {}) for way in WAYS})
    return result | {way: {"not run": found[way]["not run"]} for way in WAYS if "not run" in found.get(way, {})}


def _alike(one: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The largest relative differences of the first steps; equal: within the tolerance, in products of one dtype."""
    entry: dict[str, Any] = {}
    for what, tolerance in TOLERANCES[one["bf16"]].items():
        differences = _differences(own[what], one[what])
        entry |= {f"difference of {what}": max(differences), f"tolerance of {what}": tolerance}
    equal = [entry[f"difference of {what}"] <= tolerance for what, tolerance in TOLERANCES[one["bf16"]].items()]
    return entry | {"equal": all(equal) and own["products"] == one["products"]}


def _differences(values: Sequence[float], expected: Sequence[float]) -> list[float]:
    if len(values) != len(expected) or not expected:
        raise ValueError(f"got {len(values)} values beside {len(expected)}, expected as many, and some")
    return [abs(value - other) / abs(other) for value, other in zip(values, expected, strict=True)]


def _ratios(entry: dict[str, Any], same: Mapping[str, Any], own: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Against one process with as many rows of a GPU, and with the same run."""
    for what in ("tokens per second", "peak memory GB", "weights, gradients, optimiser GB"):
        if what in own and what in rows:
            entry[f"{what}, ratio"] = own[what] / rows[what]
    if "tokens per second" in own and "tokens per second" in same and same is not rows:
        entry["tokens per second, ratio at the same run"] = own["tokens per second"] / same["tokens per second"]
    if own.get("exchange") == "gloo" and any(ratio.startswith("tokens per second") for ratio in entry):
        entry["speed"] = SHARED  # gloo is what processes of a CPU have


def _resumed(whole: Mapping[str, Any], ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Losses of the parts, each of which has those of all before it in its log, beside those of the run never left."""
    parts = [(way, job) for way, job in ways.items() if job.get("losses")]
    if not parts:
        return {"not run": "no part of it"}
    last = parts[-1][1]["losses"]
    differences = _differences(last, whole["losses"][: len(last)])
    began = [job["began at step"] for _, job in parts]
    return {
        "parts": {way: [job["began at step"], job["ended at step"]] for way, job in parts},
        "difference of losses": max(differences),
        "tolerance of losses": RESUMED,
        "losses": last,
        "undisturbed": whole["losses"],
        "equal": max(differences) <= RESUMED and began == [0, *(job["ended at step"] for _, job in parts[:-1])],
    }
