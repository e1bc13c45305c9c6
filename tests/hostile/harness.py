"""What must hold whatever a file contains: a clear error or success, in bounded time and memory."""

import faulthandler
import resource
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

import checkpointing
from checkpointing.errors import CheckpointingError

_SECONDS = 5
_MOST_GROWTH = 300 << 20

# Where Python and its libraries read for themselves.
_OWN = (
    *{Path(path).resolve() for path in sysconfig.get_paths().values()},
    Path(sys.base_prefix).resolve(),
    Path(checkpointing.__file__).resolve().parents[1],
    Path("/proc"),
    Path("/sys"),
)
_opened: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes):
        path = arguments[0]
        _opened.append(path if isinstance(path, str) else path.decode(errors="replace"))


sys.addaudithook(_note)


@contextmanager
def _noting_opened_files() -> Iterator[list[str]]:
    global _opened
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


@contextmanager
def _time_limit() -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TimeoutError(f"took more than {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expired)
    # A loop in C never sees the signal; then at least the test run ends, and says where.
    faulthandler.dump_traceback_later(20 * _SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def peak_memory() -> int:
    """The most memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def survives(call: Callable[[], object], root: Path) -> CheckpointingError | None:
    """Calls something that reads hostile files: it succeeds, or its error says which file is bad.

    Args:
        call: what to call.
        root: directory that holds all that may be read and written.

    Returns:
        The error.
    """
    error = None
    before, start = peak_memory(), time.perf_counter()
    with _noting_opened_files() as opened, _time_limit():
        try:
            call()
        except CheckpointingError as caught:
            error = caught
    assert time.perf_counter() - start < _SECONDS
    assert peak_memory() - before < _MOST_GROWTH
    for path in opened:
        resolved = Path(path).resolve()
        allowed = (root.resolve(), *_OWN)
        assert any(place in (resolved, *resolved.parents) for place in allowed), path
    if error is not None:
        text = str(error)
        assert root.name in text, f"the error names no file: {text}"
        assert all(line.isprintable() for line in text.split("\n")), f"not escaped: {text!r}"
    return error


def cases(default: int, slow: int) -> pytest.MarkDecorator:
    """Numbers of cases of the default and the slow suite."""
    marked = pytest.param(slow, marks=pytest.mark.slow)
    return pytest.mark.parametrize("count", [default, marked])


def fuzz(count: int, strategy: SearchStrategy, check: Callable[..., None]) -> None:
    """Checks so many cases; the same ones each time."""
    options = settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    options(given(strategy)(check))()
