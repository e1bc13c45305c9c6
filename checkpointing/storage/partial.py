"""The hidden directory of a conversion, from which the same one goes on if it was cut short.

Its name holds a key, a hash of all that the conversion is made of, so that another one never goes
on from it. A list in it tells of each weight file that is finished and on the disk what it must
hold. A file is kept if it still holds that; all else in the directory is removed and written anew.

Neither the name nor the list is a secret, and the checksums are not meant against forgery. Who can
prepare such a directory can write beside the destination, and so replace the destination itself:
nothing is gained by it. Only names of files that are about to be written are taken from the list.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from checkpointing.errors import CheckpointingError, ConfigError, WriteError
from checkpointing.mapping.tensors import TensorSource
from checkpointing.progress import bytes_progress
from checkpointing.storage.commit import (
    becoming,
    discard,
    hidden_name,
    locked,
    make_directory,
    named_errors,
    sync,
    sync_tree,
)
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.integrity import damaged_part
from checkpointing.storage.manifest import size_problem
from checkpointing.storage.new_file import Progress, new_file
from checkpointing.storage.read import read_json
from checkpointing.storage.torch_archive import TorchArchive
from checkpointing.storage.writer import CheckpointWriter

logger = logging.getLogger(__name__)

_LIST = ".finished.json"
_MEASURED = "measured"


class Measure(Protocol):
    """What measures tensors while they are written, such as a merge does.

    What it measured is kept for files that are not written again.
    """

    def take(self) -> Any:
        """What was measured since this was last called, for JSON."""

    def restart(self, measured: Sequence[Any]) -> None:
        """Forgets all but what :meth:`take` once gave.

        Raises:
            ValueError: if it never gave that; nothing is known then.
        """


@dataclass(frozen=True)
class FinishedFile:
    """A weight file that need not be written again.

    Attributes:
        digest: what it must hold.
        measured: what was measured while it was written, for JSON.
    """

    digest: FileDigest
    measured: Any = None

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(part.size for part in self.digest.parts if part.tensor)


class PartialDirectory:
    """A conversion that has not ended.

    Args:
        path: the hidden directory, which exists.
        weight_files: names of all weight files that it will hold.
        measure: what measures the tensors.

    Attributes:
        path: the hidden directory.
        finished: the weight files that need not be written again, by name.
    """

    def __init__(self, path: Path, weight_files: Collection[str], measure: Measure | None) -> None:
        self.path = path
        self.finished = finished_files(path, weight_files)
        self._count = len(weight_files)
        self._measure = measure

    @property
    def nbytes(self) -> int:
        """Size of all tensors that need not be written again."""
        return sum(file.nbytes for file in self.finished.values())

    @property
    def progress_text(self) -> str:
        """How far it has come."""
        return f"{len(self.finished)} of {self._count} weight files are finished"

    def keep_what_holds(self) -> None:
        """Compares the finished files with their checksums, and removes all else."""
        total = sum(file.digest.size for file in self.finished.values())
        with bytes_progress("checking", total) as progress:
            for name, file in list(self.finished.items()):
                problem = _problem(self.path / name, file.digest, progress)
                if problem is not None:
                    logger.warning("%s; it is written anew", problem)
                    del self.finished[name]
        if self._measure is not None:
            try:
                self._measure.restart([file.measured for file in self.finished.values()])
            except ValueError:
                self.finished.clear()
        kept = {self.path / name for name in (*self.finished, _LIST)}
        _remove_all_but(kept, self.path)

    def finish(self, name: str, digest: FileDigest) -> None:
        """Lists a file that is on the disk."""
        measured = None if self._measure is None else self._measure.take()
        self.finished[name] = FinishedFile(digest, measured)
        content = {
            name: {**file.digest.to_entry(), _MEASURED: file.measured}
            for name, file in self.finished.items()
        }
        written = self.path / f"{_LIST}.new"
        for directory in (self.path / name).relative_to(self.path).parents:
            sync(self.path / directory)
        with new_file(written) as file:
            file.write(0, json.dumps(content).encode())
            file.sync()
        written.rename(self.path / _LIST)
        sync(self.path)

    def writer(self, progress: Progress) -> CheckpointWriter:
        """What writes into the directory.

        Args:
            progress: called with the number of bytes of tensors that were just written.
        """
        return _Writer(self, progress)

    def take_place_of(self, final: Path) -> None:
        """Gives the directory, which is complete, its name.

        First it becomes what any other save is, of which no other process thinks that it could go
        on from it.
        """
        sync_tree(self.path)
        staging = hidden_name(final, "saving")
        with locked(final.parent, wait=True):
            self.path.rename(staging)
        with becoming(staging, final):
            (staging / _LIST).unlink()


class _Writer(CheckpointWriter):
    """Leaves finished files as they are."""

    def __init__(self, partial: PartialDirectory, progress: Progress) -> None:
        super().__init__(partial.path, progress)
        self._partial = partial

    def within(self, name: str) -> CheckpointWriter:
        inner = _Writer(self._partial, self._progress)
        inner.directory = self.directory / name
        inner.directory.mkdir(exist_ok=True)
        inner._prefix = f"{self._prefix}{name}/"
        inner._digests = self._digests
        return inner

    def tensors(self, name: str, source: TensorSource, names: Sequence[str] | None = None) -> None:
        if not self._is_finished(name):
            super().tensors(name, source, names)
            self._finish(name)

    def torch_archive(self, name: str, archive: TorchArchive, source: TensorSource) -> None:
        if not self._is_finished(name):
            super().torch_archive(name, archive, source)
            self._finish(name)

    def _is_finished(self, name: str) -> bool:
        finished = self._partial.finished.get(self._prefix + name)
        if finished is not None:
            self._digests[self._prefix + name] = finished.digest
        return finished is not None

    def _finish(self, name: str) -> None:
        sync(self.directory / name)
        self._partial.finish(self._prefix + name, self._digests[self._prefix + name])


def partial_path(final: Path, key: str) -> Path:
    """Where a conversion to a directory is written.

    Args:
        final: the directory.
        key: hexadecimal; other conversions have another one.
    """
    return final.with_name(f".{final.name}.partial-{key}")


def finished_files(partial: Path, weight_files: Collection[str]) -> dict[str, FinishedFile]:
    """The weight files that an earlier process has finished, as far as their sizes tell.

    Args:
        partial: from :func:`partial_path`; it need not exist.
        weight_files: names of those that are wanted.
    """
    try:
        entries = read_json(partial / _LIST)
    except (CheckpointingError, OSError):
        return {}
    finished = {}
    for name, entry in entries.items():
        digest = FileDigest.from_entry(entry)
        path = partial / name if name in weight_files else None
        if path is None or digest is None or path.is_symlink():
            continue
        if size_problem(path, digest) is None:
            finished[name] = FinishedFile(digest, entry.get(_MEASURED))
    return finished


@contextmanager
def partial_directory(
    final: Path, key: str, weight_files: Collection[str], measure: Measure | None = None
) -> Iterator[PartialDirectory]:
    """Yields the hidden directory of a conversion, which becomes ``final`` when the block ends.

    If the system refuses to write, or the user stops the block (``KeyboardInterrupt``), the hidden
    directory stays as soon as a weight file is finished, and the error says so, the user's in a
    note. After any other error it is removed. What other conversions to ``final`` have left is
    removed too.

    Args:
        final: the directory to write, or to replace.
        key: of the conversion, in hexadecimal.
        weight_files: names of the weight files that it writes.
        measure: what measures its tensors.

    Raises:
        ConfigError: if another process is at the same conversion.
        OutOfSpaceError: if the disk or a quota is full.
        WriteError: if the system refuses to write for another reason.
    """
    with ExitStack() as held:
        partial = None
        try:
            with named_errors(final, "could not be saved"):
                path = partial_path(final, key)
                make_directory(final.parent)
                with locked(final.parent, wait=True):
                    _remove_others(path, final)
                    held.enter_context(_taken(path))
                partial = PartialDirectory(path, weight_files, measure)
                partial.keep_what_holds()
                yield partial
                partial.take_place_of(final)
        except BaseException as error:
            stays = isinstance(error, KeyboardInterrupt | WriteError)
            # Once it has had another name, it is removed under that.
            if partial is None or not partial.path.is_dir():
                raise
            if not stays or not partial.finished:
                with suppress(OSError):
                    discard(partial.path)
                raise
            said = (
                f"{partial.progress_text} and stay in {partial.path}; the same command goes on "
                "from there"
            )
            if isinstance(error, WriteError):
                raise type(error)(f"{error}; {said}") from error
            error.add_note(said)
            raise


@contextmanager
def _taken(path: Path) -> Iterator[None]:
    """Makes the directory, or takes over that of a dead process; locked until the block ends."""
    is_new = not os.path.lexists(path)
    if is_new:
        path.mkdir()
        sync(path.parent)
    elif path.is_symlink() or not path.is_dir():
        raise WriteError(f"{path}: is in the way and no directory; remove it")
    with locked(path) as is_ours:
        if not is_ours and not is_new:
            raise ConfigError(
                f"{path}: another process is at the same conversion; wait for it, or stop it (if "
                "there is none, the file system has no locks: remove this directory)"
            )
        yield


def _remove_others(path: Path, final: Path) -> None:
    """Removes what other conversions to the same directory left, if their processes are dead."""
    pattern = re.compile(re.escape(f".{final.name}.partial-") + "[0-9a-f]+")
    for other in sorted(final.parent.iterdir()):
        if other == path or not pattern.fullmatch(other.name):
            continue
        if other.is_symlink() or not other.is_dir():
            continue
        with suppress(FileNotFoundError), locked(other) as is_dead:
            if is_dead:
                logger.warning(
                    "removing %s: it was left by a conversion with other files, settings or "
                    "versions, which cannot be gone on with",
                    other,
                )
                discard(other)


def _problem(file: Path, digest: FileDigest, progress: Progress) -> str | None:
    try:
        return damaged_part(file, digest, progress)
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"


def _remove_all_but(kept: Collection[Path], directory: Path) -> None:
    """Removes what is in a directory, but for some files and the directories that they are in."""
    holding = {parent for path in kept for parent in path.parents}
    for path in directory.iterdir():
        if path in holding and path.is_dir() and not path.is_symlink():
            _remove_all_but(kept, path)
        elif path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
