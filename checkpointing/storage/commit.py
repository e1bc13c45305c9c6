"""A checkpoint exists from one instant on: the rename of its directory.

Everything is written to a hidden sibling directory, synced to the disk, and then renamed. A crash
leaves a hidden directory, never a directory with a final name and missing data.

Who writes into a hidden directory holds a lock on it, which the system takes away when the process
ends, however it does. So what is not locked was left by a dead one. Who gives hidden directories
their names holds a lock on the directory above for that short time. What a conversion leaves, from
which it can go on, has names of another kind: see :mod:`checkpointing.storage.partial`.

Names reach the disk when the directory above is synced, in no order that could be relied on
before. So nothing is removed until it is certain that no checkpoint's name leads to it.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from checkpointing.errors import CheckpointingError, OutOfSpaceError, WriteError
from checkpointing.storage.exchange import exchange
from checkpointing.storage.threads import Check, run
from checkpointing.storage.write_behind import WINDOW, drop_from_cache

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<what>saving|replaced)-[0-9a-f]+")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Descriptors of the locks that this process holds.
_held: set[int] = set()


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yields a hidden directory that becomes ``final`` when the block ends without an exception.

    An existing ``final`` stays whole until the new one is complete, and is then replaced: where the
    file system can exchange two names, at one instant; elsewhere by two renames, of which
    :func:`recover` undoes the first if the second never came. If the block raises, the hidden
    directory is removed and nothing has changed.

    Raises:
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses to write for another reason.
    """
    with named_errors(final, "could not be saved"), ExitStack() as held:
        make_directory(final.parent)
        staging = hidden_name(final, "saving")
        with locked(final.parent, wait=True):
            staging.mkdir()
            held.enter_context(locked(staging))
        with becoming(staging, final):
            yield staging


@contextmanager
def becoming(staging: Path, final: Path) -> Iterator[None]:
    """Makes a hidden directory the final one when the block ends, or removes it if it raises."""
    try:
        yield
        sync_tree(staging)
        _put_in_place(staging, final)
    except BaseException:
        with suppress(OSError):
            discard(staging)
        raise
    discard(staging)


def _put_in_place(staging: Path, final: Path) -> None:
    """Gives a complete directory its name, and its own to the one that had the name before."""
    if not os.path.lexists(final):
        staging.rename(final)
    elif not exchange(staging, final):
        replaced = hidden_name(final, "replaced")
        with locked(final.parent, wait=True):
            final.rename(replaced)
            try:
                staging.rename(final)
            except BaseException:
                with suppress(OSError):
                    replaced.rename(final)
                raise
            sync(final.parent)
            # By this name it will never be put back, once a part of it is removed. If that is
            # refused, the new one is in place all the same, and `recover` does the rest.
            with suppress(OSError):
                replaced.rename(staging)


def hidden_name(final: Path, what: str) -> Path:
    """A name that no other has, for what a directory is before or after it has its own."""
    return final.with_name(f".{final.name}.{what}-{secrets.token_hex(4)}")


def recover(output_dir: Path) -> None:
    """Removes what saves of dead processes left, and finishes a replacement that was cut short.

    Raises:
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses it for another reason.
    """
    if not output_dir.is_dir():
        return
    with (
        named_errors(output_dir, "what a killed run left cannot be removed"),
        locked(output_dir, wait=True),
    ):
        for path in sorted(output_dir.iterdir()):
            match = _HIDDEN.fullmatch(path.name)
            if match is None or not path.is_dir() or path.is_symlink():
                continue
            if match["what"] == "replaced":
                _finish_replacement(path, output_dir / match["name"])
                continue
            # Another process may be removing it just now.
            with suppress(FileNotFoundError), locked(path) as is_dead:
                if is_dead:
                    discard(path)


def _finish_replacement(replaced: Path, final: Path) -> None:
    if os.path.lexists(final):
        sync(final.parent)
        doomed = hidden_name(final, "saving")
        replaced.rename(doomed)
        discard(doomed)
    else:
        replaced.rename(final)
        sync(final.parent)


def remove_directory(directory: Path) -> None:
    """Removes a checkpoint so that a crash never leaves a part of it under its name.

    Raises:
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses it for another reason.
    """
    with named_errors(directory, "could not be removed"):
        doomed = hidden_name(directory, "saving")
        directory.rename(doomed)
        discard(doomed)


def discard(hidden: Path) -> None:
    """Removes a hidden directory, if there is one, as soon as nothing else can lead to it.

    What cannot be removed is left to :func:`recover`.
    """
    sync(hidden.parent)
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden, ignore_errors=True)


def make_directory(directory: Path) -> None:
    """Makes a directory and those above it that are missing, so that they outlast a power loss.

    Raises:
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses it for another reason.
    """
    with named_errors(directory, "could not be made"):
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        if missing:
            directory.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync(path.parent)


@contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[bool]:
    """Locks a directory for as long as the block runs, or the process; yields whether it could."""
    descriptor = os.open(directory, os.O_RDONLY)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:
            # Locked by another, or on a file system without locks: then nobody may be thought dead.
            locked = False
        yield locked
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def _let_go() -> None:
    """In a process that was forked, such as a data loader's worker: the locks are its parent's."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def named_errors(directory: Path, what: str) -> Iterator[None]:
    """Makes an error of the system, raised in the block, one that says what to do.

    Args:
        directory: that is written to.
        what: what went wrong, after the directory's name.

    Raises:
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses to write for another reason.
    """
    try:
        yield
    except CheckpointingError:
        raise
    except (OSError, RuntimeError) as error:
        cause = _system_error(error)
        if cause is None:
            raise
        file = "" if cause.filename is None else f" ({os.fsdecode(cause.filename)})"
        reason = f"{directory}: {what}: {cause.strerror or cause}{file}"
        if cause.errno in _FULL:
            raise OutOfSpaceError(
                f"{reason}; make room, or choose another output_dir; "
                "the checkpoints that were there before are as they were"
            ) from error
        raise WriteError(
            f"{reason}; see to the disk and its permissions, or choose another output_dir; "
            "the checkpoints that were there before are as they were"
        ) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """The error of the system behind another one: torch.save hides what a file's write raised."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def check_room(directory: Path, nbytes: int) -> None:
    """Checks that the disk can take what is about to be written.

    Raises:
        OutOfSpaceError: if it cannot.
    """
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise OutOfSpaceError(
            f"{directory}: {nbytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "make room or choose another output_dir; nothing was written"
        )


def sync_tree(directory: Path) -> None:
    """Makes a directory and all in it outlast a power loss."""
    found = [(Path(root), files) for root, _, files in os.walk(directory, onerror=_raise)]
    # At the same time, since each waits for the disk to note what is new.
    run([partial(_sync_file, root / file) for root, files in found for file in files])
    for root, _ in found:
        sync(root)


def _sync_file(path: Path, check: Check) -> None:
    sync(path)


def _raise(error: OSError) -> None:
    raise error


def sync(path: Path) -> None:
    """Makes the data of a file, or the names in a directory, outlast a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if os.fstat(descriptor).st_size > WINDOW:
            drop_from_cache(descriptor)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)
