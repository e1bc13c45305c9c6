"""Sees every change that Python code makes below a directory, before and after it is made.

Needs nothing but Python: the functions of ``os`` that change files or directories, ``open``, and
the call of libc in ``checkpointing.storage.exchange`` are replaced. So every write must go through
one of these; that each byte of a checkpoint does is tested. Where several threads make calls, one
waits until the other's is made, so that their order is the one on the disk.
"""

import builtins
import ctypes
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

from checkpointing.storage import exchange

_REAL_OPEN = io.open
# What runs write besides checkpoints.
NOT_WATCHED = ("logs",)


@dataclass(frozen=True)
class Call:
    """A call that changes what is on the disk, or makes sure of it.

    Attributes:
        kind: ``create``, ``truncate``, ``write``, ``close`` or ``fsync`` of a file or directory,
            ``mkdir``, ``rename``, ``exchange``, ``unlink``, ``rmdir``.
        path: of the file or directory.
        other: where a rename leads, or the other name of an exchange.
        data: what is written, at ``offset``.
    """

    kind: str
    path: str
    other: str = ""
    data: bytes = field(default=b"", repr=False)
    offset: int = 0


class Watcher(Protocol):
    """Is told of every call."""

    def before(self, call: Call) -> int | None:
        """May raise, or end the process; a number is how many bytes of a write to let through."""

    def after(self, call: Call) -> None:
        """The call was made."""


class Hooks:
    """Replaces the functions, for a watcher."""

    def __init__(self, root: Path, watcher: Watcher) -> None:
        self._root = os.path.realpath(root)
        self._watcher = watcher
        self._real: dict[str, Callable[..., Any]] = {}
        self._path_of: dict[int, str] = {}
        self._emptied: set[int] = set()
        self._one_at_a_time = RLock()

    def install(self) -> None:
        """From now on the watcher is told; there is no way back but the one of :func:`watching`."""
        for name in (
            *("open", "close", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "sendfile"),
            *("mkdir", "rename", "replace", "unlink", "remove", "rmdir"),
        ):
            if hasattr(os, name):
                self._real[name] = getattr(os, name)
                setattr(os, name, getattr(self, f"_{name}"))
        builtins.open = io.open = self._open_file
        self._renameat2 = exchange._renameat2
        exchange._renameat2 = self._hooked_renameat2
        # Such a function would be used in place of those above, and not be seen.
        for name in (
            "copy_file_range",
            "splice",
            "pwritev",
            "writev",
            "posix_fallocate",
            "truncate",
        ):
            if hasattr(os, name):
                self._real[name] = getattr(os, name)
                setattr(os, name, _not_seen(name))

    def remove(self) -> None:
        """Puts the real functions back."""
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open = io.open = _REAL_OPEN
        exchange._renameat2 = self._renameat2

    def perform(self, call: Call, do: Callable[[], Any], part: Callable[[int], Any] | None = None):
        """Makes a call, or a part of it, as the watcher says."""
        if not self._watches(call.path):
            return do()
        with self._one_at_a_time:
            most = self._watcher.before(call)
            result = do() if most is None or part is None else part(most)
            if most is None:
                self._watcher.after(call)
            return result

    def _watches(self, path: str) -> bool:
        inside = path.startswith(self._root + os.sep)
        top = path[len(self._root) + 1 :].split(os.sep)[0]
        return (inside and top not in NOT_WATCHED) or path == self._root

    def _absolute(self, path: Any, dir_fd: int | None = None) -> str:
        if isinstance(path, int):
            return self._path_of.get(path, "")
        parent = "" if dir_fd is None else self._path_of.get(dir_fd, "?")
        path = os.path.join(parent, os.fsdecode(path))
        directory, name = os.path.split(os.path.abspath(path))
        return os.path.join(os.path.realpath(directory), name)

    # The functions of os.

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        absolute = self._absolute(path, dir_fd)
        real = self._real["open"]

        def do():
            return real(path, flags, mode, dir_fd=dir_fd)

        writing = flags & (os.O_CREAT | os.O_TRUNC)
        descriptor = self.perform(Call("create", absolute), do) if writing else do()
        self._path_of[descriptor] = absolute
        if flags & os.O_TRUNC:
            self._emptied.add(descriptor)
        return descriptor

    def _close(self, descriptor):
        path = self._path_of.pop(descriptor, "")
        was_written = descriptor in self._emptied
        self._emptied.discard(descriptor)
        self._real["close"](descriptor)
        if was_written:
            self.perform(Call("close", path), lambda: None)

    def _write(self, descriptor, data):
        real = self._real["write"]
        view = memoryview(data).cast("B")
        path = self._path_of.get(descriptor, "")
        if not self._watches(path):
            return real(descriptor, data)
        call = Call("write", path, data=bytes(view), offset=os.lseek(descriptor, 0, os.SEEK_CUR))
        return self.perform(
            call, lambda: real(descriptor, data), lambda n: real(descriptor, view[:n])
        )

    def _pwrite(self, descriptor, data, offset):
        real = self._real["pwrite"]
        view = memoryview(data).cast("B")
        path = self._path_of.get(descriptor, "")
        call = Call("write", path, data=bytes(view), offset=offset)
        return self.perform(
            call,
            lambda: real(descriptor, data, offset),
            lambda n: real(descriptor, view[:n], offset),
        )

    def _sendfile(self, out_fd, in_fd, offset, count, *rest):
        real = self._real["sendfile"]
        path = self._path_of.get(out_fd, "")
        if not self._watches(path) or rest:
            return real(out_fd, in_fd, offset, count, *rest)
        data = os.pread(in_fd, count, offset)
        if not data:
            return 0
        call = Call("write", path, data=data, offset=os.lseek(out_fd, 0, os.SEEK_CUR))
        return self.perform(
            call,
            lambda: real(out_fd, in_fd, offset, count),
            lambda n: real(out_fd, in_fd, offset, n),
        )

    def _fsync(self, descriptor):
        # Not done in truth: it takes long, and tells only in a power loss, which is modelled.
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        self.perform(Call("fsync", self._path_of.get(number, "")), lambda: os.fstat(number))

    _fdatasync = _fsync

    def _ftruncate(self, descriptor, length):
        call = Call("truncate", self._path_of.get(descriptor, ""), offset=length)
        return self.perform(call, lambda: self._real["ftruncate"](descriptor, length))

    def _mkdir(self, path, mode=0o777, *, dir_fd=None):
        call = Call("mkdir", self._absolute(path, dir_fd))
        return self.perform(call, lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def _rename(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None):
        paths = self._absolute(src, src_dir_fd), self._absolute(dst, dst_dir_fd)
        real = self._real["replace"]
        return self.perform(
            Call("rename", *paths),
            lambda: real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd),
        )

    _replace = _rename

    def _unlink(self, path, *, dir_fd=None):
        call = Call("unlink", self._absolute(path, dir_fd))
        return self.perform(call, lambda: self._real["unlink"](path, dir_fd=dir_fd))

    _remove = _unlink

    def _rmdir(self, path, *, dir_fd=None):
        call = Call("rmdir", self._absolute(path, dir_fd))
        return self.perform(call, lambda: self._real["rmdir"](path, dir_fd=dir_fd))

    def _hooked_renameat2(self):
        real = self._renameat2()

        def renameat2(old_dir, old, new_dir, new, flags):
            call = Call("exchange", self._absolute(old), self._absolute(new))
            try:
                return self.perform(call, lambda: real(old_dir, old, new_dir, new, flags))
            except OSError as error:
                ctypes.set_errno(error.errno)
                return -1

        return None if real is None else renameat2

    # Files.

    def _open_file(self, file, mode="r", buffering=-1, *text, closefd=True, opener=None, **named):
        writing = set(mode) & set("wax+")
        path = self._absolute(file)
        if not writing or not self._watches(path):
            options = {"closefd": closefd, "opener": opener}
            return _REAL_OPEN(file, mode, buffering, *text, **options, **named)
        raw = _File(self, path, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **named)


class _File(io.FileIO):
    """A file of which each write to the system is seen."""

    def __init__(self, hooks: Hooks, path: str, mode: str) -> None:
        self._hooks = hooks
        self._path = path
        hooks.perform(Call("create", path), lambda: super(_File, self).__init__(path, mode))
        hooks._path_of[self.fileno()] = path

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        write = super().write
        call = Call("write", self._path, data=bytes(view), offset=self.tell())
        return self._hooks.perform(call, lambda: write(view), lambda n: write(view[:n]))

    def truncate(self, size=None) -> int:
        call = Call("truncate", self._path, offset=self.tell() if size is None else size)
        return self._hooks.perform(call, lambda: super(_File, self).truncate(size))

    def close(self) -> None:
        if not self.closed:
            self._hooks._path_of.pop(self.fileno(), None)
            super().close()
            self._hooks.perform(Call("close", self._path), lambda: None)


def _not_seen(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError(f"os.{name} is used, which the hooks do not see: hook it")

    return refuse


@contextmanager
def watching(root: Path, watcher: Watcher) -> Iterator[None]:
    """Tells a watcher of what is changed below a directory while the block runs."""
    hooks = Hooks(root, watcher)
    hooks.install()
    try:
        yield
    finally:
        hooks.remove()


class Recorder:
    """Keeps all calls, and those that succeeded."""

    def __init__(self) -> None:
        self.tried: list[Call] = []
        self.made: list[Call] = []

    def before(self, call: Call) -> None:
        self.tried.append(call)

    def after(self, call: Call) -> None:
        self.made.append(call)
