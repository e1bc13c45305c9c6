"""Gets written data on its way to the disk early, and out of the page cache again.

Otherwise a large file gathers in memory until it is synced, and the disk idles meanwhile.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Lock

# What is sent at a time, and how many of these may be under way. Dropped pages are taken again for
# what is written next, while new ones would have to be cleared first.
WINDOW = 8 << 20
_LEAST = 1 << 20
_UNDER_WAY = 8
# linux/fs.h
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
# What it answers where there is no such call.
_REFUSED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM)


@cache
def _sync_file_range() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


class WriteBehind:
    """Sends a file that several threads write.

    These are hints: a system that has them not, or refuses them, writes back when it is synced.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._under_way: deque[tuple[int, int]] = deque()
        self._lock = Lock()

    def send(self, start: int, size: int) -> None:
        """Sends a range, and waits for the oldest one if too many are under way.

        Raises:
            OSError: if the disk has refused what was written. The system says so once, here or
                when the file is synced.
        """
        _sync(self._descriptor, start, size, _WRITE)
        with self._lock:
            self._under_way.append((start, size))
            oldest = self._under_way.popleft() if len(self._under_way) > _UNDER_WAY else None
        if oldest is not None:
            _sync(self._descriptor, *oldest, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            drop_from_cache(self._descriptor, *oldest)


class Follower:
    """Follows a thread that writes from one place of a file on."""

    def __init__(self, behind: WriteBehind, start: int) -> None:
        self._behind = behind
        self._start = self._end = start

    def wrote_to(self, end: int) -> None:
        """All is written up to here.

        Raises:
            OSError: if the disk has refused what was written.
        """
        self._end = end
        if end - self._start >= WINDOW:
            self._send()

    def stop(self) -> None:
        """The thread writes no more; a few small files are not worth asking for.

        Raises:
            OSError: if the disk has refused what was written.
        """
        if self._end - self._start >= _LEAST:
            self._send()

    def _send(self) -> None:
        self._behind.send(self._start, self._end - self._start)
        self._start = self._end


def _sync(descriptor: int, start: int, size: int, flags: int) -> None:
    function = _sync_file_range()
    if function is not None and function(descriptor, start, size, flags) != 0:
        code = ctypes.get_errno()
        if code not in _REFUSED:
            raise OSError(code, os.strerror(code))


def drop_from_cache(descriptor: int, start: int = 0, size: int = 0) -> None:
    """Lets the system forget what it holds of a file in memory; all of it by default."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
