"""flash-linear-attention's kernels tuned in seconds, or not at all: compiling all that its tuner tries takes minutes.

For timings, :func:`quick`: the tuner tries fewer configurations, each for a shorter time, as ``CHANGES`` says.
:func:`compile_all` compiles them first, by as many processes as there are processors, into Triton's cache on disk
(``$TRITON_CACHE_DIR``), from where the process that measures takes them. For checks, :func:`untuned`.
"""

import contextlib
import functools
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import additive, delta, fla

MOST_STAGES, LEAST_WARPS, LEAST_TILE = 3, 4, 64
CHANGES = (
    f"flash-linear-attention's tuner tried its configurations of at most {MOST_STAGES} stages, at least {LEAST_WARPS} "
    "warps and tiles that the head fills, each for 10 ms"
)
LENGTH = 128  # tokens: nothing is compiled anew for another length


class Call(NamedTuple):
    """What is going to be timed, on ``batch`` sequences of ``heads`` of ``key_size`` x ``value_size``."""

    operator: str  # "additive", "delta" or "mesa"
    batch: int
    heads: int
    key_size: int
    value_size: int
    gradients: bool


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Within it the library's tuner works as ``CHANGES`` says; what it chose stays chosen."""
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    tuners = _tuners()
    before = [(tuner, tuner.early_config_prune) for tuner in tuners]
    for tuner in tuners:
        tuner.early_config_prune = functools.partial(_fewer, tuner.early_config_prune)
        tuner.do_bench = lambda run, quantiles: do_bench(run, warmup=2, rep=10, quantiles=quantiles)
    try:
        yield
    finally:
        for tuner, prune in before:
            tuner.early_config_prune = prune
            del tuner.do_bench


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Within it the tuner takes the first configuration that fits, untried, and remembers nothing of it."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    tuners, right = _tuners(), Autotuner._bench
    before = [(tuner, tuner.cache_results, dict(tuner.cache)) for tuner in tuners]
    Autotuner._bench = lambda self, *args, config, **options: [1.0, 1.0, 1.0]
    for tuner in tuners:
        tuner.cache_results = False
    try:
        yield
    finally:
        Autotuner._bench = right
        for tuner, cache_results, cache in before:
            tuner.cache_results, tuner.cache = cache_results, cache


def compile_all(calls: Sequence[Call], processes: int | None = None, seconds: float = 90.0) -> bool:
    """Compiles what :func:`quick` tries for these calls. False if that took more than ``seconds`` and was ended."""
    count = processes or max(1, min(16, len(os.sched_getaffinity(0))))
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as claims:
        running = [start(target=_compile_unclaimed, args=(tuple(calls), claims), daemon=True) for _ in range(count)]
        for process in running:
            process.start()
        last = time.monotonic() + seconds
        for process in running:
            process.join(max(0.0, last - time.monotonic()))
        late = [process for process in running if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
    if failed := [process.exitcode for process in running if process.exitcode and process not in late]:
        raise RuntimeError(f"{len(failed)} of {count} processes that compile failed with {failed}")
    return not late


def _tuners() -> list[Any]:
    """Every kernel of the library that its tuner looks after, of the operators used here."""
    from fla.ops import gated_delta_rule, gla, kda, mesa_net, simple_gla  # noqa: F401  # pyright: ignore[reportMissingImports]
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    found = {}
    for name, module in list(sys.modules.items()):
        for x in vars(module).values() if name.startswith("fla.ops") else ():
            while x is not None and not isinstance(x, Autotuner):
                x = getattr(x, "fn", None) if type(x).__module__.startswith("triton.") else None
            if x is not None:
                found[id(x)] = x
    return list(found.values())


def _fewer(prune: Callable | None, configs: list, nargs: dict[str, Any], **options: Any) -> list:
    """The configurations that are worth a try, of those that the library's own ``prune`` leaves."""
    configs = prune(configs, nargs, **options) if prune else configs

    def fits(config: Any) -> bool:
        sizes = {n: options.get(n, nargs.get(n)) or LEAST_TILE for n in ("K", "V")}
        tiles = {n: config.kwargs.get(f"B{n}", 0) for n in sizes}
        return all(tiles[n] < 2 * max(size, LEAST_TILE) for n, size in sizes.items())

    for condition in (fits, lambda c: c.num_warps >= LEAST_WARPS, lambda c: c.num_stages <= MOST_STAGES):
        configs = [c for c in configs if condition(c)] or configs
    return configs


def _compile_unclaimed(calls: Sequence[Call], claims: str) -> None:
    """Runs every call with kernels of which this process compiles, and launches, those alone that no other has begun.

    Each is a file in the folder ``claims``: some take ten times as long as others, so shares are not cut beforehand.
    """
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

    launch = JITFunction.run

    def unclaimed(kernel: str, given: Sequence[Any]) -> bool:
        """What is compiled depends on the types of tensors and the values of all else, a configuration's among them."""
        plain = (int, float, str, type(None))
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x for x in given if isinstance(x, (torch.Tensor, *plain))]
        name = hashlib.sha256(f"{kernel} {kinds}".encode()).hexdigest()
        try:
            os.close(os.open(os.path.join(claims, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def run(self, *args, **options) -> None:
        if unclaimed(self.__name__, [*args, *options.values()]):
            with contextlib.suppress(Exception):  # who measures finds out
                launch(self, *args, **options)

    def run_all(self, *args, **options) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(options):
            with contextlib.suppress(Exception):
                self._bench(*args, config=config, **options)
        self.nargs = None

    for tuner in _tuners():
        tuner.early_config_prune = functools.partial(_fewer, tuner.early_config_prune)
        tuner.do_bench = lambda call, quantiles: call()
        tuner.cache_results = False
    Autotuner.run, JITFunction.run = run_all, run  # this process ends after it
    for call in calls:
        _run(call)
    torch.cuda.synchronize()


def _run(call: Call) -> None:
    """What is computed is nothing: only the shapes and the types count."""
    shape = (call.batch, LENGTH, call.heads)

    def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(sizes, device="cuda", dtype=dtype, requires_grad=call.gradients)

    q, k, v = (zeros(*shape, size) for size in (call.key_size, call.key_size, call.value_size))
    g = zeros(*shape, dtype=torch.float32)
    with fla.unchecked():
        if call.operator == "mesa":
            ridge = zeros(call.heads, call.key_size, dtype=torch.float32)
            output = fla.mesa(q, k, v, zeros(*shape, dtype=torch.float32), g, ridge)
        elif call.operator == "delta":
            output = delta(q, k, v, zeros(*shape), g, backend="fla").output
        else:
            output = additive(q, k, v, g, backend="fla").output
        if call.gradients:
            output.sum().backward()
