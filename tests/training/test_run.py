import dataclasses
import json
import math
import random
import re
import shutil
import signal
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from metaplastic.evaluation.curves import curves_page
from metaplastic.models import MetaplasticForCausalLM
from metaplastic.tasks.text import byte_tokenizer
from metaplastic.training import MetaplasticTrainer, TrainConfig, train
from metaplastic.training.checkpoint import STAGING, checkpoints, step_of
from metaplastic.training.folder import claim
from metaplastic.training.saved import load_model

from .rows import packed_rows

WHAT_IS_TIMED = {"tokens_per_second", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


def logged(result):
    """What a run logs, but for what depends on the clock and on where a call began (the last entry, "train_loss")."""
    history = result["measurements"]["history"]
    return [
        {name: value for name, value in entry.items() if name not in WHAT_IS_TIMED}
        for entry in history
        if "train_loss" not in entry
    ]


def assert_same_run(a, b, *, only_results=False):
    """The same weights, bit for bit, the same logged losses and the same results."""
    weights = [load_file(folder / "final" / "model.safetensors") for folder in (a, b)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    found = [json.loads((folder / "results.json").read_text()) for folder in (a, b)]
    for name in ("eval_loss", "eval_tokens", "tokens_seen"):
        assert found[0]["measurements"][name] == found[1]["measurements"][name], name
    if not only_results:
        assert logged(found[0]) == logged(found[1])


class Stop(Exception):
    pass


# Resuming


@pytest.mark.parametrize("stops", [[7], [1, 4, 6, 9]])
def test_a_stopped_run_resumes_to_the_same_bits(tiny, tmp_path, monkeypatch, undisturbed, stops):
    original = MetaplasticTrainer.training_step
    saved = 0
    for stop in stops:
        seen = []

        def step(self, *args, stop=stop, seen=seen):
            seen.append(self.state.global_step)
            if self.state.global_step == stop:
                raise Stop
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(MetaplasticTrainer, "training_step", step)
            with pytest.raises(Stop):
                train(tiny(), tmp_path / "stopped")
        assert seen[0] == saved
        saved = (stop // 3) * 3  # every third step
    result = train(tiny(), tmp_path / "stopped")
    assert result["measurements"]["steps_this_call"] == 10 - (stops[-1] // 3) * 3
    assert_same_run(tmp_path / "stopped", undisturbed)


def test_the_run_of_these_tests_is_not_too_easy(undisturbed):
    """More than an epoch, an uneven last accumulation, documents within rows, and a loss that falls."""
    result = json.loads((undisturbed / "results.json").read_text())
    entries = logged(result)
    assert entries[-1]["epoch"] > 1
    assert [entry["step"] for entry in entries if "loss" in entry] == [3, 6, 9, 10]
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [4, 8, 10]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    assert result["measurements"]["tokens_seen"] % (3 * 3 * 32) != 0


def test_a_run_killed_anywhere_resumes_to_the_same_bits(tiny, tmp_path, undisturbed, nursery):
    """Killed (SIGKILL) at any step, and while any file or folder is written, flushed, renamed or deleted."""
    job = {"function": "train_and_die", "arguments": {"config": dataclasses.asdict(tiny())}}
    dangers = [2, *sorted(random.Random(0).sample(range(3, 100), 7))]  # 2: before the folder is claimed
    outputs = [tmp_path / f"killed at {at}" for at in dangers]
    first = [
        job | {"arguments": job["arguments"] | {"output": str(output), "at": at}}
        for output, at in zip(outputs, dangers, strict=True)
    ]
    codes = [code for n in range(0, len(first), 2) for code in nursery.run(*first[n : n + 2])]
    assert set(codes) == {-signal.SIGKILL}, nursery.log.read_text()
    reached = {max((step_of(c) for c in checkpoints(o)), default=0) for o in outputs}
    assert len(reached) >= 3, reached  # deaths all along the run
    left = [o for o in outputs if list(o.glob(f"{STAGING}*"))]
    assert left, "no death within a save"
    for output in outputs:
        for checkpoint in checkpoints(output):
            assert torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
            assert load_file(checkpoint / "model.safetensors")
            assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step_of(checkpoint)
    job["environment"] = {"METAPLASTIC_PROGRESS": "1"}  # with or without a bar is one run
    second = [job | {"arguments": job["arguments"] | {"output": str(output)}} for output in outputs]
    codes = [code for n in range(0, len(second), 2) for code in nursery.run(*second[n : n + 2])]
    assert set(codes) == {0}, nursery.log.read_text()
    for output in outputs:
        assert_same_run(output, undisturbed)
        left = {path.name for path in output.iterdir() if not path.name.startswith(".run.json.")}
        assert left == {path.name for path in undisturbed.iterdir()}


def test_a_run_without_checkpoints_starts_again(tiny, tmp_path, nursery):
    config = tiny(save_every=0, eval_every=0, steps=4)
    job = {
        "function": "train_and_die",
        "arguments": {"config": dataclasses.asdict(config), "output": str(tmp_path / "a")},
    }
    assert nursery.run(job | {"arguments": job["arguments"] | {"at": 5}}) == [-signal.SIGKILL]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {".lock", "run.json"}
    train(config, tmp_path / "a")
    train(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {".lock", "final", "results.json", "run.json"}


def test_a_finished_run_is_not_run_again(tiny, undisturbed, monkeypatch, caplog):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    monkeypatch.setattr(MetaplasticTrainer, "train", None)
    again = train(tiny(), undisturbed)
    assert again == json.loads((undisturbed / "results.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before
    assert "nothing to do" in caplog.text


def test_a_run_killed_after_its_last_step_is_only_finished(tiny, undisturbed, tmp_path):
    first = json.loads((undisturbed / "results.json").read_text())
    weights = load_file(undisturbed / "final" / "model.safetensors")
    (undisturbed / "results.json").unlink()
    again = train(tiny(), undisturbed)
    assert again["measurements"]["steps_this_call"] == 0
    for name in ("eval_loss", "eval_tokens", "tokens_seen"):
        assert again["measurements"][name] == first["measurements"][name]
    for name, value in load_file(undisturbed / "final" / "model.safetensors").items():
        assert torch.equal(value, weights[name])


# The folder


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_run_is_refused_and_says_what_differs(tiny, undisturbed):
    before = listing(undisturbed)
    with pytest.raises(
        ValueError, match=r"output: .* another run \(learning_rate was 0.003 and is 0.1, seed was 0 and is 1\)"
    ):
        train(tiny(learning_rate=0.1, seed=1), undisturbed)
    assert listing(undisturbed) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_folders_and_files_are_refused(tiny, tmp_path, overwrite):
    full = tmp_path / "full"
    (full / "checkpoint-3").mkdir(parents=True)
    (full / "checkpoint-3" / "thesis.txt").write_text("x")
    (full / "run.json").write_text('{"name": "something else"}')
    before = listing(full)
    with pytest.raises(ValueError, match=r"output: .* no run of ours, expected a new or empty folder"):
        train(tiny(), full, overwrite=overwrite)
    assert listing(full) == before
    with pytest.raises(ValueError, match=r"output: .* is a file, expected a folder"):
        train(tiny(), full / "run.json", overwrite=overwrite)
    assert listing(full) == before


def test_overwriting_starts_afresh_and_deletes_only_what_a_run_writes(tiny, undisturbed, tmp_path, monkeypatch):
    mine = {"notes.txt", "checkpoint-best/notes.txt", "curves/notes.txt", "curves/memory-0.png", "tensorboard/a/events"}
    for name in (*mine, "tensorboard/events.out.tfevents.1.here.2.0"):
        (undisturbed / name).parent.mkdir(exist_ok=True, parents=True)
        (undisturbed / name).write_text("mine")
    record = json.loads((undisturbed / "results.json").read_text())
    curves_page({"run": record}, undisturbed / "curves")
    pages = {f"curves/{name}" for name in ("index.html", "curves.png", "memory.png")}
    assert set(listing(undisturbed)) > mine | pages and "eval_layer_0_window" in str(record)

    def stop(self, *args):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(MetaplasticTrainer, "training_step", stop)
        with pytest.raises(Stop):
            train(tiny(seed=1), undisturbed, overwrite=True)
    # Nothing of the old run can be taken for a part of the new one.
    assert set(listing(undisturbed)) == {".lock", "run.json"} | mine
    for name in mine - {"notes.txt", "checkpoint-best/notes.txt"}:
        (undisturbed / name).unlink()
    train(tiny(seed=1), undisturbed)
    train(tiny(seed=1), tmp_path / "new")
    assert_same_run(undisturbed, tmp_path / "new")
    assert (
        (undisturbed / "notes.txt").read_text() == (undisturbed / "checkpoint-best" / "notes.txt").read_text() == "mine"
    )
    (undisturbed / "curves").mkdir(exist_ok=True)
    curves_page({"run": record}, undisturbed / "curves")
    claim(tiny(seed=2), undisturbed, {})
    assert not (undisturbed / "curves").exists()  # of which nothing is left


def test_wrong_input_claims_no_folder(tiny, tmp_path):
    for wrong in (
        {"files": ("missing.txt",)},
        {"mixer": "mamba7"},
        {"report_to": ("mamba7",)},
        {"tokenizer": str(tmp_path)},
        {"block_length": 10**6},
    ):
        with pytest.raises((ValueError, OSError)):
            train(tiny(**wrong), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises((ValueError, OSError)):
        train(tiny(model=str(tmp_path), **OWN_SIZES), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# What is trained


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, ">= 1"),
        ("batch_size", 0, ">= 1"),
        ("warmup", -1, ">= 0"),
        ("weight_decay", math.nan, ">= 0"),
        ("learning_rate", math.nan, "> 0"),
        ("learning_rate", math.inf, "> 0 and finite"),
        ("weight_decay", math.inf, ">= 0 and finite"),
        ("seed", 2**32, r"< 2\*\*32"),
        ("layers", 2, "given by the saved model"),
        ("warmup", 0.5, "a whole number, got"),
        ("steps", math.nan, "a whole number, got"),
        ("seed", True, "a whole number, got"),
        ("learning_rate", "3", "a number, got"),
        ("bf16", "no", "True or False, got"),
        ("separator", 1, "a string, got"),
        ("files", 0, "names or a list of them, got"),
        ("files", ("",), "names or a list of them, got"),
    ],
)
def test_bad_settings_are_named(name, value, expected):
    model = {"model": "somewhere"} if name == "layers" else {}
    value, given = re.escape(str(value)), value
    with pytest.raises(ValueError, match=f"{name} .*{expected}.*{value}|{name} .*{expected}|{name} .*{value}"):
        TrainConfig(**({name: given} | model))


def test_files_may_be_one_path_or_several(tmp_path):
    assert TrainConfig(files=tmp_path).files == (str(tmp_path),)
    assert TrainConfig(files="a.txt").files == ("a.txt",)
    assert TrainConfig(files=[tmp_path, "b"]).files == (str(tmp_path), "b")


OWN_SIZES = {
    field.name: field.default
    for field in dataclasses.fields(TrainConfig)
    if field.name in ("hidden_size", "layers", "heads", "intermediate_size")
}


def test_training_continues_from_a_saved_model(tiny, undisturbed, tmp_path):
    before = load_file(undisturbed / "final" / "model.safetensors")
    result = train(tiny(model=str(undisturbed), steps=1, learning_rate=1e-9, **OWN_SIZES), tmp_path / "next")
    first = json.loads((undisturbed / "results.json").read_text())
    assert result["measurements"]["eval_loss"] == pytest.approx(first["measurements"]["eval_loss"], abs=1e-4)
    for name, value in load_file(tmp_path / "next" / "final" / "model.safetensors").items():
        torch.testing.assert_close(value, before[name], atol=1e-6, rtol=0)


@pytest.fixture
def words(tmp_path):
    """A saved tokenizer with a vocabulary of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0, "?": 1, "the": 2, "memory": 3, "knows": 4, "is": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="?")
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_ids_that_no_token_has_get_rows_too(tiny, tmp_path):
    """The embedding is as long as the largest id asks, and a saved model that is too short is found out first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0, "?": 1, "the": 2, "memory": 30, "knows": 40}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="?").save_pretrained(
        tmp_path / "gaps"
    )
    train(tiny(tokenizer=str(tmp_path / "gaps"), steps=1), tmp_path / "run")
    assert load_file(tmp_path / "run" / "final" / "model.safetensors")["model.embed_tokens.weight"].shape[0] == 41


def test_another_model_under_the_same_name_is_another_run(tiny, undisturbed, tmp_path, monkeypatch):
    config = tiny(model=str(undisturbed), **OWN_SIZES)

    def stop(self, *args):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(MetaplasticTrainer, "training_step", stop)
        with pytest.raises(Stop):  # before there is a checkpoint
            train(config, tmp_path / "next")
    weights = load_file(undisturbed / "final" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, undisturbed / "final" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model: .*undisturbed has changed since .*next was started: choose another"):
        train(config, tmp_path / "next")
    assert train(config, tmp_path / "next", overwrite=True)["measurements"]["steps_this_call"] == 10


@pytest.mark.parametrize("changes", [{"eval_every": 1, "save_every": 2}, {"eval_every": 0, "save_every": 0}])
def test_when_to_evaluate_and_save_decides_nothing(tiny, tmp_path, monkeypatch, undisturbed, changes):
    """A run may go on with others, and computes the same; what this call says is what is done."""
    original = MetaplasticTrainer.training_step

    def step(self, *args):
        if self.state.global_step == 5:
            raise Stop
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MetaplasticTrainer, "training_step", step)
        with pytest.raises(Stop):
            train(tiny(), tmp_path / "run")
    found = train(tiny(**changes), tmp_path / "run")["measurements"]
    assert found["steps_this_call"] == 7
    assert_same_run(tmp_path / "run", undisturbed, only_results=True)
    evaluated = [entry["step"] for entry in found["history"] if "eval_loss" in entry]
    assert evaluated == ([4, 5, 6, 7, 8, 9, 10] if changes["eval_every"] else [10])
    saved = [path.name for path in checkpoints(tmp_path / "run")]
    assert saved == (["checkpoint-8", "checkpoint-10"] if changes["save_every"] else ["checkpoint-3"])


def test_groups_are_of_the_mixers_that_have_them(tiny, tmp_path):
    train(tiny(mixer="mamba2", heads=4, groups=2, steps=1), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["mixer_options"]["mamba2"]["num_groups"] == 2
    assert "| 4 in 2 groups, key size 4" in (tmp_path / "run" / "final" / "README.md").read_text()
    with pytest.raises(
        ValueError, match=r"groups is for mixers whose heads share keys \(.*mamba2.*\), got 2 with palimp"
    ):
        train(tiny(groups=2), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_ablation_goes_on_in_its_metaplastic_form(tiny, tmp_path):
    train(tiny(mixer="mamba2", steps=2), tmp_path / "mamba2")
    config = tiny(model=str(tmp_path / "mamba2"), plasticity=0.5, steps=4, **OWN_SIZES)
    train(config, tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert model.config.mixers == ["palimpsa_m"]
    assert "mamba2, in its metaplastic form, with plasticity 0.5 |" in (
        (tmp_path / "run" / "final" / "README.md").read_text()
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plasticity"] == 0.5
    with pytest.raises(ValueError, match=r"another run \(plasticity was 0.5 and is 1.0\)"):
        train(dataclasses.replace(config, plasticity=1.0), tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    shutil.rmtree(tmp_path / "run" / "final")
    train(config, tmp_path / "run")  # resumed: the new form, with the weights it had
    again = load_model(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_plasticity_0_changes_nothing_to_begin_with(tiny, tmp_path):
    first = train(tiny(mixer="mamba2", steps=2), tmp_path / "mamba2")["measurements"]["eval_loss"]
    config = tiny(model=str(tmp_path / "mamba2"), plasticity=0.0, steps=1, learning_rate=1e-12, **OWN_SIZES)
    assert train(config, tmp_path / "run")["measurements"]["eval_loss"] == pytest.approx(first, abs=1e-5)
    with pytest.raises(ValueError, match="model must have a layer that is an ablation"):
        train(dataclasses.replace(config, model=str(tmp_path / "run"), plasticity=0.1), tmp_path / "other")
    with pytest.raises(ValueError, match="plasticity is for model, which is not given, got 0.1"):
        TrainConfig(plasticity=0.1)


def test_a_saved_model_brings_its_tokenizer(tiny, words, tmp_path):
    train(tiny(tokenizer=words, steps=1), tmp_path / "a")
    following = tiny(model=str(tmp_path / "a"), steps=1, **OWN_SIZES)
    train(following, tmp_path / "b")
    own = AutoTokenizer.from_pretrained(tmp_path / "b" / "final")
    assert own.get_vocab() == AutoTokenizer.from_pretrained(words).get_vocab()
    assert MetaplasticForCausalLM.from_pretrained(tmp_path / "b" / "final").config.vocab_size == 6
    with pytest.raises(ValueError, match="tokenizer: 'bytes' is not the one saved with model"):
        train(dataclasses.replace(following, tokenizer="bytes"), tmp_path / "c")
    for file in (tmp_path / "a" / "final").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"tokenizer: 'bytes' has 258 tokens, model .* 6"):
        train(dataclasses.replace(following, tokenizer="bytes"), tmp_path / "c")
    with pytest.raises(OSError, match=r"tokenizer: none is saved in .*final', expected 'bytes', a folder"):
        train(following, tmp_path / "c")
    train(dataclasses.replace(following, tokenizer=words), tmp_path / "c")


def test_without_a_model_the_tokenizer_is_bytes(undisturbed):
    assert AutoTokenizer.from_pretrained(undisturbed / "final").get_vocab() == byte_tokenizer().get_vocab()


def test_bf16_trains_on_a_cpu_and_saves_float32(tiny, tmp_path):
    result = train(tiny(bf16=True, steps=3), tmp_path / "run")
    assert math.isfinite(result["measurements"]["eval_loss"])
    assert {value.dtype for value in load_file(tmp_path / "run" / "final" / "model.safetensors").values()} == {
        torch.float32
    }


def test_no_pickled_arguments_anywhere(undisturbed):
    suffixes = {path.suffix for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"}
    assert suffixes == {".json", ".safetensors", ".pt", ".pth", ".md"}
    assert {path.name for path in (undisturbed / "final").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_results_say_what_ran(tiny, undisturbed):
    result = json.loads((undisturbed / "results.json").read_text())
    assert result["seeds"] == [0]
    assert result["settings"]["learning_rates_tried"] == [0.003]
    run, given = json.loads((undisturbed / "run.json").read_text()), json.loads(json.dumps(dataclasses.asdict(tiny())))
    other = ("split", "text_column", "held_out_documents", "shuffle_window", "max_bytes")  # not of files
    assert result["settings"] | given | dict.fromkeys(other) == result["settings"]
    assert result["settings"]["data_sha256"] == run["data_sha256"] and run["split"] == "train"
    assert result["environment"]["backends"]["palimpsa"]
    measured = result["measurements"]
    entries = [entry for entry in measured["history"] if "eval_loss" in entry]
    assert measured["eval_loss"] == entries[-1]["eval_loss"]
    assert len(entries) == 3  # the last step is evaluated once


@pytest.mark.parametrize("bar", [False, True])
def test_a_run_prints_nothing_to_standard_output(tiny, tmp_path, monkeypatch, capsys, bar):
    if bar:
        monkeypatch.setenv("METAPLASTIC_PROGRESS", "1")
    train(tiny(steps=2), tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    assert ("2/2" in err) == bar


# Several processes


def test_two_processes_take_the_step_of_one(network, nursery, tmp_path):
    """Unequal label counts in the halves of a batch, and an evaluation set that does not divide evenly."""
    network().save_pretrained(tmp_path / "model")
    torch.save({"train": packed_rows(8), "eval": packed_rows(5, seed=2)}, tmp_path / "rows.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = []
    for rank in (None, 0, 1):
        output = tmp_path / ("one" if rank is None else "two")
        output.mkdir(exist_ok=True)
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = {"rows": str(tmp_path / "rows.pt"), "output": str(output), "model": str(tmp_path / "model")}
        arguments |= {"per_device": 4 if rank is None else 2, "accumulation": 2}
        jobs.append(
            {"function": "one_step", "arguments": arguments, "environment": {} if rank is None else environment}
        )
    assert nursery.run(*jobs) == [0, 0, 0], nursery.log.read_text()
    one, two = (torch.load(tmp_path / name / "found.pt") for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["evaluation"]["eval_tokens"] == one["evaluation"]["eval_tokens"]
    assert two["evaluation"]["eval_loss"] == pytest.approx(one["evaluation"]["eval_loss"], abs=1e-6)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_changed_files_are_not_taken_for_the_same_run(tmp_path):
    """A run over other text is another run, finished or not, even if nothing in its configuration changed."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"this is text {name} " * 60)
    config = TrainConfig(
        files=(str(folder),), hidden_size=8, layers=1, heads=1, intermediate_size=0, block_length=16, batch_size=2,
        steps=2, save_every=1, eval_every=0, held_out=0.3,
    )  # fmt: skip
    first = train(config, tmp_path / "out")["measurements"]["eval_loss"]
    assert train(config, tmp_path / "out")["measurements"]["eval_loss"] == first
    (folder / "a.txt").write_text("quite another text " * 60)
    with pytest.raises(ValueError, match="files: their text has changed"):
        train(config, tmp_path / "out")
    assert train(config, tmp_path / "out", overwrite=True)["measurements"]["eval_loss"] != first
