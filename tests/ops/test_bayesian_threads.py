"""Heads of ops.bayesian on a CPU, shared out among threads."""

import threading
import time

import pytest
import torch

from metaplastic import ops
from metaplastic.ops.bayesian import chunked
from metaplastic.ops.bayesian import threads as threads_module
from metaplastic.ops.bayesian.threads import side_by_side


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def problem(offsets=None):
    source = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 70, 5, 8, generator=source)
    g, process, observation = -0.1, 0.1, 0.5 + torch.rand(1, 70, 5, generator=source)
    inputs = [q, k, v, torch.full((1, 70, 5), g), torch.full((1, 70, 5), process), observation]
    inputs = [x.requires_grad_() for x in inputs]
    read = ops.bayesian(*inputs, prior_variance=torch.ones(5), output_variance=True, cu_seqlens=offsets)
    loss = read.output.square().sum() + read.variance.sum() + read.state.mean.square().sum()
    return [read.output, read.variance, *read.state, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 3, 3, 66])])
def test_no_bit_depends_on_the_number_of_threads(threads, monkeypatch, offsets):
    whole = problem(offsets)
    monkeypatch.setattr(chunked, "ENOUGH", 1)  # every head alone
    found = []
    for count in (1, 2, 3, 9):
        threads(count)
        found.append(problem(offsets))
        assert torch.get_num_threads() == count
    for x, *others in zip(whole, *found, strict=True):
        torch.testing.assert_close(others[0], x)
        assert all(torch.equal(y, others[0]) for y in others[1:])


def test_parts_run_at_once_and_products_in_one_thread(threads):
    threads(2)
    together, seen = threading.Barrier(2, timeout=60), []

    def run(part):
        together.wait()
        seen.append((part, torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    with torch.inference_mode():
        side_by_side(run, [slice(0, 1), slice(1, 2)])
    assert sorted((part.start, *others) for part, *others in seen) == [(0, 1, False, True), (1, 1, False, True)]
    assert torch.get_num_threads() == 2


def test_an_error_in_a_part_is_raised(threads):
    threads(2)

    def run(part):
        if part.start == 1:
            raise ValueError("of part 1")

    with pytest.raises(ValueError, match="of part 1"):
        side_by_side(run, [slice(0, 1), slice(1, 2), slice(2, 3)])


def test_after_an_error_no_part_begins(threads):
    threads(2)
    begun = []

    def run(part):
        begun.append(part)
        if part.start == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(run, [slice(i, i + 1) for i in range(100)])
    assert len(begun) <= 3


def test_threads_that_begin_meanwhile_have_the_number_of_all(threads):
    threads(2)
    threads_module._pool.cache_clear()
    seen = []

    def run(part):
        late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        late.start()
        late.join()

    side_by_side(run, [slice(i, i + 1) for i in range(4)])
    assert seen == [2] * 4


def test_in_inference_mode(threads, monkeypatch):
    monkeypatch.setattr(chunked, "ENOUGH", 1)
    threads(2)
    inputs = [torch.ones(1, 70, 3, 4) / 2] * 3 + [-torch.ones(1, 70, 3)] + [torch.ones(1, 70, 3)] * 2
    with torch.inference_mode():
        read = ops.bayesian(*inputs, prior_variance=torch.ones(3))
    assert torch.equal(read.output, ops.bayesian(*inputs, prior_variance=torch.ones(3)).output)
