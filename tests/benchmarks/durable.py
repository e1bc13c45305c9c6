"""Bringing to the disk what others write without doing so, and pages out of the cache."""

import ctypes
import mmap
import os
import shutil
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def files_of(directory: Path) -> list[Path]:
    """Every file below a directory."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Returns when a file or directory lies on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Returns when every file and directory below, and the directory's own name, is on the disk."""
    for path in files_of(directory):
        sync(path)
    for path in [*directory.rglob("*/"), directory, directory.parent]:
        sync(path)


def cleared(directory: Path) -> Path:
    """A place where nothing is, with nothing left to write from before."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    os.sync()
    return directory


def warm(directory: Path) -> None:
    """Reads all files, so that they are in the page cache."""
    buffer = memoryview(bytearray(1 << 22))
    for path in files_of(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def chill(directory: Path) -> None:
    """Takes all files out of the page cache.

    Raises:
        RuntimeError: if some of them stayed, since another process has them mapped.
    """
    os.sync()
    for path in files_of(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if (resident := resident_pages(path)) > 0:
            raise RuntimeError(f"{path}: {resident} pages stayed in the page cache")


def resident_pages(path: Path) -> int:
    """How many pages of a file are in the page cache."""
    size = path.stat().st_size
    if size == 0:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    # Private and writable, since ctypes takes addresses of nothing else; no page is touched.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = _LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(size), states)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return sum(state & 1 for state in bytes(states))
