"""``metaplastic doctor``: what runs on this machine and why, checked forward and backward against the reference.

A configuration (operator, backend, device, dtype) that misses its tolerance goes on this machine's block list, and
``auto`` stops picking it; one that passes comes off the list. A backend that runs other kernels for heads of other
sizes is checked at sizes that take all of them, and a failure there blocks those kernels alone. The old list holds
until every check is done: a doctor that is killed on the way changes nothing.

Most of the time goes into compiling kernels, so where there is a GPU with room for it several processes check side by
side.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from ..ops import accuracy, dispatch, fla_tuning, fused, fused_accuracy
from ..ops.accuracy import Case
from ..ops.convolution import check as convolution_check
from ..ops.evidence import check as evidence_check
from ..ops.l2 import check as l2_check

FUSED = {"short_convolution": convolution_check, "evidence": evidence_check, "l2": l2_check}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MEMORY = 16e9  # bytes of a GPU for each process: what the references of the largest cases keep
NO_MEMORY = "the device has not enough free memory"


class Check(NamedTuple):
    configuration: str
    status: str  # "ok", "FAILED", "unchecked", "unavailable" or "unwritable"
    detail: str
    largest_error: float | None = None
    seconds: float | None = None


def check_backends() -> Iterator[Check]:
    """Checks every backend on every device and dtype here, yielding as it goes; renews the block list at the end.

    If the list cannot be written, a last check says so, with the status "unwritable". On a GPU a script that calls this
    needs the guard ``if __name__ == "__main__"``: processes are started.

    Raises OSError if one of these dies.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    failed = {}
    for check, blocked in _results([job for device in devices for job in _jobs(device)]):
        if check.status == "unchecked" and blocked in dispatch._blocked():
            failed[blocked] = f"it failed once, and then: {check.detail}"
        if check.status == "FAILED":
            detail = check.detail if blocked == check.configuration else f"{check.configuration}: {check.detail}"
            failed[blocked] = detail
        yield check
    try:
        dispatch.block(failed)
    except OSError as error:
        yield Check("block list", "unwritable", f"what failed cannot be remembered: {error}")


def _check_fused(kernels: str, device: str) -> Check:
    """Kernels without a table: one configuration for all dtypes."""
    name, began = fused.configuration(kernels, device), time.perf_counter()
    largest, problems, subject = 0.0, [], FUSED[kernels]
    with dispatch.block_list_ignored():
        if (reason := fused.reason_against(kernels, device)) is not None:
            return Check(name, "unavailable", reason)
        try:
            for dtype in subject.DTYPES:
                for case in subject.CASES:
                    errors = subject.measure(case, dtype, device)
                    largest = max(largest, *errors.values())
                    wrong = fused_accuracy.failures(errors, dtype)
                    problems += [f"{dtype}, {what}: error {error:.1e}" for what, error in wrong.items()]
        except torch.OutOfMemoryError:
            return Check(name, "unchecked", NO_MEMORY)
        except Exception as error:  # as below
            problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            largest = float("inf")
    detail = "; ".join(problems) or f"largest relative error {largest:.1e}"
    return Check(name, "FAILED" if problems else "ok", detail, largest, time.perf_counter() - began)


class _Job(NamedTuple):
    """A configuration, or its kernels for heads of these ``sizes`` and the cases that go through them."""

    op: str
    backend: str
    device: str
    dtype: torch.dtype
    sizes: tuple[int, int] | None = None

    def run(self) -> tuple[Check, str]:
        """The check, and the name to block if it fails."""
        op, backend, device, dtype, sizes = self
        name = dispatch.configuration(op, backend, device, dtype)
        with dispatch.block_list_ignored():  # what is on it is measured again
            if sizes is None:
                return _check(op, backend, device, dtype, name, accuracy.CASES), name
            cases = accuracy.kernel_cases(op, backend, dtype)[sizes]
            check = _check(op, backend, device, dtype, f"{name}/{sizes[0]}x{sizes[1]}", cases, reference=device)
            return check, dispatch.configuration(op, backend, device, dtype, sizes)


class _Fused(NamedTuple):
    kernels: str
    device: str

    def run(self) -> tuple[Check, str]:
        check = _check_fused(self.kernels, self.device)
        return check, check.configuration


class _Unavailable(NamedTuple):
    configuration: str
    reason: str

    def run(self) -> tuple[Check, str]:
        return Check(self.configuration, "unavailable", self.reason), self.configuration


def _jobs(device: str) -> Iterator[_Job | _Fused | _Unavailable]:
    """All that there is to do, in the order of the table."""
    yield from (_Fused(kernels, device) for kernels in FUSED)
    for op, entries in dispatch.BACKENDS.items():
        for backend in entries:
            for dtype in DTYPES:
                with dispatch.block_list_ignored():
                    reason = dispatch.reason_against(op, backend, device, dtype)
                if reason is None:
                    yield _Job(op, backend, device, dtype)
                    yield from (_Job(op, backend, device, dtype, x) for x in accuracy.kernel_cases(op, backend, dtype))
                elif dtype == (*entries[backend].dtypes, torch.float32)[0]:
                    yield _Unavailable(dispatch.configuration(op, backend, device, dtype), reason)


def _processes() -> int:
    """How many check side by side: half the cores, and as many as a GPU has free memory for."""
    if not torch.cuda.is_available():
        return 1
    free, _ = torch.cuda.mem_get_info()
    return max(1, min((os.cpu_count() or 1) // 2, int(free / MEMORY)))


def _results(jobs: Sequence[_Job | _Fused | _Unavailable]) -> Iterator[tuple[Check, str]]:
    processes = _processes()
    if processes == 1:
        yield from map(_run, jobs)
        return
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))
    try:
        for job, future in [(job, pool.submit(_run, job)) for job in jobs]:
            try:
                result = future.result()
            except BrokenProcessPool as error:
                raise OSError(f"a process of the doctor has died, at {job} or after it: nothing is blocked") from error
            yield result
    except BaseException:  # also where nobody wants to know any more
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown()


def _run(job: _Job | _Fused | _Unavailable) -> tuple[Check, str]:
    return job.run()


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, however it did; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _check(
    op: str, backend: str, device: str, dtype: torch.dtype, name: str, cases: Sequence[Case], reference: str = "cpu"
) -> Check:
    began = time.perf_counter()
    largest, problems, without = 0.0, [], None
    try:
        # All that a tuner tries would take minutes, for these head sizes alone.
        tuning = fla_tuning.untuned() if backend == "fla" else contextlib.nullcontext()
        with warnings.catch_warnings(action="ignore"), tuning:
            without = dispatch.no_gradients(op, backend)
            for case in cases:
                errors = accuracy.measure(op, backend, case, dtype, device, reference)
                largest = max(largest, *errors.values())
                problems += [
                    f"{what}: error {error:.1e}"
                    for what, error in accuracy.failures(op, backend, errors, dtype).items()
                ]
    except torch.OutOfMemoryError:
        return Check(name, "unchecked", NO_MEMORY)
    except Exception as error:  # whatever a compiler or driver throws is a failed check, not a crash of the doctor
        problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        largest = float("inf")
    detail = "; ".join(problems) or f"largest relative error {largest:.1e}"
    if without is not None:
        detail += f"; no gradients: {without}"
    return Check(name, "FAILED" if problems else "ok", detail, largest, time.perf_counter() - began)
