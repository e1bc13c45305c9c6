"""A new file that several processes write, each what it has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from checkpointing.errors import WriteError
from checkpointing.mapping.tensors import StateDictSource, TensorSource
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.new_file import (
    LEAST_RANGE,
    NewFile,
    PlacedRows,
    PlacedTensor,
    Progress,
    Written,
    crcs_of,
)
from checkpointing.storage.ranks import Ranks

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

        def write_gathered(tensor: PlacedTensor, share: Sequence[PlacedRows]) -> None:
            whole = self._attempt(source.rows(tensor.name).read_all, for_others=True)
            if share and whole is not None:
                self._attempt(partial(write, share, StateDictSource({tensor.name: whole})))

        work = _Work(tensors, source, self._ranks.count)
        own = work.readable[self._ranks.rank]
        self._attempt(partial(write, own, source))
        with keeping_the_last():
            for tensor, shares in work.gathered:
                write_gathered(tensor, shares[self._ranks.rank])
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


class _Work:
    """Which process writes what of a file. Every process comes to the same result.

    Args:
        tensors: of the file.
        source: the tensors.
        count: number of processes.

    Attributes:
        readable: by rank, what it can read by itself.
        gathered: what must be gathered, in order; of each, by rank, what it writes then.
    """

    def __init__(self, tensors: Sequence[PlacedTensor], source: TensorSource, count: int) -> None:
        everyone = tuple(range(count))
        self._loads = [0] * count
        self.readable: list[list[PlacedRows]] = [[] for _ in everyone]
        self.gathered: list[tuple[PlacedTensor, list[list[PlacedRows]]]] = []
        for tensor in tensors:
            rows = source.rows(tensor.name)
            if rows.shards is None:
                self._deal(tensor.all_rows, rows.unit, everyone, self.readable)
                continue
            for held in rows.shards.held:
                place = replace(tensor.all_rows, start=held.start, stop=held.stop)
                self._deal(place, rows.unit, held.ranks, self.readable)
            if not rows.shards.held:
                shares: list[list[PlacedRows]] = [[] for _ in everyone]
                self._deal(tensor.all_rows, 1, everyone, shares)
                self.gathered.append((tensor, shares))

    def _deal(
        self, place: PlacedRows, unit: int, ranks: Sequence[int], to: list[list[PlacedRows]]
    ) -> None:
        """Gives rows to those ranks, of all that have them, which have least to write."""
        count = place.stop - place.start
        parts = max(min(len(ranks), place.nbytes // LEAST_RANGE), 1)
        step = max(-(-count // (parts * unit)), 1) * unit
        for start in range(place.start, max(place.stop, place.start + 1), step):
            part = replace(place, start=start, stop=min(start + step, place.stop))
            rank = min(ranks, key=self._loads.__getitem__)
            self._loads[rank] += part.nbytes
            to[rank].append(part)
