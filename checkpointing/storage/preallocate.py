"""Room on the disk for a file, before it is written.

A file system that looks for room block by block while data comes takes a quarter of the time that
writing costs the processor, and may find a full disk late.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache

# What it answers where a file system cannot (``fallocate(2)``).
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)


def preallocate(descriptor: int, size: int) -> None:
    """Takes room for a file, where the file system can; nothing of what is written is changed.

    ``os.posix_fallocate`` is not used, since it writes to every block where there is no such call.

    Args:
        descriptor: of the file, which is as long as it will be.
        size: of the file, in bytes.

    Raises:
        OSError: if the disk or a quota has no room.
    """
    function = _fallocate()
    while size and function is not None and function(descriptor, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function
