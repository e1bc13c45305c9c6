"""A new file, which several threads write at known places, and which is digested on the way."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.tensors import Rows, TensorMeta, TensorSource, meta_of
from checkpointing.storage.digest import Digest, FileDigest, Part, checksum_of
from checkpointing.storage.preallocate import preallocate
from checkpointing.storage.tensor_bytes import tensor_bytes
from checkpointing.storage.threads import Check, run
from checkpointing.storage.write_behind import Follower, WriteBehind

Progress = Callable[[int], object]
"""Called with the number of bytes that were just written."""

# What one thread writes from one place on: large tensors in ranges, small ones together. Of a
# small file it is less, so that all threads have something to do, unless starting them would take
# longer. It does not depend on their number, so that the same file has the same parts on every
# machine.
_RANGE = 64 << 20
_SHARES = 16
LEAST_RANGE = 32 << 20
# What is computed, digested and written while it is in the processor's cache.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor, and where in the file its data begins."""

    name: str
    meta: TensorMeta
    offset: int

    @cached_property
    def row_count(self) -> int:
        """Length of its first dimension; 1 for a scalar."""
        return self.meta.shape[0] if self.meta.shape else 1

    @cached_property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.meta.nbytes // max(self.row_count, 1)

    @property
    def all_rows(self) -> "PlacedRows":
        """The whole tensor."""
        return PlacedRows(self, 0, self.row_count)


@dataclass(frozen=True)
class PlacedRows:
    """Rows of a placed tensor."""

    tensor: PlacedTensor
    start: int
    stop: int

    @property
    def offset(self) -> int:
        """Where in the file they begin."""
        return self.tensor.offset + self.start * self.tensor.row_bytes

    @property
    def nbytes(self) -> int:
        """Size of the rows."""
        return (self.stop - self.start) * self.tensor.row_bytes


Written = tuple[int, Part, int]
"""What was written: its offset, its digest, and its checksum of another kind, or 0."""


class NewFile:
    """A file that is being written; its parts may come in any order.

    Args:
        path: of the file, which is made or emptied.
        mode: flags of ``os.open``, if another process makes the file.
    """

    def __init__(self, path: Path, mode: int = os.O_CREAT | os.O_TRUNC) -> None:
        self.path = path
        self._parts: list[tuple[int, Part]] = []
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | mode, 0o666)
        self._behind = WriteBehind(self._descriptor)

    def set_size(self, size: int) -> None:
        """Makes the file as long as it will be, so that threads need not wait for each other.

        Raises:
            OSError: if there is no room for it.
        """
        with self._named_errors():
            os.ftruncate(self._descriptor, size)
            preallocate(self._descriptor, size)

    def write(self, offset: int, data: bytes | memoryview, tensor: str = "") -> None:
        """Writes a part; a large one by several threads, in parts."""
        view = memoryview(data).cast("B")
        jobs = [
            partial(self._write_part, offset + start, view[start : start + _RANGE], tensor)
            for start in range(0, max(len(view), 1), _RANGE)
        ]
        for parts in run(jobs):
            self._parts += parts

    def _write_part(
        self, offset: int, view: memoryview, tensor: str, check: Check
    ) -> list[tuple[int, Part]]:
        behind = Follower(self._behind, offset)
        for start in range(0, len(view), _BLOCK):
            check()
            self._write_at(offset + start, view[start : start + _BLOCK], behind)
        self._send_rest(behind)
        return [(offset, Part(len(view), checksum_of([view]), tensor))]

    def write_tensors(
        self,
        tensors: Sequence[PlacedTensor],
        source: TensorSource,
        progress: Progress,
        crc: Callable[[memoryview, int], int] | None = None,
    ) -> dict[str, list[tuple[int, int]]]:
        """Computes and writes tensors.

        Args:
            tensors: which, and where.
            source: the tensors.
            progress: called by several threads.
            crc: a checksum of data and of that of what was before it.

        Returns:
            If ``crc`` is given: for each tensor that of each of its ranges in order, from zero,
            and the number of bytes.
        """
        written = self._write_rows([one.all_rows for one in tensors], source, progress, crc)
        return crcs_of(written)

    def _write_rows(
        self,
        ranges: Sequence[PlacedRows],
        source: TensorSource,
        progress: Progress,
        crc: Callable[[memoryview, int], int] | None,
    ) -> list[Written]:
        jobs = [
            partial(self._write_job, some, source, progress, crc) for some in _jobs(ranges, source)
        ]
        written = [one for job in run(jobs) for one in job]
        self._parts += [(offset, part) for offset, part, _ in written]
        return written

    def _write_job(
        self,
        ranges: Sequence[PlacedRows],
        source: TensorSource,
        progress: Progress,
        crc: Callable[[memoryview, int], int] | None,
        check: Check,
    ) -> list[Written]:
        written = []
        behind = Follower(self._behind, ranges[0].offset)
        for one in ranges:
            digest, value, offset = Digest(), 0, one.offset
            for data in _blocks(one, source.rows(one.tensor.name)):
                check()
                digest.update(data)
                value = value if crc is None else crc(data, value)
                self._write_at(offset, data, behind)
                offset += len(data)
                progress(len(data))
            part = Part(one.nbytes, digest.checksum(), one.tensor.name)
            written.append((one.offset, part, value))
        self._send_rest(behind)
        return written

    def _write_at(self, offset: int, data: memoryview, behind: Follower) -> None:
        with self._named_errors():
            while data:
                count = os.pwrite(self._descriptor, data, offset)
                data, offset = data[count:], offset + count
            behind.wrote_to(offset)

    def _send_rest(self, behind: Follower) -> None:
        with self._named_errors():
            behind.stop()

    def finish(self) -> FileDigest:
        """Checks that all of the file is written.

        Returns:
            What it holds. Parts of what is around tensors are not joined.

        Raises:
            RuntimeError: if the parts leave a gap, or overlap; a fault of the program.
        """
        with self._named_errors():
            size = os.fstat(self._descriptor).st_size
        self._parts.sort(key=lambda placed: (placed[0], placed[1].size))
        end = 0
        for offset, part in self._parts:
            if offset != end:
                raise RuntimeError(f"{self.path}: a part at byte {offset}, but {end} are written")
            end += part.size
        if end != size:
            raise RuntimeError(f"{self.path}: has {size} bytes, but {end} are written")
        return FileDigest(tuple(part for _, part in self._parts))

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        with self._named_errors():
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file, finished or not."""
        with self._named_errors():
            os.close(self._descriptor)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Makes the system's errors in the block tell the file."""
        try:
            yield
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """Yields a new file, which is closed when the block ends."""
    file = NewFile(path)
    try:
        yield file
    finally:
        file.close()


def crcs_of(written: Sequence[Written]) -> dict[str, list[tuple[int, int]]]:
    """Of each tensor the checksum and size of each of its ranges, which are given in order."""
    crcs: dict[str, list[tuple[int, int]]] = {}
    for _, part, value in written:
        crcs.setdefault(part.tensor, []).append((value, part.size))
    return crcs


def _jobs(ranges: Sequence[PlacedRows], source: TensorSource) -> Iterator[list[PlacedRows]]:
    """What one thread writes at a time, in the order of the file."""
    share = sum(one.nbytes for one in ranges) // _SHARES
    most = min(max(share, LEAST_RANGE), _RANGE)
    together: list[PlacedRows] = []
    nbytes = 0
    for large in ranges:
        for one in in_parts(large, source.rows(large.tensor.name), most):
            if together and nbytes + one.nbytes > most:
                yield together
                together, nbytes = [], 0
            together.append(one)
            nbytes += one.nbytes
    if together:
        yield together


def in_parts(large: PlacedRows, rows: Rows, most: int) -> Iterator[PlacedRows]:
    """Ranges of no more than a number of bytes, unless the tensor cannot be had in such."""
    tensor = large.tensor
    if rows.count != tensor.row_count:
        raise _mismatch(tensor.name, f"{rows.count} rows", tensor.meta)
    step = max(most // max(tensor.row_bytes, 1) // rows.unit, 1) * rows.unit
    for start in range(large.start, max(large.stop, large.start + 1), step):
        yield PlacedRows(tensor, start, min(start + step, large.stop))


def _blocks(one: PlacedRows, rows: Rows) -> Iterator[memoryview]:
    """The data of a range, a few rows at a time."""
    step = max(_BLOCK // max(one.tensor.row_bytes, 1) // rows.unit, 1) * rows.unit
    for start in range(one.start, one.stop, step):
        stop = min(start + step, one.stop)
        tensor = rows.read(start, stop)
        _check(one.tensor, meta_of(tensor), stop - start)
        data = tensor_bytes(tensor)
        for begin in range(0, len(data), _BLOCK):
            yield data[begin : begin + _BLOCK]


def _check(tensor: PlacedTensor, found: TensorMeta, rows: int) -> None:
    expected = tensor.meta
    if expected.shape:
        expected = TensorMeta((rows, *expected.shape[1:]), expected.dtype)
    if found != expected:
        raise _mismatch(tensor.name, found, expected)


def _mismatch(name: str, found: object, expected: TensorMeta) -> TensorMismatchError:
    return TensorMismatchError(
        "writing tensors",
        [f"{name}: is {found}, and was announced as {expected}"],
        "This is a fault of the program, not of your files; please report it.",
    )
