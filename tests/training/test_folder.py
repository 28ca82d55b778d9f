"""One run, one folder: a second process is kept out, and a dead one keeps nobody out."""

import json
import os
import signal
import subprocess
import sys

import pytest

from metaplastic.training import train
from metaplastic.training.folder import alone, holds_this_run

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


def test_a_lock_is_no_file_of_another_program(tiny, tmp_path):
    (tmp_path / ".lock").touch()
    assert not holds_this_run(tiny(), tmp_path, overwrite=False)
    assert os.listdir(tmp_path) == [".lock"]
