"""Gets written data on its way to the disk early, and out of the page cache again.

Otherwise a large file gathers in memory until it is synced, and the disk idles meanwhile.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache

WINDOW = 32 << 20
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
    """Follows a thread that writes a file from one place on.

    These are hints: a system that has them not, or refuses them, writes back when it is synced.

    Raises:
        OSError: if the disk has refused what was written. The system says so once, here or when
            the file is synced.
    """

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._before: tuple[int, int] | None = None

    def wrote_to(self, end: int) -> None:
        """All is written up to here."""
        if end - self._start < WINDOW:
            return
        _sync(self._descriptor, self._start, end - self._start, _WRITE)
        if self._before is not None:
            _sync(self._descriptor, *self._before, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            drop_from_cache(self._descriptor, *self._before)
        self._before = (self._start, end - self._start)
        self._start = end


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
