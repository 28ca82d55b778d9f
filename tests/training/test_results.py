import importlib.metadata
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from metaplastic import ops, results


def test_a_record_says_what_ran_on_what(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/metaplastic", "train", "--steps", "3"])
    q = torch.ones(1, 2, 1, 2)
    ops.additive(q, q, q, -torch.ones(1, 2, 1), backend="reference")
    record = results.record("train", {"loss": 1.5}, seeds=[0, 1], settings={"learning_rates_tried": [1e-3, 1e-2]})
    assert record == json.loads(json.dumps(record))
    assert record["schema"] == results.SCHEMA
    assert (record["name"], record["measurements"], record["seeds"]) == ("train", {"loss": 1.5}, [0, 1])
    assert record["settings"]["learning_rates_tried"] == [1e-3, 1e-2]
    about = record["environment"]
    assert about["command"] == ["metaplastic", "train", "--steps", "3"]
    assert about["device"]["cpu"] and about["device"]["threads"] == torch.get_num_threads()
    assert about["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"python", "transformers", "numpy"} <= about["versions"].keys()
    assert "reference" in about["backends"]["additive"]
    assert about["date"].endswith("+00:00")
    assert about["commit"] is None or len(about["commit"].removesuffix("-dirty")) == 40


def test_the_commit_is_that_of_our_own_tree(monkeypatch):
    """Installed within another project's tree, git would name that project's commit."""
    asked = []

    def git(ours):
        def check_output(command, **kwargs):
            asked.append(command[1])
            assert command[0] == "git" and os.path.isfile(os.path.join(kwargs["cwd"], "results.py"))
            if command[1] == "ls-files" and not ours:
                raise subprocess.CalledProcessError(1, command)
            return "results.py\n" if command[1] == "ls-files" else "0123abcd-dirty\n"

        return check_output

    monkeypatch.setattr(subprocess, "check_output", git(ours=True))
    assert results.environment()["commit"] == "0123abcd-dirty"
    assert asked == ["ls-files", "describe"]
    monkeypatch.setattr(subprocess, "check_output", git(ours=False))
    assert results.environment()["commit"] is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")  # no git at all
    assert results.environment()["commit"] is None


def test_readers_see_an_old_file_or_a_new_one(tmp_path):
    path = tmp_path / "deep" / "results.json"
    results.write_json(path, ["x" * 200_000, 0])
    stop, seen, problems = threading.Event(), set(), []

    def read():
        while not stop.is_set():
            try:
                seen.add(json.loads(path.read_text())[1])
            except ValueError as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(40):
        results.write_json(path, ["x" * 200_000, number])
    stop.set()
    reader.join()
    assert not problems
    assert len(seen) > 1  # it did read in between
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where):
    path = results.write_json(tmp_path / "results.json", {"a": 1})

    def fail(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, where, fail)
        with pytest.raises(OSError, match="No space"):
            results.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    circular: list = []
    circular.append(circular)
    with pytest.raises(ValueError, match="Circular"):
        results.write_json(path, circular)
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = results.write_json(tmp_path / "results.json", {"a": 1})
    if (child := os.fork()) == 0:
        os.replace = lambda *args: os._exit(9)
        results.write_json(path, {"a": 2})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert json.loads(path.read_text()) == {"a": 1}
