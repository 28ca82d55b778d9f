"""Several processes take the steps of one, save what one saves, and go on from what any number of them saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from metaplastic.training import TrainConfig, train
from metaplastic.training.checkpoint import check_seal, checkpoints, step_of
from metaplastic.training.folder import identity, read_run
from metaplastic.training.parallel import NOBODY, Shared, share

from .parallel_jobs import FORMS, MEMORIES, PACKINGS, SHARDS, STEPPED

ROOT = Path(__file__).parents[2]


def computed(tmp_path_factory, jobs: str) -> Path:
    """The folder of what ``parallel_jobs`` found; computed once, however many processes test."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / f"parallel {jobs}"
    with FileLock(base / f"parallel {jobs}.lock"):
        if not (folder / "done").exists():
            folder.mkdir()
            environment = os.environ | {
                "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                "METAPLASTIC_CACHE": str(folder / "cache"),
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.training.parallel_jobs", str(folder), jobs]
            with (folder / "log").open("w") as log:
                code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
            (folder / "done").write_text(str(code))
    assert (folder / "done").read_text() == "0", (folder / "log").read_text()
    return folder


@pytest.fixture(scope="session")
def found(tmp_path_factory) -> Path:
    return computed(tmp_path_factory, "quick")


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["measurements"]


def assert_same_curve(a: Path, b: Path, *, bitwise: bool = False) -> None:
    weights = [load_file(folder / "final" / "model.safetensors") for folder in (a, b)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0 if bitwise else 1e-4, atol=0 if bitwise else 2e-6)
    curves = []
    for folder in (a, b):
        entries = results(folder)["history"]
        curves.append(
            [entry[name] for entry in entries for name in ("loss", "eval_loss", "grad_norm") if name in entry]
        )
        assert results(folder)["tokens_seen"] == results(a)["tokens_seen"]
    assert len(curves[0]) > 6
    assert curves[0] == (curves[1] if bitwise else pytest.approx(curves[1], rel=1e-5))


# One step


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("mixer", "form"), FORMS)
def test_a_step_of_two_processes_is_that_of_one(found, parallel, mixer, form):
    one, two = (torch.load(found / f"{name}.pt")[mixer, form] for name in ("alone", parallel))
    assert two["sharded"] == {parallel == "fsdp2"} and one["sharded"] == {False}
    whole = {(40, 8)} if form == "fused" else set()  # of the output layer, also where it is sharded
    assert set(one["fused"]) == set(two["fused"]) == whole
    assert not any("broadcast_buffers" in said for said in two["heard"])  # torch 2.13 of what accelerate gives it
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["evaluation"]["eval_tokens"] == one["evaluation"]["eval_tokens"]
    assert two["evaluation"]["eval_loss"] == pytest.approx(one["evaluation"]["eval_loss"], rel=1e-5)
    assert len(one["gradients"]) > 20
    for name, gradient in one["gradients"].items():
        size = float(gradient.abs().max())
        assert size > 1e-5, name
        # A gradient is the difference of two weights, which are rounded.
        torch.testing.assert_close(two["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * size + 3e-7, msg=name)


@pytest.mark.skipif(len(FORMS) == len(STEPPED), reason="a fused loss on a CPU needs PyTorch 2.13")
def test_an_output_layer_that_is_sharded_by_itself_has_a_fused_loss(found):
    whole, apart = torch.load(found / "context.pt")["apart"]
    for name, gradient in whole.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_rows_are_shared_as_one_process_takes_them():
    rows = list(range(100, 123))
    shares = [list(Shared(rows, 2, 3, index, 2)) for index in range(2)]
    assert shares[0][:4] == [[100, 101], [104, 105], [108, 109], [112, 113]]
    assert shares[1][:4] == [[102, 103], [106, 107], [110, 111], [114, 115]]
    assert [len(batches) for batches in shares] == [len(Shared(rows, 2, 3, 0, 2))] * 2 == [6] * 2
    assert shares[0][4:] == [[116, 117], [120, 121]] and shares[1][4:] == [[118, 119], [122]]
    assert list(Shared(rows[:2], 2, 3, 1, 2)) == [[NOBODY]]


@pytest.mark.parametrize(
    ("processes", "settings", "expected"),
    [
        (1, {}, (16, 1)),
        (1, {"accumulation": 4}, (16, 4)),
        (2, {"accumulation": 4}, (16, 2)),
        (2, {}, (8, 1)),
        (3, {"batch_size": 4, "accumulation": 3}, (4, 1)),
        (6, {"batch_size": 4, "accumulation": 3}, (2, 1)),
        (4, {"context_parallel": 2}, (8, 1)),
        (3, {}, "16 x 1 = 16 rows a step for 3 processes, expected a multiple"),
        (1, {"parallel": "fsdp2"}, "parallel: got 'fsdp2', but one process was started"),
        (
            1,
            {"context_parallel": 2},
            "context_parallel: got 2, but one process was started .torchrun --nproc-per-node N",
        ),
        (4, {"context_parallel": 3}, "context_parallel: got 3 of 4 processes, expected a divisor"),
        (2, {"context_parallel": 2, "compile": True, "checkpointing": "full"}, (16, 1)),
        (
            2,
            {"context_parallel": 2, "compile": True, "checkpointing": "selective"},
            "checkpointing: got 'selective', but",
        ),
    ],
)
def test_the_recipe_says_what_a_step_is(monkeypatch, processes, settings, expected):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    if isinstance(expected, tuple):
        assert share(TrainConfig(**settings)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            share(TrainConfig(**settings))


def test_layers_that_cannot_be_cut_claim_no_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="context_parallel: layer 1 is 'attention', expected a memory of fixed size"):
        train(tiny(mixer="palimpsa_d,attention", layers=2, context_parallel=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match="parallel must be one of 'ddp', 'fsdp2' or None, got 'zero'"):
        TrainConfig(parallel="zero")
    with pytest.raises(ValueError, match="context_parallel must be >= 1, got 0"):
        TrainConfig(context_parallel=0)


# Sequences that are cut


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mixer", MEMORIES)
def test_shards_of_a_sequence_have_the_gradients_of_the_whole(found, mixer, packing):
    cases = torch.load(found / "context.pt")["found"]
    if (mixer, packing) not in cases:
        assert packing != "rows" and mixer not in STEPPED
        return
    case = cases[mixer, packing]
    assert case["losses"][1] == pytest.approx(case["losses"][0], rel=1e-5)
    for name, gradient in case["one"].items():
        assert gradient.abs().max() > 1e-4 or name == "lm_head.weight", name
        torch.testing.assert_close(case["two"][name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("mixer", STEPPED)
def test_what_is_computed_again_is_not_exchanged_again(found, mixer):
    """Once per layer and direction; a shard gives one neighbour forward what it gets from it backward."""
    cases = torch.load(found / "context.pt")["found"]
    layers, messages = 2, 2 if mixer == "palimpsa_d" else 4  # the convolution's inputs; and the state that is handed on
    for packing in PACKINGS:
        for number, counted in enumerate(cases[mixer, packing]["exchanges"]):
            neighbours = 1 if number in (0, SHARDS - 1) else 2
            expected = {"isend": messages * neighbours, "recv": messages * neighbours}
            expected |= {"all_gather": 2 * layers} if mixer == "palimpsa_d" else {}
            assert counted.pop("the same with a call between"), (packing, number)
            assert counted == expected, (packing, number)


def test_what_cannot_be_cut_is_refused(found):
    refused = torch.load(found / "context.pt")["refused"]
    assert refused == {
        "attention": "context_parallel: layer 0 is 'attention', expected a memory of fixed size",
        "padding": "attention_mask: context parallelism takes whole or packed rows (cu_seqlens), got padding",
        "short": "input_ids: got rows of 5 tokens to be cut, expected at least 9 (3 shards of 3)",
        "cache": "use_cache: context parallelism is for training, expected False",
    }


# Runs


@pytest.mark.parametrize("name", ["two, then one", "one, then two", "context"])
def test_a_run_is_the_same_on_any_number_of_processes(found, name):
    assert_same_curve(found / "one", found / name)
    assert results(found / name)["steps_this_call"] == (6 if name == "context" else 4)
    assert (found / name / "final" / "config.json").read_text() == (found / "one" / "final" / "config.json").read_text()


def test_a_checkpoint_of_several_processes_is_one_of_one(found):
    one, two = (torch.load(found / name / "checkpoint-6" / "optimizer.pt") for name in ("one", "one, then two"))
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for number, state in one["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(two["state"][number][name], value, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("name", "code"), [("Ctrl-C", 130), ("SIGTERM", 143)])
def test_a_signal_to_one_of_two_processes_ends_both_after_the_same_step(found, name, code):
    assert (found / f"{name}.codes").read_text() == repr([code, code])
    (checkpoint,) = checkpoints(found / name)
    assert step_of(checkpoint) == 3
    check_seal(checkpoint, identity(read_run(found / name)))
    assert not (found / name / "final").exists()


def test_results_say_how_many_processes_there_were(found):
    for name, processes, parallel, context in (("one", 1, None, 1), ("context", 2, "ddp", 2)):
        settings = json.loads((found / name / "results.json").read_text())["settings"]
        assert (settings["processes"], settings["parallel"], settings["context_parallel"]) == (
            processes, parallel, context,
        )  # fmt: skip
    assert "| processes | 2 (ddp), 2 to a row |" in (found / "context" / "final" / "README.md").read_text()
    assert "| processes | 1 |" in (found / "one" / "final" / "README.md").read_text()


@pytest.mark.slow
def test_runs_of_two_processes_of_which_one_is_killed_end_with_the_same_bits(tmp_path_factory):
    folder = computed(tmp_path_factory, "killed")
    for name in ("ddp True", "fsdp2 False", "fsdp2 True"):
        for kill in ("step", "save"):
            output = folder / f"{name} killed in a {kill}"
            assert results(output)["steps_this_call"] == 4  # from checkpoint-2
            assert_same_curve(folder / name, output, bitwise=True)
            assert [step_of(checkpoint) for checkpoint in checkpoints(output)] == [4, 6]
            assert not list(output.glob(".staging*"))
