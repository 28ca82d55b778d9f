"""Independent parts of an operator's work on a CPU, each from beginning to end in one thread.

Waking threads for every small product takes about as long as the product does, so a part's products get one thread each
and the parts run side by side.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One per process, because threads do not survive a fork; in each of its threads PyTorch computes with one."""
    return ThreadPoolExecutor(threads, "metaplastic", initializer=torch.set_num_threads, initargs=(1,))


def side_by_side(run: Callable[[slice], None], parts: list[slice]) -> None:
    """``run(part)`` for every part, in as many threads as PyTorch may use. A single part's products share them."""
    threads = torch.get_num_threads()
    if min(threads, len(parts)) <= 1:
        for part in parts:
            run(part)
        return
    inference, left = torch.is_inference_mode_enabled(), iter(parts)

    def drain() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            for part in left:
                run(part)

    helpers: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        helpers.extend(_pool(os.getpid(), threads).submit(drain) for _ in range(min(threads, len(parts))))
    if not helpers:
        drain()
    wait(helpers)
    torch.set_num_threads(threads)  # a new helper sets what threads that begin later get
    for helper in helpers:
        helper.result()
