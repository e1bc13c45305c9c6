"""A checkpoint exists from one instant on: the rename of its directory.

Everything is written to a hidden sibling directory, synced to the disk, and then renamed. A crash
leaves a hidden directory, never a directory with a final name and missing data.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.errors import OutOfSpaceError

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<what>saving|replaced)-(?P<pid>\d+)")


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yields a hidden directory that becomes ``final`` when the block ends without an exception.

    An existing ``final`` stays whole until the new one is complete, and is then replaced. If the
    block raises, the hidden directory is removed and nothing has changed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}.saving-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        _sync_tree(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    replaced = final.with_name(f".{final.name}.replaced-{os.getpid()}")
    if final.exists():
        final.rename(replaced)
    staging.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(output_dir: Path) -> None:
    """Removes what saves of dead processes left, and finishes a replacement that was cut short."""
    if not output_dir.is_dir():
        return
    for path in sorted(output_dir.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not path.is_dir() or _is_alive(int(match["pid"])):
            continue
        final = output_dir / match["name"]
        if match["what"] == "replaced" and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_directory(directory: Path) -> None:
    """Removes a checkpoint so that a crash never leaves a part of it under its name."""
    doomed = directory.with_name(f".{directory.name}.saving-{os.getpid()}")
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for file in files:
            _sync(Path(root) / file)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
