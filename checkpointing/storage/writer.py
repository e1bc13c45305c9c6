"""Writing the files of a checkpoint, each with its checksum."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpointing.mapping.tensors import TensorSource
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.manifest import write_manifest
from checkpointing.storage.new_file import NewFile, Progress, new_file
from checkpointing.storage.torch_archive import TorchArchive
from checkpointing.storage.write import (
    write_archive,
    write_safetensors,
    write_torch_file,
    write_torch_object,
)

_CHUNK = 1 << 24


class CheckpointWriter:
    """Writes into a directory, and remembers what it wrote for the manifest.

    Args:
        directory: exists, and holds nothing else.
        progress: called with the number of bytes of tensors that were just written.
    """

    def __init__(self, directory: Path, progress: Progress) -> None:
        self.directory = directory
        self._progress = progress
        self._prefix = ""
        self._digests: dict[str, FileDigest] = {}

    def within(self, name: str) -> "CheckpointWriter":
        """A writer into a new directory in this one, with the same manifest."""
        inner = CheckpointWriter(self.directory / name, self._progress)
        inner.directory.mkdir()
        inner._prefix = f"{self._prefix}{name}/"
        inner._digests = self._digests
        return inner

    def tensors(self, name: str, source: TensorSource, names: Sequence[str] | None = None) -> None:
        """Writes tensors; the format is safetensors if the name says so, else ``torch.save``'s.

        Args:
            name: of the file.
            source: the tensors.
            names: which of them; all if not given.
        """
        with self._opened(name) as file:
            self._write_tensors(file, source, names)

    def _write_tensors(
        self, file: NewFile, source: TensorSource, names: Sequence[str] | None
    ) -> None:
        write: Callable[..., None] = (
            write_safetensors if file.path.suffix == ".safetensors" else write_torch_file
        )
        write(file, source, list(source.metas) if names is None else names, self._progress)

    def torch_object(self, name: str, content: object) -> None:
        """Writes plain data and tensors with ``torch.save``."""
        with self._opened(name) as file:
            write_torch_object(file, content)

    def torch_archive(self, name: str, archive: TorchArchive, source: TensorSource) -> None:
        """Writes tensors with ``torch.save``, among other things that the file holds."""
        with self._opened(name) as file:
            write_archive(file, archive, source, self._progress)

    def text(self, name: str, content: str) -> None:
        """Writes a text file, in UTF-8."""
        with self._opened(name) as file:
            file.write(0, content.encode())

    def copy(self, path: Path) -> None:
        """Copies a file under its own name."""
        with path.open("rb") as source, self._opened(path.name) as file:
            size = 0
            while chunk := source.read(_CHUNK):
                file.write(size, chunk)
                size += len(chunk)

    def manifest(self, facts: Mapping[str, Any]) -> None:
        """Writes the manifest of all that was written; the last file of a checkpoint."""
        write_manifest(self.directory, facts, self._digests)

    @contextmanager
    def _opened(self, name: str) -> Iterator[NewFile]:
        with new_file(self.directory / name) as file:
            yield file
            self._digests[self._prefix + name] = file.finish()
