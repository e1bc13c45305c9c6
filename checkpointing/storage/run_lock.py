"""One run at a time saves into an output directory."""

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from checkpointing.errors import ConfigError
from checkpointing.storage.commit import named_errors

LOCK_NAME = ".run.lock"

# Directories that this process has claimed, so that a save within a run need not claim its own.
_claimed: dict[Path, int] = {}
# A save in the background claims for itself, too.
_one_at_a_time = threading.Lock()


@contextmanager
def claimed(output_dir: Path) -> Iterator[None]:
    """Keeps other processes from claiming an output directory for as long as the block runs.

    The system takes the lock away when the process ends, however it does. Where the file system
    has no locks, nothing is claimed.

    Raises:
        ConfigError: if another process has claimed it; says which one.
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses to write the lock's file for another reason.
    """
    key = output_dir.resolve()
    path = output_dir / LOCK_NAME
    with _one_at_a_time:
        is_new = key not in _claimed
        if is_new:
            with named_errors(output_dir, f"{LOCK_NAME} cannot be written"):
                _claimed[key] = _lock(path)
    try:
        yield
    finally:
        with _one_at_a_time:
            # Not in a process that was forked within the block.
            descriptor = _claimed.pop(key, None) if is_new else None
            if descriptor is not None:
                # The disk may have become read-only, which must not hide why the block ended.
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                os.close(descriptor)


def _lock(path: Path) -> int:
    """Opens the lock file and locks it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"output_dir {path.parent}: another run saves into it ({owner}); wait for it, stop "
                "it, or choose another output_dir"
            ) from None
        except OSError:
            return descriptor
        if _is_the_file(descriptor, path):
            try:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            except OSError:
                # Or this process would keep itself out from then on.
                os.close(descriptor)
                raise
            return descriptor
        os.close(descriptor)


def _is_the_file(descriptor: int, path: Path) -> bool:
    """Whether the file still has its name: its last owner removes it before it lets it go."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _let_go() -> None:
    """In a process that was forked, such as a data loader's worker: the claims are its parent's."""
    for descriptor in _claimed.values():
        os.close(descriptor)
    _claimed.clear()
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_let_go)
