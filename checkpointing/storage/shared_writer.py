"""Writing a checkpoint by all processes of a job, each of which has a part of the weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpointing.mapping.tensors import (
    Held,
    Rows,
    Shards,
    StateDictSource,
    TensorMeta,
    TensorSource,
    is_dtensor,
    is_sharded,
)
from checkpointing.storage.commit import named_errors, staged_directory
from checkpointing.storage.new_file import Progress
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.shared_file import shared_file
from checkpointing.storage.torch_archive import TorchArchive
from checkpointing.storage.write import archive_of, tensors_by_name, write_archive
from checkpointing.storage.writer import CheckpointWriter


@contextmanager
def staged_together(final: Path, ranks: Ranks) -> Iterator[Path]:
    """As :func:`~checkpointing.storage.commit.staged_directory`, for all processes.

    The first one makes the directory and gives it its name, once the block has ended in all.

    Raises:
        OutOfSpaceError: as ``staged_directory``.
        WriteError: as ``staged_directory``.
        CheckpointingError: what another process has raised.
    """
    if ranks.is_first:
        with staged_directory(final) as staging:
            ranks.exchange(staging)
            with ranks.agreed():
                yield staging
    else:
        with named_errors(final, "could not be saved"):
            staging = ranks.exchange()[0]
            with ranks.agreed():
                yield staging


class SharedWriter(CheckpointWriter):
    """Writes into a directory, as all processes do; only tensors in shards are written by all.

    Args:
        directory: exists, and holds nothing else.
        progress: called with the number of bytes of tensors that this process has just written.
        ranks: the processes.
    """

    def __init__(self, directory: Path, progress: Progress, ranks: Ranks) -> None:
        super().__init__(directory, progress)
        self._ranks = ranks

    def within(self, name: str) -> "SharedWriter":
        inner = SharedWriter(self.directory / name, self._progress, self._ranks)
        if self._ranks.is_first:
            inner.directory.mkdir()
        inner._prefix = f"{self._prefix}{name}/"
        inner._digests = self._digests
        return inner

    def tensors(self, name: str, source: TensorSource, names: Sequence[str] | None = None) -> None:
        if self._ranks.count == 1 or not is_sharded(source):
            if self._ranks.is_first:
                super().tensors(name, source, names)
            return
        with shared_file(self.directory / name, self._ranks) as file:
            self._write_tensors(file, source, names)
            self._digests[self._prefix + name] = file.finish()

    def torch_object(self, name: str, content: object) -> None:
        """Writes plain data and tensors; all but those in shards are the first process's."""
        tensors = tensors_by_name(content)
        if any(map(is_dtensor, tensors.values())):
            with shared_file(self.directory / name, self._ranks) as file:
                laid_out = archive_of(content) if self._ranks.is_first else None
                archive: TorchArchive = self._ranks.exchange(laid_out)[0]
                source = _OfTheFirst(archive.metas, tensors)
                write_archive(file, archive, source, self._progress)
                self._digests[self._prefix + name] = file.finish()
        elif self._ranks.is_first:
            super().torch_object(name, content)

    def text(self, name: str, content: str) -> None:
        if self._ranks.is_first:
            super().text(name, content)

    def copy(self, path: Path) -> None:
        if self._ranks.is_first:
            super().copy(path)

    def manifest(self, facts: Mapping[str, Any]) -> None:
        if self._ranks.is_first:
            super().manifest(facts)


class _OfTheFirst(StateDictSource):
    """Tensors in shards, and whole ones beside them, which are saved as the first process has them.

    Args:
        metas: of all, in the first process.
        tensors: of this process.
    """

    def __init__(self, metas: Mapping[str, TensorMeta], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.metas = dict(metas)

    def rows(self, name: str) -> Rows:
        if is_dtensor(self.state_dict.get(name)):
            return super().rows(name)
        shape = self.metas[name].shape
        count = shape[0] if shape else 1

        def read(start: int, stop: int) -> Tensor:
            return super(_OfTheFirst, self).rows(name).read(start, stop)

        rows = Rows(count, 1, read)
        return replace(rows, shards=Shards((Held(0, count, (0,)),), rows))
