"""``metaplastic doctor``: what runs on this machine and why, checked forward and backward against the reference.

A configuration (operator, backend, device, dtype) that misses its tolerance goes on this machine's block list, and
``auto`` stops picking it; one that passes comes off the list. A backend that runs other kernels for heads of other
sizes is checked at sizes that take all of them, and a failure there blocks those kernels alone. The old list holds
until every check is done: a doctor that is killed on the way changes nothing.
"""

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..ops import accuracy, convolution, dispatch, fla_tuning
from ..ops.accuracy import Case
from ..ops.convolution import check as convolution_check

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Check(NamedTuple):
    configuration: str
    status: str  # "ok", "FAILED", "unavailable" or "unwritable"
    detail: str
    largest_error: float | None = None
    seconds: float | None = None


def check_backends() -> Iterator[Check]:
    """Checks every backend on every device and dtype here, yielding as it goes; renews the block list at the end.

    If the list cannot be written, a last check says so, with the status "unwritable".
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    failed = {}
    for device in devices:
        check = _check_convolution(device)
        if check.status == "FAILED":
            failed[check.configuration] = check.detail
        yield check
    for op, entries in dispatch.BACKENDS.items():
        for backend in entries:
            for device in devices:
                for dtype in DTYPES:
                    for check, blocked in _check_configuration(op, backend, device, dtype):
                        if check.status == "FAILED":
                            failed[blocked] = f"{check.configuration}: {check.detail}"
                        yield check
    try:
        dispatch.block(failed)
    except OSError as error:
        yield Check("block list", "unwritable", f"what failed cannot be remembered: {error}")


def _check_convolution(device: str) -> Check:
    """The kernels of the short convolution: one configuration for all dtypes."""
    name, began = convolution.configuration("triton", device), time.perf_counter()
    largest, problems = 0.0, []
    with dispatch.block_list_ignored():
        if (reason := convolution.reason_against("triton", device)) is not None:
            return Check(name, "unavailable", reason)
        try:
            for dtype in DTYPES:
                for case in convolution_check.CASES:
                    errors = convolution_check.measure("triton", case, dtype, device)
                    largest = max(largest, *errors.values())
                    wrong = convolution_check.failures(errors, dtype)
                    problems += [f"{dtype}, {what}: error {error:.1e}" for what, error in wrong.items()]
        except Exception as error:  # as below
            problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            largest = float("inf")
    detail = "; ".join(problems) or f"largest relative error {largest:.1e}"
    return Check(name, "FAILED" if problems else "ok", detail, largest, time.perf_counter() - began)


def _check_configuration(op: str, backend: str, device: str, dtype: torch.dtype) -> Iterator[tuple[Check, str]]:
    """The checks of one configuration and of its kernels, each with the name to block if it fails."""
    name = dispatch.configuration(op, backend, device, dtype)
    with dispatch.block_list_ignored():  # what is on it is measured again
        reason = dispatch.reason_against(op, backend, device, dtype)
        check = _check(op, backend, device, dtype, name, accuracy.CASES) if reason is None else None
    if check is None:
        if dtype == (*dispatch.BACKENDS[op][backend].dtypes, torch.float32)[0]:
            yield Check(name, "unavailable", str(reason)), name
        return
    yield check, name
    for sizes, cases in accuracy.kernel_cases(op, backend, dtype).items():
        with dispatch.block_list_ignored():
            check = _check(op, backend, device, dtype, f"{name}/{sizes[0]}x{sizes[1]}", cases, reference=device)
            blocked = dispatch.configuration(op, backend, device, dtype, sizes)
        yield check, blocked


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
    except Exception as error:  # whatever a compiler or driver throws is a failed check, not a crash of the doctor
        problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        largest = float("inf")
    detail = "; ".join(problems) or f"largest relative error {largest:.1e}"
    if without is not None:
        detail += f"; no gradients: {without}"
    return Check(name, "FAILED" if problems else "ok", detail, largest, time.perf_counter() - began)
