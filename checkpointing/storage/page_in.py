"""Bringing mapped files into memory in large pieces.

A program that touches a memory map is stopped at every few pages, until they are read or only
entered into its page table. Asking for many at once keeps the disk busy.
"""

import ctypes
import errno
import mmap
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import Tensor

from checkpointing.errors import CorruptCheckpointError
from checkpointing.mapping.tensors import Rows

# linux/mman.h, from Linux 5.14 and 5.4 on: a private map is not copied by the first.
_POPULATE_READ, _COLD = 22, 20
# As much as is asked for at a time: in between, other threads can change the process's maps.
_WINDOW = 8 << 20
# What is read to be used at once.
_FEW = 16 << 20


def mapped_rows(tensor: Tensor, name: str) -> Rows:
    """The rows of a tensor that views a memory map, for those who read them once and in order.

    A few rows are brought in when they are read, and are then the first that the system gives up
    when it needs memory. Who takes many at once gets a view that is brought in when it is used.

    Args:
        tensor: whose elements lie beside each other.
        name: of the tensor, for errors.
    """
    if not tensor.dim():
        return Rows.of(tensor)
    # Several threads may read ranges of one tensor: then it is told too early of some, no more.
    before = tensor[:0]

    def read(start: int, stop: int) -> Tensor:
        nonlocal before
        rows = tensor[start:stop]
        if rows.nbytes > _FEW:
            return rows
        page_in(rows, name)
        last, before = before, rows
        _advise(last, _COLD)
        return rows

    return replace(Rows.of(tensor), read=read)


def page_in(tensor: Tensor, name: str) -> None:
    """Has the system read what a tensor views of a memory map, if it can; else it is read later.

    Args:
        tensor: whose elements lie beside each other.
        name: of the tensor, for the error.

    Raises:
        CorruptCheckpointError: if the file became shorter, or the disk cannot read it. Who touched
            such memory would be killed.
    """
    if _advise(tensor, _POPULATE_READ) == errno.EFAULT:
        raise CorruptCheckpointError(
            f"{name}: its file cannot be read to the end any more; it was cut off while it was "
            "open, or the disk fails: get the checkpoint anew"
        )


def _advise(tensor: Tensor, advice: int) -> int:
    """Advises the system on the pages of a tensor; why it refused to listen, or 0."""
    madvise = _madvise()
    if madvise is None or not (tensor.is_cpu and tensor.nbytes and tensor.is_contiguous()):
        return 0
    begin = tensor.data_ptr()
    end = begin + tensor.nbytes
    begin -= begin % mmap.PAGESIZE
    for start in range(begin, end, _WINDOW):
        if madvise(start, min(_WINDOW, end - start), advice) != 0:
            return ctypes.get_errno()
    return 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def fits_in_memory(nbytes: int) -> bool:
    """Whether so much can be brought in without driving out what was brought in before it."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return False
    sizes = dict(line.split(":", 1) for line in text.splitlines())
    available = 1024 * int(sizes["MemAvailable"].removesuffix("kB"))
    return nbytes <= available // 2
