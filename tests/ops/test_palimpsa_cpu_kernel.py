"""What is particular to the CPU kernels: threads, forks, scratch memory, compilation. Parity: see test_parity.py."""

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metaplastic.ops.palimpsa import cpu, cpu_kernels


def problem(batch=1, length=300, heads=3, keys=20, values=40):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, length, heads, keys, generator=generator) for _ in range(2))
    w, d_output = (torch.randn(batch, length, heads, values, generator=generator) for _ in range(2))
    beta = torch.rand(batch, length, heads, values, generator=generator)
    g = -0.1 * torch.rand(batch, length, heads, generator=generator)
    return d_output, (q, k, w, beta, g, torch.linspace(0.5, 2.0, heads), None, None, None, 0.5)


def run(d_output, inputs):
    read = cpu.forward(*inputs, True)
    return *read, *cpu.backward(d_output, read[1], read[2], read[3], *inputs)


def same(left, right):
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 5])  # with one sequence the tiles of a head are spread over several tasks
def test_results_do_not_depend_on_the_number_of_threads(set_threads, batch):
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        results.append(run(*problem(batch)))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_several_python_threads_can_call_at_once(set_threads):
    set_threads(2)
    problems = [problem(length=200 + 10 * i) for i in range(4)]
    expected = [run(*x) for x in problems]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(same(x, y) for x, y in zip(pool.map(lambda x: run(*x), problems), expected, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_works_in_a_forked_process():
    script = """
import os, torch
from tests.ops.test_palimpsa_cpu_kernel import problem, run, same
torch.set_num_threads(2)
expected = run(*problem())
child = os.fork()
if child == 0:
    os._exit(0 if same(run(*problem()), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert same(run(*problem()), expected)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_packed_single_tokens_decode_like_a_batch():
    _, (q, k, w, beta, g, prior, *_, scale) = problem(batch=4, length=1)
    state = (torch.randn(4, 3, 40, 20), torch.rand(4, 3, 40, 20))
    batched = cpu.forward(q, k, w, beta, g, prior, *state, None, scale, True)
    row = [x.transpose(0, 1) for x in (q, k, w, beta, g)]
    packed = cpu.forward(*row, prior, *state, torch.arange(5), scale, True)
    assert same([x.transpose(0, 1) for x in packed[:2]] + list(packed[2:]), batched)


@pytest.mark.parametrize(("length", "megabytes"), [(1024, 1), (65537, 8)])
def test_scratch_memory_grows_as_the_square_root(monkeypatch, length, megabytes):
    scratch = []
    monkeypatch.setattr(cpu, "_run", lambda kernel, variant, arguments, sizes, *_: scratch.append(4 * sum(sizes)))
    d_output, inputs = problem(length=length, heads=1, keys=32, values=64)
    cpu.backward(d_output, None, None, None, *inputs)
    assert scratch[0] < megabytes * 2**20


@pytest.mark.parametrize("place", ["/some/folder", None])
def test_long_compilation_is_announced_once(monkeypatch, caplog, place):
    monkeypatch.setattr(cpu, "ANNOUNCE_AFTER", 0.01)
    calls = []

    def kernel(*arguments):
        calls.append(arguments)
        time.sleep(0.3)

    kernel.stats = SimpleNamespace(cache_path=place)
    kernel.__name__ = "backward_kernel"
    with caplog.at_level(logging.WARNING, logger="metaplastic"):
        cpu._compile(kernel, (torch.float64, True), "argument")
        cpu._compile(kernel, (torch.float64, True), "argument")
    assert calls == [("argument", 0, 0)]
    assert len(caplog.records) == 1
    assert (place or "no folder") in caplog.text
    assert "backward, float64, with variance" in caplog.text


def test_every_variant_has_a_name_of_its_own(monkeypatch):
    """As many announcements as compilations, no two alike."""
    ran = []
    monkeypatch.setattr(cpu, "_run", lambda kernel, variant, *_: ran.append((kernel, variant)))
    for dtype in (torch.float32, torch.float64):
        for length in (1, 5):
            d_output, inputs = problem(length=length, heads=1, keys=4, values=4)
            d_output, inputs = d_output.to(dtype), [x.to(dtype) if torch.is_tensor(x) else x for x in inputs]
            for variance in (True, False):
                cpu.forward(*inputs, variance)
                cpu.backward(d_output, d_output if variance else None, None, None, *inputs)
    assert len(set(ran)) == len({cpu._describe(*each) for each in ran}) == 12


def test_kernels_work_without_a_folder_to_cache_in(monkeypatch):
    def njit(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    monkeypatch.setattr(cpu_kernels, "njit", njit)
    assert cpu_kernels._kernel(problem) == ("compiled", problem)
