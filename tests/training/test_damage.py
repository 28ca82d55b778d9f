"""What is wrong with a checkpoint is found before anything is computed from it, and what cannot be saved is said."""

import json
import resource
import shutil
from pathlib import Path

import pytest

from metaplastic.training import train
from metaplastic.training.checkpoint import SEAL, checkpoints, saving

from .test_run import Stop, assert_same_run
from .test_streaming import stop_at

READ = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


@pytest.fixture
def unfinished(undisturbed) -> Path:
    """A run that was killed between its last checkpoint and its final model."""
    (undisturbed / "results.json").unlink()
    shutil.rmtree(undisturbed / "final")
    return undisturbed


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "one bit": flip,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_not_used(tiny, unfinished, damage):
    last = unfinished / "checkpoint-10"
    for name in READ:
        content = (last / name).read_bytes()
        (last / name).unlink()
        if (changed := DAMAGES[damage](content)) is not None:
            (last / name).write_bytes(changed)
        what = f"lacks {name}" if damage == "missing" else f"{name} is damaged"
        with pytest.raises(ValueError, match=rf"output: .*checkpoint-10.*{what}.*delete that folder to go on from"):
            train(tiny(), unfinished)
        (last / name).write_bytes(content)
    assert not (unfinished / "results.json").exists()
    assert train(tiny(), unfinished)["measurements"]["steps_this_call"] == 0


def test_the_advice_is_good(tiny, unfinished, finished):
    (unfinished / "checkpoint-10" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="delete that folder to go on from the checkpoint before it"):
        train(tiny(), unfinished)
    shutil.rmtree(unfinished / "checkpoint-10")
    assert train(tiny(), unfinished)["measurements"]["steps_this_call"] == 1
    assert_same_run(unfinished, finished)


def test_a_person_may_write_on_the_card(tiny, unfinished):
    (unfinished / "checkpoint-10" / "README.md").write_text("mine")
    (unfinished / "checkpoint-10" / "notes.txt").write_text("mine")
    train(tiny(), unfinished)


def test_a_checkpoint_of_another_run_or_step_is_refused(tiny, unfinished, tmp_path):
    train(tiny(seed=1), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "checkpoint-10", unfinished / "checkpoint-11")
    with pytest.raises(ValueError, match="checkpoint-11 is a checkpoint of another run"):
        train(tiny(), unfinished)
    shutil.rmtree(unfinished / "checkpoint-11")
    shutil.copytree(unfinished / "checkpoint-9", unfinished / "checkpoint-99")
    with pytest.raises(ValueError, match="checkpoint-99 is the checkpoint of step 9 under another name"):
        train(tiny(), unfinished)


@pytest.mark.parametrize("content", [None, "", "[]", '{"run": "a"}', '{"run": 1, "step": 2, "sha256": 3}'])
def test_a_seal_that_says_nothing_is_an_error(tiny, unfinished, content):
    seal = unfinished / "checkpoint-10" / SEAL
    seal.unlink()
    if content is not None:
        seal.write_text(content)
    with pytest.raises(ValueError, match=r"(has no checkpoint.json|checkpoint.json cannot be read).*delete that"):
        train(tiny(), unfinished)


def test_the_place_in_a_stream_is_sealed_too(streamed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            train(streamed(), tmp_path / "run")
    place = tmp_path / "run" / "checkpoint-3" / "stream.json"
    place.write_text(place.read_text().replace('"position": ', '"position": 1'))
    with pytest.raises(ValueError, match=r"checkpoint-3/stream.json is damaged"):
        train(streamed(), tmp_path / "run")


# Disks that are full


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_checkpoint_that_cannot_be_saved_leaves_the_one_before(tiny, undisturbed, tmp_path, monkeypatch, file):
    """The system refuses to write a file beyond a size, as it does on a full disk."""
    run, allowed = tmp_path / "run", (undisturbed / "checkpoint-9" / file).stat().st_size - 1
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            train(tiny(), run)
    if file == "trainer_state.json":  # smaller than others: only this one
        monkeypatch.setattr("transformers.trainer_callback.TrainerState.save_to_json", full_disk)
        allowed = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, hard))
    try:
        with pytest.raises(
            OSError, match=r"output: checkpoint-6 could not be saved in .*; checkpoint-3 is whole; once"
        ):
            train(tiny(), run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.undo()
    assert [path.name for path in checkpoints(run)] == ["checkpoint-3"]
    assert not list(run.glob(".staging*"))
    train(tiny(), run)
    assert_same_run(run, undisturbed)


def full_disk(*args):
    raise OSError(28, "No space left on device")


def test_a_final_model_that_cannot_be_saved_leaves_the_checkpoint(tiny, unfinished, monkeypatch, finished):
    with monkeypatch.context() as patch:
        patch.setattr("metaplastic.training.trainer.MetaplasticTrainer._save", full_disk)
        with pytest.raises(
            OSError, match=r"output: the final model could not be saved .*No space.*checkpoint-10 is whole"
        ):
            train(tiny(), unfinished)
    assert not list(unfinished.glob(".staging*"))
    train(tiny(), unfinished)
    assert_same_run(unfinished, finished)


def test_a_fault_of_ours_is_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="mat1 and mat2"), saving("x", tmp_path):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(OSError, match=r"output: x could not be saved .*No space left"), saving("x", tmp_path):
        raise Exception("No space left on device (os error 28)")  # as tokenizers raises it


# Runs that have ended


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"measurements": {"eval_loss": 1.0}}'])
def test_results_that_are_none_are_named(tiny, undisturbed, content):
    (undisturbed / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"output: .*results.json holds no results .*delete it, and the same command"):
        train(tiny(), undisturbed)
    (undisturbed / "results.json").unlink()
    train(tiny(), undisturbed)


def test_an_empty_final_folder_is_no_end(tiny, undisturbed, finished):
    for file in (undisturbed / "final").iterdir():
        file.unlink()
    assert train(tiny(), undisturbed)["measurements"]["steps_this_call"] == 0
    assert_same_run(undisturbed, finished)


def test_the_last_evaluation_is_in_the_history_once(tiny, unfinished, finished):
    found = train(tiny(), unfinished)["measurements"]["history"]
    expected = json.loads((finished / "results.json").read_text())["measurements"]["history"]
    assert [entry["step"] for entry in found if "eval_loss" in entry] == [4, 8, 10]
    assert [entry["step"] for entry in expected if "eval_loss" in entry] == [4, 8, 10]
