import importlib
import json
import multiprocessing

import pytest
import torch

from metaplastic.evaluation import doctor
from metaplastic.ops import accuracy, dispatch, fused


@pytest.fixture(autouse=True)
def _a_list_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("METAPLASTIC_CACHE", str(tmp_path / "cache"))
    dispatch._blocked.cache_clear()
    dispatch._choose.cache_clear()
    yield
    monkeypatch.undo()
    dispatch._blocked.cache_clear()
    dispatch._choose.cache_clear()


def test_a_wrong_configuration_is_found_and_blocked(monkeypatch):
    """Only the failing configuration is blocked; auto avoids it; a repaired one comes back."""
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    module = importlib.import_module("metaplastic.ops.additive.chunked")
    right = module._Chunk.write
    monkeypatch.setattr(
        module._Chunk, "write", lambda self: right(self) * (1.01 if self.v.dtype == torch.float32 else 1)
    )
    checks = {c.configuration: c for c in doctor.check_backends()}
    assert checks["additive/chunked/cpu/float32"].status == "FAILED"
    assert "final mean" in checks["additive/chunked/cpu/float32"].detail
    assert checks["additive/chunked/cpu/float64"].status == "ok"
    assert checks["palimpsa/chunked/cpu/float32"].status == "ok"
    assert dispatch.reason_against("additive", "chunked", "cpu", torch.float32)
    assert dispatch.reason_against("additive", "chunked", "cpu", torch.float64) is None
    monkeypatch.setattr(module._Chunk, "write", right)
    assert all(c.status != "FAILED" for c in doctor.check_backends())
    assert dispatch.reason_against("additive", "chunked", "cpu", torch.float32) is None


def test_kernels_of_one_head_size_are_blocked_alone(monkeypatch):
    """A backend with kernels of each size: what fails at one is blocked there, in that dtype."""
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    entry = dispatch.BACKENDS["palimpsa"]["chunked"]._replace(kernels="metaplastic.ops.dispatch:each_size")
    monkeypatch.setitem(dispatch.BACKENDS["palimpsa"], "chunked", entry)
    cases = [accuracy.Case(length=3, key_size=4, value_size=size, variance=False) for size in (4, 8)]
    monkeypatch.setattr(accuracy, "KERNEL_CASES", cases)
    right = accuracy.measure

    def wrong(op, backend, case, dtype, *devices):
        errors = right(op, backend, case, dtype, *devices)
        return errors | ({"output": 1.0} if case == cases[1] and dtype == torch.float32 else {})

    monkeypatch.setattr(accuracy, "measure", wrong)
    name = "palimpsa/chunked/cpu/float32"
    checks = {c.configuration: c.status for c in doctor.check_backends()}
    assert {n: status for n, status in checks.items() if n.startswith(name)} == {
        name: "ok", f"{name}/4x4": "ok", f"{name}/4x8": "FAILED",
    }  # fmt: skip
    assert checks["palimpsa/chunked/cpu/bfloat16/4x8"] == "ok" and "palimpsa/chunked/cpu/float64/4x8" not in checks

    def blocked(*sizes):
        return dispatch.reason_against("palimpsa", "chunked", "cpu", torch.float32, sizes)

    assert "for heads of 4 x 8" in blocked(4, 8) and blocked(4, 4) is None and blocked() is None
    inputs = accuracy.example("palimpsa", cases[1], torch.float32)
    with pytest.raises(RuntimeError, match="backend 'chunked' failed its check on this machine for heads of 4 x 8"):
        accuracy.OPERATORS["palimpsa"][0](**inputs, backend="chunked")
    monkeypatch.setattr(accuracy, "measure", right)
    assert all(c.status != "FAILED" for c in doctor.check_backends()) and blocked(4, 8) is None


def test_a_failure_around_a_memory_blocks_that_alone(monkeypatch):
    """Each has an entry of its own, for all dtypes."""
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    monkeypatch.setattr(fused, "_unable", lambda device: None)
    asked, wrong = [], {"l2"}

    def measured(name):
        def measure(case, dtype, device):
            asked.append((name, case, dtype, device))
            return {"output": 1e-4, "gradient of x": 1.0 if name in wrong and dtype == torch.float16 else 1e-4}

        return measure

    for name, subject in doctor.FUSED.items():
        monkeypatch.setattr(subject, "measure", measured(name))
        monkeypatch.setattr(subject, "DTYPES", (torch.bfloat16, torch.float16))
    checks = {c.configuration: c for c in doctor.check_backends()}
    status = {name: checks[f"{name}/triton/cpu"].status for name in ("short_convolution", "evidence", "l2")}
    assert status == {"short_convolution": "ok", "evidence": "ok", "l2": "FAILED"}
    assert "torch.float16, gradient of x: error 1.0e+00" in checks["l2/triton/cpu"].detail
    cases = [(n, c, dtype, "cpu") for n, s in doctor.FUSED.items() for dtype in s.DTYPES for c in s.CASES]
    assert asked == cases
    assert "failed its check" in fused.reason_against("l2", "cpu")
    assert fused.reason_against("evidence", "cpu") is fused.reason_against("short_convolution", "cpu") is None
    wrong.clear()
    assert {check.status for check in doctor.check_backends()} == {"ok", "unavailable"}
    assert fused.reason_against("l2", "cpu") is None


BLOCKED = "additive/chunked/cpu/float32"


def test_a_doctor_that_is_stopped_changes_nothing(monkeypatch):
    """The old list holds until the new one is whole, and what is on it is checked again meanwhile."""
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    path = dispatch.block({BLOCKED: "test"})
    before, seen = path.read_text(), []
    checks = doctor.check_backends()
    for check in checks:
        seen.append(check)
        assert path.read_text() == before
        assert dispatch.reason_against("additive", "chunked", "cpu", torch.float32)
        if check.configuration == BLOCKED:
            break
    checks.close()
    assert seen[-1].status == "ok" and path.read_text() == before
    assert {check.status for check in doctor.check_backends()} == {"ok", "unavailable"}
    assert path.read_text() == "{}" and dispatch.reason_against("additive", "chunked", "cpu", torch.float32) is None


def test_what_cannot_be_remembered_is_said_after_all_checks(monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    (tmp_path / "file").touch()
    monkeypatch.setenv("METAPLASTIC_CACHE", str(tmp_path / "file" / "cache"))
    *checks, last = doctor.check_backends()
    assert checks and all(check.status in ("ok", "unavailable") for check in checks)
    assert (last.configuration, last.status) == ("block list", "unwritable")
    assert "cannot be remembered" in last.detail and str(tmp_path / "file") in last.detail


def test_a_list_that_cannot_be_written_leaves_the_old_one(monkeypatch):
    path = dispatch.block({BLOCKED: "test"})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch.json, "dump", full)
        with pytest.raises(OSError, match="No space"):
            dispatch.block({})
    assert [file.name for file in path.parent.iterdir()] == [path.name] and BLOCKED in path.read_text()
    dispatch.block({})


def test_a_crash_is_a_failed_check(monkeypatch):
    def broken(*args):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(accuracy, "measure", broken)
    check = doctor._check("additive", "chunked", "cpu", torch.float32, "name", accuracy.CASES)
    assert check.status == "FAILED"
    assert "illegal instruction" in check.detail


def test_without_memory_nothing_is_known(monkeypatch):
    """Neither blocked nor let go."""
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    right, full = accuracy.measure, ("additive", "delta")

    def measure(op, *others):
        if op in full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(op, *others)

    monkeypatch.setattr(accuracy, "measure", measure)
    path = dispatch.block({BLOCKED: "test"})
    checks = {check.configuration: check.status for check in doctor.check_backends()}
    assert checks[BLOCKED] == checks["delta/chunked/cpu/float32"] == "unchecked"
    assert list(json.loads(path.read_text())) == [BLOCKED]
    full = ()
    assert {check.status for check in doctor.check_backends()} == {"ok", "unavailable"} and path.read_text() == "{}"


@pytest.mark.slow
def test_several_processes_find_what_one_finds(monkeypatch):
    alone = [check._replace(seconds=None) for check in doctor.check_backends()]
    monkeypatch.setattr(doctor, "_processes", lambda: 2)
    assert [check._replace(seconds=None) for check in doctor.check_backends()] == alone
    checks = doctor.check_backends()
    next(checks)
    checks.close()
    for child in multiprocessing.active_children():
        child.join(10)
    assert not multiprocessing.active_children()
