import importlib

import torch

from metaplastic.evaluation import doctor
from metaplastic.ops import accuracy, dispatch


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


def test_a_crash_is_a_failed_check(monkeypatch):
    def broken(*args):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(accuracy, "measure", broken)
    check = doctor._check("additive", "chunked", "cpu", torch.float32, "name")
    assert check.status == "FAILED"
    assert "illegal instruction" in check.detail
