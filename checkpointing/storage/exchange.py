"""Exchanging the names of two files or directories at one instant."""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

# linux/fcntl.h and linux/fs.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# No such call, not on this file system, or kept from us by a sandbox that does not know the call.
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


@cache
def _renameat2() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        )
    return function


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two names, with ``renameat2`` of Linux.

    Returns:
        Whether that is possible here; if not, nothing has changed.

    Raises:
        OSError: if it fails for another reason.
    """
    function = _renameat2()
    if function is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
