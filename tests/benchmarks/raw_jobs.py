"""What the machine itself can do: reading, writing and copying bytes, and starting Python."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from tests.benchmarks.durable import chill, cleared, files_of, sync, sync_tree, warm

_MIB = 1 << 20
_WINDOW = 32 * _MIB
_WRITE, _WAIT_BEFORE_WRITE_WAIT = 2, 7
_LIBC = ctypes.CDLL(None, use_errno=True)


def read(directory: str, threads: int, block: int, cold: bool = False) -> Callable[[], Any]:
    """Reads every file into buffers that are used again.

    Args:
        directory: what is read.
        threads: that read at the same time.
        block: MiB of a read.
        cold: take the files out of the page cache before.
    """
    (chill if cold else warm)(Path(directory))
    files, size = files_of(Path(directory)), block * _MIB
    buffers = [memoryview(bytearray(size)) for _ in range(threads)]

    def run() -> None:
        descriptors = [os.open(path, os.O_RDONLY) for path in files]
        blocks = _shared(
            (descriptor, start)
            for descriptor, path in zip(descriptors, files, strict=True)
            for start in range(0, path.stat().st_size, size)
        )

        def thread(buffer: memoryview) -> None:
            for descriptor, start in blocks:
                os.preadv(descriptor, [buffer], start)

        _in_parallel(thread, buffers)
        for descriptor in descriptors:
            os.close(descriptor)

    return run


@cache
def _contents(directory: str) -> dict[str, memoryview]:
    paths = files_of(Path(directory))
    return {path.name: memoryview(bytearray(path.read_bytes())) for path in paths}


def write(directory: str, out: str, threads: int, windows: bool) -> Callable[[], Any]:
    """Writes the bytes of a directory's files, which are in memory, to the disk.

    Args:
        directory: whose files are written.
        out: where to.
        threads: that write at the same time.
        windows: room is made before, and every 32 MiB are sent to the disk and let go of from the
            page cache while the next are written; otherwise one fsync ends it.
    """
    contents, destination = _contents(directory), cleared(Path(out))

    def run() -> None:
        destination.mkdir()
        descriptors = {}
        for name, data in contents.items():
            descriptors[name] = os.open(destination / name, os.O_WRONLY | os.O_CREAT, 0o644)
            if windows and len(data) > 0:
                os.posix_fallocate(descriptors[name], 0, len(data))
        parts = _shared(
            (descriptors[name], data, start)
            for name, data in contents.items()
            for start in range(0, len(data), _WINDOW)
        )

        def thread(_: int) -> None:
            before: tuple[int, int] | None = None
            for descriptor, data, start in parts:
                stop = min(start + _WINDOW, len(data))
                for place in range(start, stop, _MIB):
                    os.pwrite(descriptor, data[place : min(place + _MIB, stop)], place)
                if windows:
                    _send(descriptor, start, _WRITE)
                    _let_go(before)
                    before = descriptor, start
            _let_go(before)

        _in_parallel(thread, range(threads))
        for descriptor in descriptors.values():
            os.fsync(descriptor)
            os.close(descriptor)
        sync(destination)
        sync(destination.parent)

    return run


def _send(descriptor: int, start: int, flags: int) -> None:
    place, length = ctypes.c_int64(start), ctypes.c_int64(_WINDOW)
    if _LIBC.sync_file_range(descriptor, place, length, flags):
        raise OSError(ctypes.get_errno(), "sync_file_range")


def _let_go(window: tuple[int, int] | None) -> None:
    if window is not None:
        descriptor, start = window
        _send(descriptor, start, _WAIT_BEFORE_WRITE_WAIT)
        os.posix_fadvise(descriptor, start, _WINDOW, os.POSIX_FADV_DONTNEED)


def _shared(parts: Iterator[Any]) -> Iterator[Any]:
    """An iterator that several threads may share."""
    items, numbers, lock = list(parts), count(), threading.Lock()

    def following() -> Any:
        with lock:
            number = next(numbers)
        return items[number] if number < len(items) else None

    return iter(following, None)


def _in_parallel(thread: Callable[[Any], None], arguments: Any) -> None:
    with ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(thread, arguments))


def rewrite(directory: str, out: str) -> Callable[[], Any]:
    """Writes as many files of the same sizes, one after the other."""
    contents = [path.read_bytes() for path in files_of(Path(directory))]
    destination = cleared(Path(out))

    def run() -> None:
        destination.mkdir()
        for number, data in enumerate(contents):
            descriptor = os.open(destination / str(number), os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(descriptor, data)
            os.fsync(descriptor)
            os.close(descriptor)
        sync(destination)
        sync(destination.parent)

    return run


def copy_tree(source: str, out: str) -> Callable[[], Any]:
    """``cp -r``, and every file brought to the disk."""
    warm(Path(source))
    destination = cleared(Path(out))

    def run() -> None:
        subprocess.run(["cp", "-r", source, str(destination)], check=True)
        sync_tree(destination)

    return run


def start_python(code: str) -> Callable[[], Any]:
    """A process that runs code and ends."""
    command = [sys.executable, "-P", "-c", code]
    return lambda: subprocess.run(command, check=True)


def copy_tensors(directory: str, threads: int, fresh: bool) -> Callable[[], Any]:
    """Copies the tensors of a directory's files, which are in memory, one after the other.

    Args:
        directory: whose files are copied.
        threads: each of which copies a part of every tensor.
        fresh: each into memory that the system gives for it and gets back; else all into the same.
    """
    sources = _tensors(directory)
    kept = bytearray(max(map(len, sources)))

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for source in sources:
                _copy(_fresh(len(source)) if fresh else kept, source, threads, pool)

    return run


def _copy(target: Any, source: memoryview, threads: int, pool: ThreadPoolExecutor) -> None:
    to, begin = _address(target), _address(source)
    bounds = [len(source) * part // threads for part in range(threads + 1)]

    def part(start: int, stop: int) -> None:
        ctypes.memmove(to + start, begin + start, stop - start)

    list(pool.map(part, bounds, bounds[1:]))


def _fresh(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _tensors(directory: str) -> list[memoryview]:
    """Each tensor's bytes (https://github.com/huggingface/safetensors#format)."""
    found = []
    for name, data in _contents(directory).items():
        if name.endswith(".safetensors"):
            start = 8 + int.from_bytes(data[:8], "little")
            for key, entry in json.loads(bytes(data[8:start])).items():
                if key != "__metadata__":
                    begin, end = entry["data_offsets"]
                    found.append(data[start + begin : start + end])
    return found
