import dataclasses
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

from metaplastic import cli, terminal
from metaplastic.evaluation import doctor
from metaplastic.ops import accuracy
from metaplastic.training import MetaplasticTrainer, TrainConfig
from metaplastic.training.checkpoint import checkpoints, step_of

SIZES = "--hidden-size 16 --layers 1 --heads 2 --intermediate-size 16 --block-length 32 --batch-size 2"
SMALL = [*SIZES.split(), "--held-out", "0.5", "--warmup", "1", "--eval-every", "5", "--save-every", "4"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in (1, 2):
        words = random.Random(number).choices(["the", "memory", "knows", "what", "it", "holds"], k=60)
        (folder / f"{number}.txt").write_text(" ".join(words))
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture(autouse=True)
def _leave_no_trace():
    """The command sets up this process's logging, warnings and threads as its own."""
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    level, show = cli.logger.level, warnings.showwarning
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()
    cli.logger.setLevel(level)
    cli.logger.handlers.clear()
    warnings.showwarning = show


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the entry point here: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["metaplastic", *map(str, arguments)])
        cli.logger.handlers.clear()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command in a process of its own."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments, code=("-m", "metaplastic.cli")):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",  # idle threads of two processes on two cores would starve each other
            "METAPLASTIC_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
        }
        environment.pop("METAPLASTIC_PROGRESS", None)
        return subprocess.Popen(
            [sys.executable, *code, *map(str, arguments)],
            env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return run


def finish(process):
    out, err = process.communicate(timeout=120)
    # The first runs on a machine say that they compile; nothing else may be heard.
    heard = [line for line in err.splitlines(keepends=True) if not line.startswith("compiling the ")]
    return process.returncode, out, "".join(heard)


def one_line(err):
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("compiling the ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def test_a_killed_command_goes_on_and_its_model_speaks(start, command, texts, tmp_path):
    arguments = ["train", texts, *SMALL, "--steps", 24, "-o"]
    process = start(*arguments, tmp_path / "killed")
    until = time.monotonic() + 100
    while not checkpoints(tmp_path / "killed") and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    done = step_of(checkpoints(tmp_path / "killed")[-1])
    code, out, err = command(*arguments, tmp_path / "killed")
    assert code == 0, err
    assert f"resuming from {tmp_path / 'killed' / f'checkpoint-{done}'}" in err
    assert "step 24 of 24: loss" in err and "warning" not in err
    result = json.loads((tmp_path / "killed" / "results.json").read_text())
    assert result["measurements"]["steps_this_call"] == 24 - done
    assert result["environment"]["command"][1] == "train"
    assert f"{result['measurements']['eval_loss']:.4f}" in out

    code, out, _ = command(*arguments, tmp_path / "undisturbed")
    assert code == 0
    first, second = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("killed", "undisturbed"))
    assert all(torch.equal(first[name], second[name]) for name in first | second)

    greedy = ("--temperature", 0, "--max-new-tokens", 5)
    code, out, err = finish(start("generate", tmp_path / "killed", "the memory é", *greedy))
    assert (code, err) == (0, "")
    assert out.startswith("the memory é")
    assert out == command("generate", tmp_path / "undisturbed", "the memory é", *greedy)[1]


def test_doctor_finds_this_machine_healthy(command, monkeypatch):
    """One case of each configuration: tests/ops/test_parity.py has the others."""
    monkeypatch.setattr("metaplastic.ops.accuracy.CASES", accuracy.CASES[:1])
    code, out, err = command("doctor")
    assert code == 0, out + err
    assert "FAILED" not in out
    for configuration in ("palimpsa/cpu/cpu/float32", "palimpsa/chunked/cpu/bfloat16", "additive/chunked/cpu/float64"):
        assert [line for line in out.splitlines() if configuration in line and " ok " in line], configuration
    assert "palimpsa: auto on cpu" in out and "torch" in out


def test_help_and_import_are_light(start):
    loaded = (
        "import metaplastic.cli, sys; print([m for m in ('transformers', 'matplotlib', 'numba') if m in sys.modules])"
    )
    light, shown = start(code=("-c", loaded)), start("--help")
    assert finish(light) == (0, "[]\n", "")
    code, out, err = finish(shown)
    assert (code, err) == (0, "")
    assert all(verb in out for verb in ("train", "generate", "doctor", "demo", "bench"))


def test_a_bad_command_ends_in_one_line_and_code_2(command, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("metaplastic.tasks.text.unreachable", lambda: "no network")  # tests/tasks/test_hub.py asks
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    code, out, err = command("train", texts, "--tokenizer", "no-one/nothing", "-o", tmp_path / "run")
    assert (code, out) == (2, "")
    asking, line = err.splitlines()
    assert asking == "asking the Hugging Face hub for the tokenizer no-one/nothing"
    assert line.startswith("error: tokenizer: got 'no-one/nothing', expected 'bytes', a folder with a saved tokenizer")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    outcome = CliRunner().invoke(cli.app, ["train", str(texts), *SMALL, "--steps", "2", "-o", str(folder)])
    assert outcome.exit_code == 0, outcome.output
    unfolded = "".join(line.rsplit("│", 2)[1].strip() for line in outcome.output.splitlines() if "│" in line)
    assert "held-out loss" in outcome.output and f"{folder}/final{folder}/results.json" in unfolded
    assert (folder / "curves" / "index.html").is_file() and f"{folder}/curves/index.html" in unfolded
    return folder


def lose_a_weight(folder):
    weights = load_file(folder / "final" / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "final" / "model.safetensors", metadata={"format": "pt"})


def an_empty_file(tmp_path):
    (tmp_path / "empty.txt").touch()
    return tmp_path / "empty.txt"


def a_folder_without_text(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "image.png").touch()
    return tmp_path / "none"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (lambda t: ["missing.txt"], "files: missing.txt does not exist, expected a file or folder"),
        (lambda t: [an_empty_file(t)], "empty.txt has no text, expected a file with text"),
        (lambda t: [a_folder_without_text(t)], "none has no text, expected text in *.txt"),
        (lambda t: ["--mixer", "mamba7"], "unknown mixer 'mamba7'; known: palimpsa_d, "),
        (lambda t: ["--steps", "0"], "steps must be >= 1, got 0"),
        (lambda t: ["--held-out", "1"], "held_out: got 1.0, expected a share above 0 and below 1"),
        (lambda t: ["--block-length", "1000"], "expected at least block_length = 1000"),
        (lambda t: ["--tokenizer", t], "expected 'bytes', a folder with a saved tokenizer"),
        (lambda t: ["--model", t / "nowhere", "--layers", "4"], "model: "),
        (lambda t: ["--report-to", "my-tracker"], "report_to: got 'my-tracker', expected some of azure_ml, "),
        (lambda t: ["--dataset", t], "files is for files, and dataset is given"),
        (lambda t: ["--text-column", "body"], "text_column is for dataset, which is not given, got 'body'"),
        (lambda t: ["-o", an_empty_file(t)], "empty.txt is a file, expected a folder"),
    ],
)
def test_bad_input_of_train_is_one_line_and_code_2(command, texts, tmp_path, arguments, expected):
    given = arguments(tmp_path)
    sizes = [] if "--model" in given else SMALL
    files = [] if Path(given[0]).suffix or "none" in str(given[0]) else [texts]
    output = [] if "-o" in given else ["-o", tmp_path / "run"]
    code, out, err = command("train", *files, *sizes, *output, *given)
    line = one_line(err)
    assert (code, out) == (2, "")
    assert line.startswith("error: ") and expected in line
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_output_is_one_line_and_overwriting_is_offered(command, texts, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    code, _, err = command("train", texts, *SMALL, "--steps", 3, "-o", folder)
    assert code == 2
    assert "holds another run (steps was 2 and is 3)" in one_line(err) and "--overwrite" in err
    assert command("train", texts, *SMALL, "--steps", 3, "-o", folder, "--overwrite")[0] == 0
    assert json.loads((folder / "results.json").read_text())["settings"]["steps"] == 3
    code, out, err = command("train", texts, *SMALL, "--steps", 3, "-o", folder)
    assert code == 0
    assert one_line(err).endswith("holds this run, finished: nothing to do") and "held-out loss" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--temperature", "-1"], "temperature must be >= 0, got -1.0"),
        (["--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be >= 1, got 0"),
    ],
)
def test_bad_input_of_generate_is_one_line_and_code_2(command, trained, arguments, expected):
    code, out, err = command("generate", trained, "the", *arguments)
    assert (code, out, one_line(err)) == (2, "", f"error: {expected}")


def test_a_model_that_is_not_there_or_not_whole_is_one_line(command, trained, tmp_path):
    code, _, err = command("generate", tmp_path / "nowhere")
    assert code == 2 and "model: " in one_line(err) and "does not exist" in err
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    lose_a_weight(folder)
    code, _, err = command("generate", folder, "the")
    assert code == 2 and "missing keys: model.norm.weight" in one_line(err)


def test_a_fault_of_ours_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(cli, "_quiet_transformers", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["metaplastic", "generate", "x"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_the_traceback_of_a_users_error_can_be_had(monkeypatch, tmp_path):
    monkeypatch.setenv("METAPLASTIC_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["metaplastic", "generate", str(tmp_path / "nowhere")])
    with pytest.raises(FileNotFoundError):
        cli.main()


def test_an_interrupted_run_says_how_to_go_on(command, texts, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("metaplastic.training.train", interrupt)
    code, _, err = command("train", texts, "-o", tmp_path / "run")
    assert code == 130
    assert "interrupted before there was a checkpoint in" in one_line(err) and "begins again" in err


def test_ctrl_c_saves_a_checkpoint(command, texts, tmp_path, monkeypatch):
    original = MetaplasticTrainer.training_step

    def training_step(self, *args):
        if self.state.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(MetaplasticTrainer, "training_step", training_step)
    code, out, err = command("train", texts, *SMALL, "--steps", 20, "-o", tmp_path / "run")
    assert (code, out) == (130, "")
    assert step_of(checkpoints(tmp_path / "run")[-1]) == 6
    assert "interrupted: saving a checkpoint after this step" in err and "Traceback" not in err
    checkpoint = tmp_path / "run" / "checkpoint-6"
    assert err.splitlines()[-1] == f"interrupted: the same command goes on from {checkpoint}"


def test_a_dataset_is_streamed(command, tmp_path):
    (tmp_path / "data").mkdir()
    lines = (json.dumps({"body": f"the memory knows what number {n} holds " * 3}) + "\n" for n in range(20))
    (tmp_path / "data" / "train.jsonl").write_text("".join(lines))
    sizes = [*SIZES.split(), "--warmup", 1, "--steps", 2, "-o", tmp_path / "run"]
    arguments = ["train", "--dataset", tmp_path / "data", "--held-out-documents", 3, *sizes]
    code, out, err = command(*arguments, "--text-column", "body")
    assert code == 0, err
    assert "dataset data, split train, column body, streamed; held out: the first 3 documents" in err
    assert "held-out loss" in out and json.loads((tmp_path / "run" / "results.json").read_text())["settings"]["dataset"]
    code, out, err = command(*arguments, "-o", tmp_path / "other")
    assert code == 2
    assert "has no column 'text', expected one of 'body'" in one_line(err)


def test_warnings_are_one_line(command, monkeypatch):
    monkeypatch.setattr(cli, "_quiet_transformers", lambda: warnings.warn("ops.x runs the slow backend", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = command("generate", "nowhere")
    assert code == 2
    assert err.splitlines()[0] == "warning: ops.x runs the slow backend"


@pytest.mark.parametrize("status", ["ok", "FAILED"])
def test_doctor_exits_1_if_anything_failed(command, monkeypatch, status):
    checks = [
        doctor.Check("op/one/cpu/float32", "ok", "largest relative error 1.0e-07", 1e-7, 0.1),
        doctor.Check("op/two/cpu/float32", status, "output: error [bold]5[/bold]", 0.5, 0.1),
        doctor.Check("op/three/cuda/float32", "unavailable", "runs on cuda tensors, not on cpu"),
    ]
    monkeypatch.setattr(doctor, "check_backends", lambda: iter(checks))
    code, out, _ = command("doctor")
    assert code == (status == "FAILED")
    assert ("1 of 2 configurations failed" in out) == (status == "FAILED")
    assert ("all 2 configurations are right" in out) == (status == "ok")
    assert "[bold]5[/bold]" in out  # shown, not obeyed
    assert "op/three/cuda/float32" in out and "unavailable" in out


def test_doctor_says_what_it_cannot_remember(command, monkeypatch):
    checks = [
        doctor.Check("op/one/cpu/float32", "FAILED", "output: error 5", 0.5, 0.1),
        doctor.Check("block list", "unwritable", "what failed cannot be remembered: disk"),
    ]
    monkeypatch.setattr(doctor, "check_backends", lambda: iter(checks))
    code, out, _ = command("doctor")
    assert code == 1 and "op/one/cpu/float32" in out
    assert "the list of what failed cannot be written" in out
    assert "1 of 1 configurations failed and this cannot be remembered" in " ".join(out.split())


def test_help_names_the_mixers():
    from metaplastic.layers import MIXERS

    assert tuple(MIXERS) == terminal.MIXER_NAMES
    for verb in ("train", "size"):
        shown = CliRunner().invoke(cli.app, [verb, "--help"], env={"COLUMNS": "300"}).output
        assert all(name in shown for name in MIXERS) and "--groups" in shown


def test_the_version():
    import metaplastic

    found = CliRunner().invoke(cli.app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"metaplastic {metaplastic.__version__}\n")


def test_size_of_a_saved_model_takes_no_sizes(command, trained, tmp_path):
    assert command("size", trained)[0] == 0
    for given, expected in ((("--heads", 7), "heads"), (("--mixer", "mamba2"), "mixer"), (("--groups", 2), "groups")):
        code, out, err = command("size", trained, *given)
        assert (code, out) == (2, "") and f"{expected} is given by the saved model, got" in one_line(err)
    (tmp_path / "config.json").write_text("{}")
    code, out, err = command("size", tmp_path)
    assert (code, out) == (2, "") and "config.json names no model_type" in one_line(err)


def test_hybrids_and_models_without_a_tokenizer(command, texts, tmp_path):
    """Mixers with commas take turns up the layers; a model saved from Python is told which tokenizer it reads by."""
    out = tmp_path / "run"
    hybrid = ("--mixer", "bayesian,attention", "--layers", 4, "--heads", 2, "--hidden-size", 16, "--steps", 2)
    code, _, err = command("train", texts, *hybrid, "--batch-size", 2, "--block-length", 32, "-o", out)
    assert code == 0, err
    config = json.loads((out / "final" / "config.json").read_text())
    assert config["mixers"] == ["bayesian", "attention"] * 2
    for wrong, message in (("bayesian,lstm", "unknown mixer 'lstm'"), ("mamba2,mamba2,bayesian", "3 names")):
        code, _, err = command("size", "--mixer", wrong)
        assert code == 2 and message in one_line(err)
    for file in (out / "final").glob("*token*"):
        file.unlink()
    for verb in (
        ("generate", out / "final", "ab"),
        ("inspect", out / "final", "--text", "ab", "-o", tmp_path / "seen"),
    ):
        code, _, err = command(*verb)
        assert code == 2 and "none is saved in" in one_line(err) and "expected 'bytes'" in one_line(err)
        code, shown, err = command(*verb, "--tokenizer", "bytes")
        assert code == 0 and shown, err


def test_size_with_groups(command):
    sizes = [command("size", "--mixer", "mamba2", "--groups", groups)[1] for groups in (1, 2)]
    assert sizes[0] != sizes[1] and sizes[0] == command("size", "--mixer", "mamba2")[1]
    code, _, err = command("size", "--groups", 2)
    assert code == 2 and "groups is for mixers whose heads share keys" in one_line(err)


STUDIES = ("forgetting", "correlation", "collision")


@pytest.mark.parametrize("verb", [*(("study", name) for name in STUDIES), ("bench", "ops"), ("demo",)])
def test_a_bad_output_is_found_before_anything_is_computed(command, tmp_path, monkeypatch, verb):
    for name in STUDIES:
        monkeypatch.setattr(f"metaplastic.evaluation.{name}.run_{name}", None)
    monkeypatch.setattr("metaplastic.evaluation.speed.OPERATORS", None)
    monkeypatch.setattr("metaplastic.recipes.demo.run_demo", None)
    file = an_empty_file(tmp_path)
    code, out, err = command(*verb, "-o", file)
    assert (code, out) == (2, "") and f"output: {file} is a file, expected a folder" in one_line(err)
    assert command(*verb, "-o", file / "deeper")[0] == 2


@pytest.mark.parametrize("verb", ["training", "parallel"])
def test_what_needs_a_gpu_does_not_begin_without_one(command, tmp_path, monkeypatch, verb):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = command("bench", verb, "--output", str(tmp_path / "new"))
    assert code == 2 and "recipe: got none" in one_line(err) and "--recipe palimpsa_d" in err
    assert not (tmp_path / "new").exists()


def test_inspect_finds_bad_files_first(command, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("metaplastic.inspection.inspect_text", None)
    (tmp_path / "latin.txt").write_bytes("déjà".encode("latin-1"))
    code, _, err = command("inspect", trained, tmp_path / "latin.txt", "-o", tmp_path / "out")
    assert code == 2 and "latin.txt: expected UTF-8 text, got 0xe9" in one_line(err)
    code, _, err = command("inspect", trained, "--text", "the", "-o", an_empty_file(tmp_path))
    assert code == 2 and "empty.txt is a file, expected a folder" in one_line(err)


def test_train_offers_every_setting_with_its_default():
    offered = inspect.signature(cli.train).parameters
    for field in dataclasses.fields(TrainConfig):
        if field.name in ("files", "report_to"):
            assert offered[field.name].default is None and field.default == ()
        elif field.name != "max_bytes":
            assert offered[field.name].default == field.default, field.name
    beside = {"context", "output", "overwrite", "tokens_per_step"}
    assert set(offered) - {field.name for field in dataclasses.fields(TrainConfig)} == beside


def test_a_recipe_is_a_run_that_options_change(command, texts, tmp_path, monkeypatch):
    few = ["--steps", 1, "--warmup", 0, "--block-length", 32, "--batch-size", 2, "--accumulation", 1, "--held-out", 0.5]
    code, _, err = command("train", texts, "--recipe", "palimpsa_d_additive-debug", *few, "-o", tmp_path / "run")
    assert code == 0, err
    run = json.loads((tmp_path / "run" / "results.json").read_text())["settings"]
    assert (run["mixer"], run["hidden_size"], run["heads"]) == ("palimpsa_d_additive", 64, 4)  # the recipe's
    assert (run["steps"], run["block_length"], run["held_out"]) == (1, 32, 0.5)  # what was given
    assert run["recipe"] == "palimpsa_d_additive-debug"
    tokens = ("--recipe", "palimpsa_d_additive-debug", *few[:-4], "--held-out", 0.5, "--tokens-per-step")
    assert command("train", texts, *tokens, 128, "-o", tmp_path / "tokens")[0] == 0
    assert json.loads((tmp_path / "tokens" / "results.json").read_text())["settings"]["accumulation"] == 2
    with monkeypatch.context() as patch:
        runs = []
        patch.setattr(
            "metaplastic.training.train", lambda config, *_, **__: runs.append(config) or {"measurements": {}}
        )
        sizes = ("--tokens-per-step", 192, "--block-length", 32, "--batch-size", 2)
        code, _, err = command("train", texts, *sizes, "-o", tmp_path / "nothing")
        assert code == 2 and "is no finished training run" in one_line(err)  # nothing was measured
        assert runs[0].accumulation == 3
    for given in (("--recipe", "mamba2-debug"), ()):
        shape = ("--block-length", 32, "--batch-size", 2, "--tokens-per-step", 100)
        code, _, err = command("train", texts, *given, *shape, "-o", tmp_path / "other")
        assert code == 2 and "batch_size: got 2 rows of block_length 32, but" in one_line(err)
        code, _, err = command("train", texts, *given, *shape, "--accumulation", 1, "-o", tmp_path / "other")
        assert code == 2 and "tokens_per_step: got 100, and accumulation too" in one_line(err)
    code, _, err = command("train", texts, "--recipe", "palimpsa_d-debug-from-ablation", "-o", tmp_path / "other")
    assert code == 2 and "model: recipe palimpsa_d-debug-from-ablation goes on from" in one_line(err)
