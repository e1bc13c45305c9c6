"""What can happen to a process at a file-system call."""

import errno
import os
import signal
from pathlib import Path

from tests.crash.contents import Content, content
from tests.crash.hooks import Call, Recorder

_NEEDS_ROOM = {"create", "write", "mkdir", "close", "fsync"}
_BY_PATH = {"create", "mkdir", "rename", "unlink", "rmdir"}
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Killer:
    """Ends the process, as the system would, before a call or in the middle of a write.

    Args:
        at: number of the call, counted from 0.
        half: let half of the bytes through, if it is a write.
    """

    def __init__(self, at: int, half: bool = False) -> None:
        self._at = at
        self._half = half
        self._count = 0

    def before(self, call: Call) -> int | None:
        number = self._count
        self._count += 1
        if number < self._at:
            return None
        if number == self._at and self._half and call.kind == "write":
            return len(call.data) // 2
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def after(self, call: Call) -> None:
        pass


def can_refuse(code: int, call: Call) -> bool:
    """Whether a disk can give an error for a call; a full one refuses only what needs room."""
    return code not in _FULL or call.kind in _NEEDS_ROOM


class Faulty:
    """A disk that refuses.

    Args:
        code: the error's number.
        at: number of the first call that is refused, counted from 0.
        lasting: refuse all that come later too.
    """

    def __init__(self, code: int, at: int, lasting: bool) -> None:
        self._code = code
        self._at = at
        self._lasting = lasting
        self._count = 0
        self.refused: list[Call] = []

    def before(self, call: Call) -> None:
        number = self._count
        self._count += 1
        due = number == self._at or (self._lasting and number > self._at)
        if due and can_refuse(self._code, call):
            self.refused.append(call)
            # Python names the file where the call was given its path, and only there.
            named = (call.path,) if call.kind in _BY_PATH else ()
            raise OSError(self._code, os.strerror(self._code), *named)

    def after(self, call: Call) -> None:
        pass


class Historian(Recorder):
    """Keeps all calls, and what every directory held when it got its name."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[tuple[str, Content]] = []

    def after(self, call: Call) -> None:
        super().after(call)
        path = Path(call.other)
        if call.kind in ("rename", "exchange") and not path.name.startswith("."):
            self.saved.append((path.name, content(path)))


class Bystander:
    """Does nothing."""

    def before(self, call: Call) -> None:
        pass

    def after(self, call: Call) -> None:
        pass
