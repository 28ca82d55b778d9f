"""One run, one folder: a second process is kept out, and a dead one keeps nobody out."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metaplastic.training import MetaplasticTrainer, train
from metaplastic.training.folder import alone, holds_this_run

from .test_run import OWN_SIZES

HOLD = """
import sys, time
from pathlib import Path
from metaplastic.training.folder import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_kept_out_until_it_dies(tiny, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(
                ValueError, match=r"output: another process is training in .*run: wait for it, or choose"
            ):
                train(tiny(steps=1), tmp_path / "run")
            assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
        finally:
            holder.send_signal(signal.SIGKILL)
    train(tiny(steps=1), tmp_path / "run")
    train(tiny(steps=1, seed=1), tmp_path / "run", overwrite=True)


def test_of_processes_that_train_together_the_first_holds_it(tmp_path, monkeypatch):
    with alone(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with alone(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="another process"), alone(tmp_path):
            pass
    with alone(tmp_path):
        pass


def test_settings_of_later_versions_were_as_they_are_by_default(tiny, undisturbed):
    """A run that an earlier version began can go on."""
    run = json.loads((undisturbed / "run.json").read_text())
    for name in ("dataset", "split", "text_column", "held_out_documents", "shuffle_window"):
        del run[name]
    (undisturbed / "run.json").write_text(json.dumps(run))
    assert holds_this_run(tiny(), undisturbed, overwrite=False)
    (undisturbed / "run.json").write_text(json.dumps(run | {"shuffle_window": 3}))
    with pytest.raises(ValueError, match=r"another run \(shuffle_window was 3 and is 2048\)"):
        holds_this_run(tiny(), undisturbed, overwrite=False)
    (undisturbed / "run.json").write_text(json.dumps(run | {"optimiser": "lion"}))
    with pytest.raises(ValueError, match=r"another run \(optimiser was 'lion' and is None\)"):
        holds_this_run(tiny(), undisturbed, overwrite=False)


def test_where_data_and_model_lie_decides_nothing(tiny, texts, undisturbed, tmp_path, monkeypatch):
    """Their hashes do, also against a run.json that an earlier version wrote, without that of the tokenizer."""
    moved = Path(shutil.copytree(texts, tmp_path / "moved"))
    monkeypatch.chdir(tmp_path)
    for files in (f"{texts}/", moved, "moved", "./moved/"):
        assert train(tiny(files=(str(files),)), undisturbed)["measurements"]["steps_this_call"] == 10
    run = json.loads((undisturbed / "run.json").read_text())
    assert run["files"] == [str(texts)]  # for people
    del run["tokenizer_sha256"]
    (undisturbed / "run.json").write_text(json.dumps(run))
    assert train(tiny(files=("moved",)), undisturbed)["measurements"]["steps_this_call"] == 10
    with pytest.raises(ValueError, match=r"another run \(tokenizer was None and is 'bytes'\)"):  # no hash to go by
        train(tiny(tokenizer="bytes"), undisturbed)
    (moved / "0.txt").write_text("another text")
    with pytest.raises(ValueError, match=rf"another run \(files was \['{texts}'\] and is \['moved'\]\)"):
        train(tiny(files=("moved",)), undisturbed)
    with pytest.raises(ValueError, match=r"another run \(files was .* and is \[\]\)"):
        holds_this_run(tiny(files=()), undisturbed, overwrite=False)
    with pytest.raises(ValueError, match=r"another run \(.*model was None and is 'moved'"):
        holds_this_run(tiny(model="moved", **OWN_SIZES), undisturbed, overwrite=False)


def test_a_saved_model_may_lie_elsewhere_too(tiny, undisturbed, tmp_path):
    settings = OWN_SIZES | {"steps": 1}
    first = tiny(model=str(undisturbed), **settings)
    train(first, tmp_path / "next")
    moved = shutil.move(undisturbed, tmp_path / "moved")
    assert train(tiny(model=f"{moved}/", **settings), tmp_path / "next")["measurements"]["steps_this_call"] == 1
    run = json.loads((tmp_path / "next" / "run.json").read_text())
    del run["model_sha256"]
    (tmp_path / "next" / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"another run \(model was .*undisturbed' and is .*moved/'\)"):
        holds_this_run(tiny(model=f"{moved}/", **settings), tmp_path / "next", overwrite=False)
    assert holds_this_run(first, tmp_path / "next", overwrite=False)


def test_a_local_dataset_is_where_it_is(streamed, corpus, tmp_path):
    """It is never read whole, so there is no hash of it; another name of the same folder is none the less the same."""
    (tmp_path / "run.json").write_text(json.dumps(streamed().decisions()))
    assert holds_this_run(streamed(dataset=f"{corpus}/"), tmp_path, overwrite=False)
    with pytest.raises(ValueError, match=r"another run \(dataset was .*\)"):
        holds_this_run(streamed(dataset=str(corpus.parent)), tmp_path, overwrite=False)


def test_the_rows_of_a_step_decide_not_how_they_are_taken(tiny, tmp_path, monkeypatch, undisturbed):
    original = MetaplasticTrainer.training_step

    def step(self, *args):
        if self.state.global_step == 5:
            raise InterruptedError
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MetaplasticTrainer, "training_step", step)
        with pytest.raises(InterruptedError):
            train(tiny(), tmp_path / "run")
    found = train(tiny(batch_size=9, accumulation=1), tmp_path / "run")["measurements"]
    expected = json.loads((undisturbed / "results.json").read_text())["measurements"]
    assert found["steps_this_call"] == 7
    assert found["tokens_seen"] == expected["tokens_seen"]
    for name in ("loss", "eval_loss", "grad_norm"):  # the same rows in the same order, summed in another
        curves = [[entry[name] for entry in each["history"] if name in entry] for each in (found, expected)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    with pytest.raises(ValueError, match=r"another run \(batch_size x accumulation was 9 and is 12\)"):
        train(tiny(batch_size=4), tmp_path / "run")


def test_a_lock_is_no_file_of_another_program(tiny, tmp_path):
    (tmp_path / ".lock").touch()
    assert not holds_this_run(tiny(), tmp_path, overwrite=False)
    assert os.listdir(tmp_path) == [".lock"]
