"""Reading files into the page cache before they are mapped.

Who touches a memory map of a file that is not in memory has the disk read small pieces, one after
another for each thread. Plain reads of some MiB at the same places keep it busy.
"""

import errno
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from checkpointing.storage.new_file import Progress
from checkpointing.storage.page_in import fits_in_memory
from checkpointing.storage.threads import Check, run

# What one thread reads from one place on, and what it reads at a time.
_RANGE = 64 << 20
_BLOCK = 4 << 20
# What a file system answers that cannot tell what is in memory.
_CANNOT_TELL = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def read_ahead(files: Sequence[Path], progress: Progress) -> None:
    """Reads what of the files is not in memory yet; of what is, only a byte here and there.

    A hint: nothing is read where the system cannot tell what is in memory, or of files that would
    drive each other out of it, and what cannot be read is left to who uses it.

    Args:
        files: to read, from the start of the first to the end of the last.
        progress: called, by several threads, with the number of bytes that are in memory now.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return
    descriptors: list[int] = []
    try:
        jobs, total = [], 0
        for path in files:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            size = os.fstat(descriptors[-1]).st_size
            total += size
            jobs += [
                partial(_read, descriptors[-1], start, min(start + _RANGE, size), progress)
                for start in range(0, size, _RANGE)
            ]
        if fits_in_memory(total):
            run(jobs)
    except OSError:
        return
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(descriptor: int, start: int, end: int, progress: Progress, check: Check) -> None:
    buffer = memoryview(bytearray(min(_BLOCK, end - start)))
    for offset in range(start, end, _BLOCK):
        check()
        size = min(_BLOCK, end - offset)
        # Its last byte: the first ones come with what was read before them.
        if not _is_in_memory(descriptor, offset + size - 1):
            os.preadv(descriptor, [buffer[:size]], offset)
        progress(size)


def _is_in_memory(descriptor: int, offset: int) -> bool:
    """Whether a byte can be had without the disk; also if the system cannot tell."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _CANNOT_TELL:
            raise
    return True
