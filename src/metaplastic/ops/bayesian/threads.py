"""Independent parts of an operator's work on a CPU, each from beginning to end in one thread.

Waking threads for every small product takes about as long as the product does, so a part's products get one thread each
and the parts run side by side. A part that is alone has them all, and then its last bits may depend on their number (in
float64 products of a library do).
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch


@functools.lru_cache(4)  # an older one ends when its work is done
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One per process, because threads do not survive a fork; in each of its threads PyTorch computes with one.

    Setting the number of a thread also sets what threads that begin later get, of which a process has one: that is put
    back before any work begins.
    """
    pool, together = ThreadPoolExecutor(threads, "metaplastic"), threading.Barrier(threads)
    before = _in_a_new_thread(torch.get_num_threads)

    def alone() -> None:
        together.wait()  # so that every thread does this once
        torch.get_num_threads()  # else it would be set once more when it is first asked for
        torch.set_num_threads(1)

    try:
        for done in [pool.submit(alone) for _ in range(threads)]:
            done.result()
    except BaseException:
        together.abort()
        raise
    finally:
        _in_a_new_thread(functools.partial(torch.set_num_threads, before))
    return pool


def _in_a_new_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


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
            try:
                for part in left:
                    run(part)
            except BaseException:
                stop()
                raise

    def stop() -> None:
        for _ in left:
            pass

    helpers: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        helpers.extend(_pool(os.getpid(), threads).submit(drain) for _ in range(min(threads, len(parts))))
    if not helpers:
        drain()
    try:
        wait(helpers)
    except BaseException:  # Ctrl-C: nobody begins another part
        stop()
        raise
    for helper in helpers:
        helper.result()
