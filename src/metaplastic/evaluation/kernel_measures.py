"""How the kernels on a CUDA device are measured: time, memory and errors of one call.

Times are medians by the device's clock. Before every run the L2 cache is filled by reading other memory (by writing, a
short run would pay for what is still to be written back), for as long as the host needs to start the run: the host is
not in the time, as where a model's kernels wait in line, but measured apart. Who calls an operator alone waits for the
longer of the two, which is measured as well: calls from Python one after the other, nothing else in line. Memory is
what a call allocates at most beyond its arguments, results and gradients. Errors are in norm, relative to float64, of
two heads of the first sequence.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def device() -> dict[str, float]:
    """Bytes per second that a copy reaches, and multiply-adds per second at the highest clock."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = milliseconds(lambda: target.copy_(source)) / 1e3
    found = torch.cuda.get_device_properties(0)
    clock = getattr(found, "clock_rate", 0) * 1e3 or 1.98e9  # PyTorch has it in kHz
    return {
        "copied bytes per second": 2 * source.numel() / seconds,
        "multiply-adds per second": found.multi_processor_count * 128 * clock,
    }


def milliseconds(run: Callable[[], Any]) -> float:
    """Median over about 0.15 s of runs (at least 5; 3 of more than 0.5 s) on the device, the host far ahead of it."""
    for _ in range(2):
        run()
    taken = _seconds(run)
    count = min(max(int(0.15 / taken), 5 if taken < 0.5 else 3), 200)
    other = torch.zeros(1 << 26, device="cuda")  # five times as much as the largest L2 cache has

    def keep_busy(sums: int) -> None:
        for _ in range(sums):
            other.sum()

    head_start = 1
    if taken < 0.02:  # a longer run's host is ahead by itself
        of_one = _seconds(lambda: keep_busy(50)) / 50  # one alone waits for the host
        head_start += int(2e-3 * host_milliseconds(run) / of_one)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        keep_busy(head_start)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def host_milliseconds(run: Callable[[], Any], calls: int = 9) -> float:
    """Median time of some calls until they return, the device with nothing else to do."""

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return 1e3 * statistics.median(seconds() for _ in range(calls))


def called_milliseconds(run: Callable[[], Any]) -> float:
    """Time of one of some calls in a row, waiting for the last one to end on the device; median over 5 such rows (3
    calls that take more than 0.5 s)."""
    taken = _seconds(run)
    rows, calls = (3, 1) if taken > 0.5 else (5, min(max(int(0.03 / taken), 3), 30))

    def row() -> Any:
        for _ in range(calls - 1):
            run()
        return run()

    return 1e3 * statistics.median(_seconds(row) for _ in range(rows)) / calls


def _seconds(run: Callable[[], Any]) -> float:
    """Of one call, to its end on the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def as_graph(run: Callable[[], Any]) -> Callable[[], None]:
    """The same as one launch, a CUDA graph: what the host does before it costs nothing then."""
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def extra_memory(both: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes allocated at most beyond what was there before and what is returned."""
    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = both()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in returned)


def errors(
    run: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: dict[str, Tensor], upstream: Tensor
) -> dict[str, float]:
    """Of the output and every gradient of ``run``, relative to ``exact`` in float64.

    Of what a head has but once (a prior), from two heads of one sequence alone, where it is not a sum over others.
    """
    of_heads = {n for n, x in inputs.items() if x.dim() < 3}
    part = {n: (x[:2] if n in of_heads else x[:1, :, :2]).detach() for n, x in inputs.items()}
    dy = upstream[:1, :, :2]

    def measured(function: Callable[..., Tensor], given: dict[str, Tensor], dy: Tensor) -> list[Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        y = function(**leaves)
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)]

    expected = measured(exact, {n: x.double() for n, x in part.items()}, dy.double())
    whole, alone = measured(run, inputs, upstream), measured(run, part, dy)
    found = [z if n in of_heads else x[:1, :, :2] for n, x, z in zip(("", *inputs), whole, alone, strict=True)]
    names = ("output", *(f"gradient of {n}" for n in inputs))
    return {n: ((x.double() - e).norm() / e.norm()).item() for n, x, e in zip(names, found, expected, strict=True)}


def mesa_in_float64(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, ridge: Tensor) -> Tensor:
    """What :func:`metaplastic.ops.fla.mesa` approximates (``metaplastic.rules.mesa``), of all tokens side by side.

    y_t = sum_{s <= t} w_ts (k_s . x_t) v_s,  (sum_{s <= t} w_ts k_s k_s^T + diag(ridge)) x_t = q_t, where w_ts is
    beta_s times the decays after s. T^2 K^2 operations a head, T K^2 numbers: for a check.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, ...]
    beta, total = beta.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weights = since * beta[..., None, :]
    keys = (weights @ (k[..., :, None] * k[..., None, :]).flatten(-2)).unflatten(-1, (k.shape[-1],) * 2)
    factor = torch.linalg.cholesky(keys + torch.diag_embed(ridge)[:, None])
    x = torch.cholesky_solve(q[..., None], factor)[..., 0]
    return ((weights * (x @ k.mT)) @ v).transpose(1, 2)
