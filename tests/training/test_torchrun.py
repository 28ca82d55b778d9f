"""Under torchrun: Ctrl-C saves and ends all processes, and an error of the user is said once."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metaplastic.training.checkpoint import check_seal, checkpoints, step_of
from metaplastic.training.folder import identity, read_run

ROOT = Path(__file__).parents[2]
CODE = """
import sys, os
from pathlib import Path
from metaplastic.cli import main
try:
    main()
except SystemExit as end:
    Path(os.environ["CODES"] + os.environ["RANK"]).write_text(str(end.code))
    raise
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    folder.mkdir()
    (folder / "main.py").write_text(CODE)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CODES": f"{folder}/code", "PYTHONPATH": str(ROOT / "src")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, str(folder / "main.py"), "train", *arguments, "-o", str(folder / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.slow
def test_torchrun(texts, tmp_path):
    wrong = start(tmp_path / "wrong", str(tmp_path / "missing"))
    said, _ = wrong.communicate(timeout=120)
    assert wrong.returncode == 1
    assert len(re.findall(r"^error: .*missing", said, re.M)) == 1
    assert len(re.findall("^Traceback", said, re.M)) == 1  # torchrun's own
    small = ["--hidden-size", "16", "--layers", "1", "--heads", "2", "--block-length", "32", "--held-out", "0.2"]
    many = [*small, "--steps", "100000", "--save-every", "50", "--eval-every", "0"]
    with start(tmp_path / "long", str(texts), *many) as run:
        try:
            end = time.monotonic() + 120
            while not checkpoints(tmp_path / "long" / "run"):
                assert time.monotonic() < end and run.poll() is None, run.stdout.read()
                time.sleep(0.1)
            run.send_signal(signal.SIGINT)
            said, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert said.count("interrupted: saving a checkpoint") == 1, said
    assert said.count("interrupted: the same command goes on from") == 1, said
    assert [(tmp_path / "long" / f"code{rank}").read_text() for rank in range(2)] == ["130", "130"]
    assert "terminate called" not in said  # which would have made it another
    last = checkpoints(tmp_path / "long" / "run")[-1]
    assert step_of(last) > 50
    check_seal(last, identity(read_run(tmp_path / "long" / "run")))
