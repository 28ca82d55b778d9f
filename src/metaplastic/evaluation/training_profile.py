"""What the profiler saw in a training step: what makes the host wait for the device, and the largest kernels."""

import re
from collections import Counter
from typing import Any

from torch.autograd import DeviceType

PROFILED = "the profiled step"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SCALAR, TO_HOST = "aten::_local_scalar_dense", "Memcpy DtoH"
KERNELS = 20  # the largest


def waits(events: list[Any], cuda: bool) -> dict[str, Any]:
    """How often in a step something makes the host wait for the device, and from where."""
    spans = (e.time_range for e in events if e.name == PROFILED and e.device_type == DeviceType.CPU)
    span = next(spans)
    copies = sum(event.name.startswith(TO_HOST) for event in events)
    counts, where = {SCALAR: 0, TO_HOST: copies} | dict.fromkeys(WAITS, 0), Counter[str]()
    for event in events:
        if not span.start <= event.time_range.start <= span.end:
            continue
        if event.name in (SCALAR, *WAITS):
            counts[event.name] += 1
        if any(kernel.name.startswith(TO_HOST) for kernel in event.kernels):
            where[f"{TO_HOST}: {_place(event)}"] += 1
        elif event.name in WAITS or (event.name == SCALAR and not cuda):  # of a CPU tensor it waits for nothing
            where[f"{event.name}: {_place(event)}"] += 1
    return {"counts": counts, "where": dict(where.most_common(20))}


def kernels(events: list[Any]) -> list[dict[str, Any]]:
    """The ``KERNELS`` in which the device spends most of the profiled step: ms, share of all kernels, calls."""
    times, calls = Counter[str](), Counter[str]()
    for event in events:
        if event.device_type != DeviceType.CPU and event.name != PROFILED and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    whole = max(sum(times.values()), 1e-9)
    return [
        {"name": name[:160], "ms": time / 1e3, "share": time / whole, "calls": calls[name]}
        for name, time in times.most_common(KERNELS)
    ]


def _place(event: Any) -> str:
    """The function around an event that is nearest to us, without the path of its file; or the operators around it."""
    chain, outer = [], event.cpu_parent
    while outer is not None and outer.name != PROFILED:
        chain.append(outer.name)
        outer = outer.cpu_parent
    for package in ("metaplastic", "transformers", "accelerate", "torch"):
        found = (re.search(rf"\b{package}/\S+\.py\(\d+\): \w+$", name) for name in chain)
        if near := next((match for match in found if match), None):
            return near.group()
    return " < ".join(name for name in chain if "/" not in name) or event.name
