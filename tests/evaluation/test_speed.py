import platform
from pathlib import Path

import pytest
import torch

from metaplastic.evaluation import speed
from metaplastic.ops import dispatch


def test_bench_measures_what_it_says():
    if dispatch.reason_against("palimpsa", "cpu", "cpu", torch.float32):
        pytest.skip("no Numba")
    found = speed.bench_palimpsa_cpu(batch=1, length=64, heads=2, key_size=8, value_size=8, repetitions=2)
    assert found["cpu_forward_speedup"] == pytest.approx(found["reference_forward_ms"] / found["cpu_forward_ms"])
    assert found["cpu_forward_backward_speedup"] > 1
    assert found["shape"]["length"] == 64


@pytest.mark.parametrize("name", ["bayesian_cpu", "delta_cpu"])
def test_every_operator_is_measured_against_its_token_loop(name, monkeypatch):
    sizes: dict = {"batch": 1, "length": 96, "heads": 2, "key_size": 8, "value_size": 6}
    calls, medians = [], speed.medians
    monkeypatch.setattr(speed, "medians", lambda *x, **options: calls.append(x) or medians(*x, **options))
    told = []
    found = speed.OPERATORS[name](**sizes, repetitions=2, tell=lambda *row: told.append((row, len(calls))))
    rows = speed.operator_rows(found)
    assert [row for row, _ in told if row in rows] == rows
    # Each as soon as it is known: the shape before anything runs, the forward's times before any backward.
    at = {row: count for (row, _), count in told}
    assert at["shape"] == 0 < at["forward: chunked"] == at["forward and backward"]  # which is said before it begins
    assert at["shape"] == 0 < at["forward: chunked"] < at["forward and backward: chunked"] <= len(calls)
    assert found["shape"] == sizes and f"{found['operator']}_cpu" == name
    for part in ("forward", "forward_backward"):
        ratio = found[f"reference_{part}_ms"] / found[f"chunked_{part}_ms"]
        assert found[f"chunked_{part}_speedup"] == pytest.approx(ratio) and ratio > 1
    # float32: q, k, g and what this operator has of its own; output, its product with the loss's weights, a gradient
    per_token = 2 * (8 + 8 + 1 + 6 + (2 if name == "bayesian_cpu" else 1)) + 3 * 2 * 6
    per_head = 2 if name == "bayesian_cpu" else 0
    assert found["memory_floor_mb"] == pytest.approx((96 * per_token + per_head) * 4 / 2**20)
    assert found["reference_extra_peak_memory_mb"] >= 0 <= found["chunked_extra_peak_memory_mb"]


def test_the_memory_of_a_token_loop_shows():
    """Freed memory that lies ready would hide it."""
    if not Path("/proc/self/statm").exists() or platform.libc_ver()[0] != "glibc":
        pytest.skip("this system does not say how much memory is resident, or keeps what was freed")
    sizes = {"batch": 1, "length": 256, "heads": 4, "key_size": 64, "value_size": 64}
    found = speed.bench_operator("delta", ("chunked",), repetitions=1, **sizes)
    states = 4 * 256 * 4 * 64 * 64 / 2**20  # MiB of the states that autograd keeps
    assert found["reference_extra_peak_memory_mb"] > states > found["chunked_extra_peak_memory_mb"]


def test_rows_say_what_is_compared_with_what():
    found = {
        "shape": {"batch": 4, "key_size": 32}, "threads": 2,
        "reference_forward_ms": 100.0, "chunked_forward_ms": 50.0, "cpu_forward_ms": 4.0,
        "reference_forward_backward_ms": 1000.0, "chunked_forward_backward_ms": 2000.0,
        "cpu_forward_backward_ms": 10.0, "cpu_extra_peak_memory_mb": 1.25, "memory_floor_mb": 24.0,
    }  # fmt: skip
    rows = dict(speed.operator_rows(found))
    assert rows["shape"] == "batch 4, key size 32"
    assert rows["forward: token loop"] == "100 ms"
    assert rows["forward: CPU kernel"] == "4 ms, 25 times the token loop's speed"
    assert rows["forward: chunked"] == "50 ms, 2 times the token loop's speed"
    slow = rows["forward and backward: chunked"]
    assert slow.startswith("2,000 ms, 0.5 times the token loop's speed (slower: on a CPU chunks save memory")
    assert rows["CPU kernel, extra peak memory"] == "1.25 MiB beyond the 24 MiB of outputs and gradients"
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
    calls.clear()
    speed.medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4, seldom="b")
    assert "".join(calls) == "ab" + "ab" + "a" + "a" + "ab"
    assert set(times) == {"a", "b"}
