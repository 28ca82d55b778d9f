import importlib

import pytest
import torch

from metaplastic.evaluation import doctor
from metaplastic.ops import accuracy, dispatch


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
    right = module._Chunk.final
    monkeypatch.setattr(
        module._Chunk, "final", lambda self: right(self) * (1.01 if self.s0.dtype == torch.float32 else 1)
    )
    checks = {c.configuration: c for c in doctor.check_backends()}
    assert checks["additive/chunked/cpu/float32"].status == "FAILED"
    assert "final mean" in checks["additive/chunked/cpu/float32"].detail
    assert checks["additive/chunked/cpu/float64"].status == "ok"
    assert checks["palimpsa/chunked/cpu/float32"].status == "ok"
    assert dispatch.reason_against("additive", "chunked", "cpu", torch.float32)
    assert dispatch.reason_against("additive", "chunked", "cpu", torch.float64) is None
    monkeypatch.setattr(module._Chunk, "final", right)
    assert all(c.status != "FAILED" for c in doctor.check_backends())
    assert dispatch.reason_against("additive", "chunked", "cpu", torch.float32) is None


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
    assert list(doctor.check_backends())[-1].status == "ok"
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
    check = doctor._check("additive", "chunked", "cpu", torch.float32, "name")
    assert check.status == "FAILED"
    assert "illegal instruction" in check.detail
