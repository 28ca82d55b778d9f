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


def test_rows_say_what_is_compared_with_what():
    found = {
        "shape": {"batch": 4, "key_size": 32}, "threads": 2,
        "reference_forward_ms": 100.0, "chunked_forward_ms": 50.0, "cpu_forward_ms": 4.0,
        "reference_forward_backward_ms": 1000.0, "chunked_forward_backward_ms": 2000.0,
        "cpu_forward_backward_ms": 10.0, "cpu_extra_peak_memory_mb": 1.25,
    }  # fmt: skip
    rows = dict(speed.palimpsa_rows(found))
    assert rows["shape"] == "batch 4, key size 32"
    assert rows["forward: token loop"] == "100 ms"
    assert rows["forward: CPU kernel"] == "4 ms, 25 times the token loop's speed"
    assert rows["forward: chunked"] == "50 ms, 2 times the token loop's speed"
    slow = rows["forward and backward: chunked"]
    assert slow.startswith("2,000 ms, 0.5 times the token loop's speed (slower: on a CPU chunks save memory")
    assert rows["CPU kernel, extra peak memory"] == "1.25 MiB beyond inputs, outputs, gradients"
    decode = {"model": "170M", "threads": 2, "one_step_ms": 76.0, "two_step_ms": 38.0, "ratio": 2.0}
    assert speed.decode_rows(decode)[2:] == [
        ("one token: one", "76 ms"), ("one token: two", "38 ms"), ("one over two", "2.000 times its time"),
    ]  # fmt: skip


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
