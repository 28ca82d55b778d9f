from pathlib import Path

import pytest
import torch

from metaplastic.evaluation import speed
from metaplastic.ops import dispatch


def test_bench_measures_what_it_says():
    if dispatch.reason_against("palimpsa", "cpu", "cpu", torch.float32):
        pytest.skip("no Numba")
    found = speed.bench_palimpsa_cpu(batch=1, length=64, heads=2, key=8, value=8, repetitions=2)
    assert found["cpu_forward_speedup"] == pytest.approx(found["reference_forward_ms"] / found["cpu_forward_ms"])
    assert found["cpu_forward_backward_speedup"] > 1
    assert found["shape"]["length"] == 64


def test_peak_growth_sees_memory():
    grown = speed.peak_growth(lambda: torch.ones(16_000_000).add_(1).sum())
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say how much memory is resident")
    assert grown > 30e6  # 64 MB while it runs


def test_medians_call_alternately():
    calls = []
    times = speed.medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert set(times) == {"a", "b"}
