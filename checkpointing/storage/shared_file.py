"""A new file that several processes write, each what it has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from checkpointing.errors import WriteError
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorSource
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.new_file import (
    NewFile,
    PlacedRows,
    PlacedTensor,
    Progress,
    Written,
    crcs_of,
)
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.shared_work import Gathered, Work

_Result = TypeVar("_Result")


class SharedFile(NewFile):
    """A file that is being written by all processes, which call it in the same order.

    What goes wrong in one is raised where all can raise it: until then it goes on to take part in
    gathering tensors, which the others wait for.

    Args:
        path: of the file, which is made or emptied by the first process, before the others.
        ranks: the processes.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self._error: BaseException | None = None
        if ranks.is_first:
            super().__init__(path)
        else:
            super().__init__(path, 0)

    def set_size(self, size: int) -> None:
        if self._ranks.is_first:
            self._attempt(lambda: super(SharedFile, self).set_size(size))

    def write(self, offset: int, data: bytes | memoryview, tensor: str = "") -> None:
        """Writes a part, in the first process; it must be the same in all of them."""
        if self._ranks.is_first:
            self._attempt(lambda: super(SharedFile, self).write(offset, data, tensor))

    def write_tensors(
        self,
        tensors: Sequence[PlacedTensor],
        source: TensorSource,
        progress: Progress,
        crc: Callable[[memoryview, int], int] | None = None,
    ) -> dict[str, list[tuple[int, int]]]:
        # Imported here: it takes long, and only who has tensors in shards needs it.
        from checkpointing.mapping.dtensors import keeping_the_last

        written: list[Written] = []

        def write(ranges: Sequence[PlacedRows], source: TensorSource) -> None:
            written.extend(self._write_rows(ranges, source, progress, crc))

        def write_gathered(work: Gathered) -> None:
            start, stop = work.place.start, work.place.stop
            some = self._attempt(partial(work.rows.read, start, stop), for_others=True)
            share = work.shares[self._ranks.rank]
            if share and some is not None:
                self._attempt(partial(write, share, _in_memory(work.place, some)))

        work = Work(tensors, source, self._ranks.count)
        own = work.readable[self._ranks.rank]
        self._attempt(partial(write, own, source))
        with keeping_the_last():
            for gathered in work.gathered:
                if self._ranks.rank in gathered.ranks:
                    write_gathered(gathered)
        self._raise_together()
        if crc is None:
            return {}
        everything = [one for ranks in self._ranks.exchange(written) for one in ranks]
        return crcs_of(sorted(everything, key=lambda one: (one[0], one[1].size)))

    def finish(self) -> FileDigest:
        """As of any file; nothing is told but to the first process."""
        self._attempt(self.sync)
        self._raise_together()
        parts = [part for ranks in self._ranks.exchange(self._parts) for part in ranks]
        if not self._ranks.is_first:
            return FileDigest(())
        self._parts = parts
        return super().finish()

    def _attempt(self, act: Callable[[], _Result], for_others: bool = False) -> _Result | None:
        """Does something, if nothing has gone wrong before or the others wait for it."""
        if self._error is None or for_others:
            try:
                return act()
            except BaseException as error:
                self._error = self._error or error
        return None

    def _raise_together(self) -> None:
        with self._ranks.agreed():
            if self._error is not None:
                raise self._error


@contextmanager
def shared_file(path: Path, ranks: Ranks) -> Iterator[SharedFile]:
    """Yields a new file that all processes write, which is closed when the block ends.

    Raises:
        WriteError: if one of the processes does not see the file.
    """
    file: SharedFile | None = None
    try:
        with ranks.agreed():
            if ranks.is_first:
                file = SharedFile(path, ranks)
        with ranks.agreed():
            file = file or _opened(path, ranks)
        yield file
    finally:
        if file is not None:
            file.close()


def _opened(path: Path, ranks: Ranks) -> SharedFile:
    try:
        return SharedFile(path, ranks)
    except FileNotFoundError as error:
        raise WriteError(
            f"{path}: rank {ranks.rank} does not see the file, which rank 0 has made: all ranks "
            "must write to the same storage; choose an output_dir that is one directory for all"
        ) from error


def _in_memory(rows: PlacedRows, some: Tensor) -> TensorSource:
    """A tensor of which only some rows are in memory."""
    name, meta = rows.tensor.name, rows.tensor.meta

    def read(start: int, stop: int) -> Tensor:
        return some[start - rows.start : stop - rows.start] if meta.shape else some

    return LazyTensors({name: meta}, {name: lambda: Rows(rows.tensor.row_count, 1, read)})
