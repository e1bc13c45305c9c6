"""A few threads that move data: reading, computing and writing tensors at the same time."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from threading import Barrier, BrokenBarrierError, Event
from typing import TypeVar

import torch

from checkpointing.errors import ConfigError

_Result = TypeVar("_Result")
THREADS_VARIABLE = "TUNEPOINT_THREADS"
# A thread of it gets a thirtieth of a core that another one needs.
_LOW_PRIORITY = 15
_KEPT = 16 << 20
# One more than cores, since each waits for the disk at times. Still more would hardly make a disk
# faster.
_MOST = 8


class Cancelled(Exception):
    """Another job failed, or the user asked to stop, so that this one need not go on."""


def thread_count() -> int:
    """Number of threads: one more than cores up to eight, or what ``TUNEPOINT_THREADS`` says.

    Raises:
        ConfigError: if it is no number from 1 on.
    """
    told = os.environ.get(THREADS_VARIABLE)
    if told is None:
        return min(_MOST, _cores() + 1)
    if not told.isdecimal() or int(told) < 1:
        raise ConfigError(f"{THREADS_VARIABLE}: {told!r} is no number of threads, give 1 or more")
    return int(told)


Check = Callable[[], None]
"""Called by a job from time to time; raises ``Cancelled`` if there is no need to go on."""


def run(jobs: Sequence[Callable[[Check], _Result]]) -> list[_Result]:
    """Runs jobs to their end, as many at a time as there are threads.

    The first exception stops the others, and is raised when all have ended.

    Returns:
        What they return, in their order.
    """
    count = min(thread_count(), len(jobs))
    if count < 2:
        return [job(_go_on) for job in jobs]
    stopped = Event()

    def check() -> None:
        if stopped.is_set():
            raise Cancelled

    def run_one(job: Callable[[Check], _Result]) -> _Result:
        check()
        try:
            return job(check)
        except BaseException:
            stopped.set()
            raise

    _keep_what_is_freed()
    threads = torch.get_num_threads()
    started = Barrier(count + 1)
    with ThreadPoolExecutor(count, "move", _compute_on_one_thread, (started,)) as pool:
        try:
            futures = [pool.submit(run_one, job) for job in jobs]
            started.wait()
            # The workers' own number became that of threads to come; this sets it back.
            torch.set_num_threads(threads)
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
            started.abort()
            pool.shutdown(wait=True, cancel_futures=True)
    errors = [future.exception() for future in futures if not future.cancelled()]
    if any(errors):
        raise _first_cause(errors)
    return [future.result() for future in futures]


@cache
def _keep_what_is_freed() -> None:
    """Makes glibc keep blocks of some MiB when they are freed, rather than give them back.

    Given back, a block must be cleared by the system each time that it is taken again, which costs
    more than what is done in it. Having freed a larger one once is what tells glibc
    (``mallopt(3)``, M_MMAP_THRESHOLD); it is never touched, so that it takes no memory.
    """
    torch.empty(_KEPT, dtype=torch.uint8)


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _go_on() -> None:
    pass


def yield_to_training() -> None:
    """Gives this thread, and those that it starts, the time that others leave.

    On Linux each thread has a priority of its own; elsewhere nothing is changed.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def _first_cause(errors: Sequence[BaseException | None]) -> BaseException:
    found = [error for error in errors if error is not None]
    return next((error for error in found if not isinstance(error, Cancelled)), found[0])


def _compute_on_one_thread(started: Barrier) -> None:
    # A thread takes the number of the process when it first asks, and not later.
    torch.get_num_threads()
    # Each worker is one; torch would start as many again for each of them.
    torch.set_num_threads(1)
    with suppress(BrokenBarrierError):
        started.wait()
