import os
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch

from checkpointing.errors import ConfigError
from checkpointing.storage.threads import THREADS_VARIABLE, Cancelled, run, thread_count


@pytest.fixture
def several(monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, "3")


@pytest.fixture
def torch_computes_on_5():
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def until_stopped(check, ended):
    """A job that goes on until it is told not to."""
    try:
        while True:
            check()
            time.sleep(0.001)
    finally:
        ended.append(threading.get_ident())


def fail(check, error, after=0.0):
    time.sleep(after)
    raise error


def in_a_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("count", ["1", "2", "7"])
def test_results_are_in_the_order_of_the_jobs(monkeypatch, count):
    monkeypatch.setenv(THREADS_VARIABLE, count)

    def job(check, number):
        # The first ones take longest.
        time.sleep(0.002 * (6 - number))
        return number * number

    assert run([partial(job, number=n) for n in range(6)]) == [0, 1, 4, 9, 16, 25]
    assert run([]) == []


def test_as_many_run_at_a_time_as_there_are_threads(several):
    meeting = threading.Barrier(3)
    threads = run([lambda check: (meeting.wait(20), threading.get_ident())[1]] * 3)
    assert len({*threads, threading.get_ident()}) == 4
    assert len(set(run([lambda check: threading.get_ident()] * 40))) <= 3


def test_one_thread_is_the_callers_own(monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    assert run([lambda check: (check(), threading.get_ident())[1]] * 4) == 4 * [
        threading.get_ident()
    ]
    done = []
    with pytest.raises(KeyError):
        run([lambda check: done.append(1), partial(fail, error=KeyError()), done.append])
    assert done == [1]


def test_so_is_that_of_a_single_job(several):
    assert run([lambda check: threading.get_ident()]) == [threading.get_ident()]


def test_an_error_stops_the_others_and_is_raised_when_all_have_ended(several):
    ended, running = [], threading.active_count()
    stopping = partial(until_stopped, ended=ended)
    error = OSError(5, "broken")
    never = []
    with pytest.raises(OSError) as raised:
        run([stopping, stopping, partial(fail, error=error, after=0.02), *[never.append] * 50])
    assert raised.value is error
    assert len(ended) == 2 and threading.active_count() == running
    assert not never


def test_the_cause_is_raised_and_not_that_others_were_stopped(several):
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            run(
                [
                    partial(until_stopped, ended=[]),
                    partial(until_stopped, ended=[]),
                    partial(fail, error=ZeroDivisionError()),
                ]
            )
    with pytest.raises(Cancelled):
        run([partial(fail, error=Cancelled())] * 2)


def test_the_first_of_several_causes_in_the_order_of_the_jobs_is_raised(several):
    meeting = threading.Barrier(2)

    def job(check, error):
        meeting.wait(20)
        raise error

    with pytest.raises(KeyError):
        run([partial(job, error=KeyError()), partial(job, error=IndexError())])


@pytest.fixture
def interruptible():
    """Also where the tests run in the background, which the shell starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_interrupts_the_main_thread_stops_the_others(several, interruptible):
    ended, running = [], threading.active_count()

    def interrupt(check):
        while len(threads) < 2:
            time.sleep(0.001)
        again = threading.Timer(2, press)
        again.start()
        press()
        try:
            until_stopped(check, ended)
        finally:
            again.cancel()
            again.join()

    def press():
        # Python misses a signal that comes just as the main thread begins to wait for a lock; what
        # a user does then is what the timer does.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threads = set()

    def job(check):
        threads.add(threading.get_ident())
        until_stopped(check, ended)

    with pytest.raises(KeyboardInterrupt):
        run([job, job, interrupt])
    assert len(ended) == 3 and threading.active_count() == running


def test_torch_computes_on_as_many_threads_as_before_elsewhere(
    monkeypatch, torch_computes_on_5, threads_take_turns_often
):
    monkeypatch.setenv(THREADS_VARIABLE, "6")
    for _ in range(200):
        computing = run([lambda check: (torch.ones(3).sum(), torch.get_num_threads())[1]] * 9)
        assert computing == [1] * 9
        assert torch.get_num_threads() == 5
        assert in_a_new_thread(torch.get_num_threads) == 5


def test_it_does_even_after_an_error(several, torch_computes_on_5):
    with pytest.raises(KeyError):
        run([partial(fail, error=KeyError())] * 3)
    assert torch.get_num_threads() == 5
    assert in_a_new_thread(torch.get_num_threads) == 5


def test_a_job_runs_jobs_itself(several):
    def outer(check):
        return sum(run([lambda check: 2] * 4))

    assert run([outer] * 5) == [8] * 5


def test_it_runs_from_any_thread(several):
    assert in_a_new_thread(lambda: run([lambda check: 7] * 4)) == [7] * 4


@pytest.mark.parametrize("told", ["", "0", "-1", "2.5", "two", " 2", "1e3"])
def test_a_wrong_number_of_threads_is_an_error_that_says_which(monkeypatch, told):
    monkeypatch.setenv(THREADS_VARIABLE, told)
    with pytest.raises(ConfigError, match=r"TUNEPOINT_THREADS: '.*' is no number .* 1 or more"):
        thread_count()
    with pytest.raises(ConfigError):
        run([fail, fail])


def test_there_is_a_thread_more_than_cores_and_at_most_eight(monkeypatch):
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    assert thread_count() == min(8, len(os.sched_getaffinity(0)) + 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(40)))
    assert thread_count() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 6})
    assert thread_count() == 4
    # As on macOS.
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert thread_count() == 7
    monkeypatch.setenv(THREADS_VARIABLE, "11")
    assert thread_count() == 11
