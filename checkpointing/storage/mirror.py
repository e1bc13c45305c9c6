"""Copies, on this machine, of what is read by URL.

Each directory that is read is copied file by file into the cache, and what has not changed since is
not downloaded again. A file takes its place when it is whole and on the disk. Where there is a
manifest, every file is compared with its checksum, those that were copied before too.
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checkpointing.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpointing.progress import bytes_progress
from checkpointing.storage.cache import cache_dir
from checkpointing.storage.commit import check_room, make_directory
from checkpointing.storage.integrity import damaged_part
from checkpointing.storage.location import is_remote, path_on_this_machine
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests
from checkpointing.storage.new_file import Progress
from checkpointing.storage.read import read_json
from checkpointing.storage.remote import RemoteDirectory, RemoteFile

INCOMPLETE_NAME = ".incomplete"
"""Marks a directory that is being written or removed."""
NEW_DIR = ".new"
"""In a directory that is being replaced: what replaces it."""

_ORIGIN = ".origin.json"
_LOCK = ".lock"
# What tells of the file beside it, such as the rank of an adapter.
_BESIDE = (MANIFEST_NAME, "adapter_config.json")
_ROUNDS = 3


def local(location: str | Path, *, whole: bool = False) -> Path:
    """The directory or file on this machine; that of a URL is downloaded first.

    Args:
        location: a path or a URL, of a directory or a file.
        whole: of a checkpoint of ours, download directories in it too, such as ``merged``. Of
            another directory these are never downloaded.

    Raises:
        CheckpointNotFoundError: if nothing is there, or only a part of what is being uploaded.
        CorruptCheckpointError: names every file that is damaged there.
        ConfigError: if the URL's protocol is unknown or its package is not installed.
        OutOfSpaceError: if the disk has no room.
        RemoteError: if the place cannot be reached.
    """
    if not is_remote(location):
        return path_on_this_machine(location)
    remote = RemoteDirectory(str(location))
    if remote.files():
        return mirror(remote, whole=whole)
    url, _, name = remote.url.rpartition("/")
    if not url.endswith("/"):
        directory = RemoteDirectory(url)
        if directory.some_files([name]):
            return mirror(directory, only=(name, *_BESIDE)) / name
    raise CheckpointNotFoundError(
        f"{location}: there is neither a directory nor a file; correct it"
    )


def origin_of(directory: Path) -> str:
    """What a directory is a copy of: its URL, or its own absolute path."""
    origin = directory.resolve() / _ORIGIN
    if origin.is_relative_to(cache_dir().resolve() / "remote") and origin.is_file():
        return str(read_json(origin)["url"])
    return str(directory.resolve())


def place_for(url: str, what: str) -> Path:
    """A directory in the cache for one URL, made if it is missing.

    Args:
        url: whose it is.
        what: ``read``, or ``write`` for what will be uploaded.
    """
    url = url.rstrip("/")
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    directory = cache_dir() / "remote" / what / f"{key}-{url.rpartition('/')[2]}"
    make_directory(directory)
    origin = directory / _ORIGIN
    if not origin.is_file():
        _write_json(origin, {"url": url, "files": {}})
    return directory


@dataclass(frozen=True)
class Generation:
    """The files of a directory that belong together.

    Attributes:
        prefix: of their names: empty, or that of what replaces the directory.
        files: by their paths without the prefix.
        manifest: content of the manifest, ``None`` in a directory that is none of ours.
    """

    prefix: str
    files: Mapping[str, RemoteFile]
    manifest: Mapping[str, Any] | None


def complete_generation(remote: RemoteDirectory, only: Collection[str] = ()) -> Generation | None:
    """What a directory holds, or ``None`` if nothing or no more than a part of a checkpoint.

    Args:
        remote: the directory.
        only: names of the files that matter, the manifest's among them; all if empty.

    Raises:
        CorruptCheckpointError: if its manifest is damaged.
    """
    for _ in range(_ROUNDS):
        replaced_by = f"{NEW_DIR}/"
        found = (
            remote.files()
            if not only
            else remote.some_files([*only, *(replaced_by + name for name in only), INCOMPLETE_NAME])
        )
        prefix = replaced_by if replaced_by + MANIFEST_NAME in found else ""
        files = {
            name.removeprefix(prefix): file
            for name, file in found.items()
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith(".")
        }
        if MANIFEST_NAME not in files:
            return Generation("", files, None) if files and INCOMPLETE_NAME not in found else None
        try:
            manifest = _read_manifest(remote, prefix)
        except CheckpointNotFoundError:
            continue  # It was replaced or removed just now.
        return Generation(prefix, files, manifest)
    return None


def mirror(remote: RemoteDirectory, *, whole: bool = False, only: Collection[str] = ()) -> Path:
    """Makes the copy of a directory what the directory is now; as :func:`local`.

    Args:
        remote: the directory.
        whole: as for :func:`local`.
        only: names of the files to copy, as far as they are there; all if empty.

    Returns:
        The copy. Its manifest lists the files that were copied.
    """
    problems = refresh(remote, whole=whole, only=only)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise CorruptCheckpointError(
            f"{remote.url}: is not what was saved, as its copy here shows\n{lines}\n"
            "Use another checkpoint, or a copy of this one from elsewhere."
        )
    return _place_of(remote, only)


def _place_of(remote: RemoteDirectory, only: Collection[str]) -> Path:
    # A few files of a directory are a copy of their own, called by the first.
    return place_for("/".join([remote.url, *list(only)[:1]]), "read")


def refresh(
    remote: RemoteDirectory, *, whole: bool = False, only: Collection[str] = ()
) -> list[str]:
    """As :func:`mirror`, but the copy has what is damaged there too, which is returned by line."""
    directory = _place_of(remote, only)
    with _locked(directory):
        for _ in range(_ROUNDS):
            generation = complete_generation(remote, only)
            if generation is None:
                raise CheckpointNotFoundError(
                    f"{remote.url}: holds no checkpoint, or only a part of one whose upload or "
                    "removal has not ended; wait for it, or use another one"
                )
            copy = _Copy(directory, remote, generation, whole, only)
            try:
                problems = copy.update()
            except CheckpointNotFoundError:
                # The files of a manifest are there, unless it has been replaced meanwhile.
                if generation.manifest is None:
                    raise
                problems = ["replaced"]
            if not problems or _is_still(remote, generation, only):
                return problems
    raise CheckpointNotFoundError(
        f"{remote.url}: is replaced again and again while it is read; try again later"
    )


def _is_still(remote: RemoteDirectory, generation: Generation, only: Collection[str]) -> bool:
    now = complete_generation(remote, only)
    return now is not None and (now.prefix, now.manifest) == (
        generation.prefix,
        generation.manifest,
    )


class _Copy:
    """A copy that is being made what its original is."""

    def __init__(
        self,
        directory: Path,
        remote: RemoteDirectory,
        generation: Generation,
        whole: bool,
        only: Collection[str],
    ) -> None:
        self._directory = directory
        self._remote = remote
        self._generation = generation
        told = generation.manifest
        self._digests = {} if told is None else file_digests(directory, told)
        names = generation.files if told is None else self._digests
        deep = whole and told is not None
        self._wanted = [name for name in names if (deep or "/" not in name)]
        if only:
            self._wanted = [n for n in only if n in generation.files and n != MANIFEST_NAME]
        origin = directory / _ORIGIN
        self._versions: dict[str, Any] = read_json(origin).get("files", {})

    def update(self) -> list[str]:
        """Downloads what is new; returns what is damaged, one line each."""
        with bytes_progress("verifying", self._size(self._wanted)) as progress:
            missing = [name for name in self._wanted if not self._is_current(name, progress)]
        kept = {name for name in self._versions if name not in missing and self._is_same(name)}
        self._versions = {name: self._versions[name] for name in kept}
        copied = {*self._wanted, *kept}
        self._remove_all_but(copied)
        self._note()
        check_room(self._directory, self._size(missing))
        with bytes_progress(f"downloading {self._remote.name}", self._size(missing)) as progress:
            problems = [problem for name in missing if (problem := self._download(name, progress))]
        self._note()
        told = self._generation.manifest
        if told is not None:
            listed = {name: told["files"][name] for name in self._digests if name in copied}
            _write_json(self._directory / MANIFEST_NAME, {**told, "files": listed})
        return problems

    def _size(self, names: Collection[str]) -> int:
        files = self._generation.files
        return sum(files[name].size for name in names if name in files)

    def _is_same(self, name: str) -> bool:
        """Whether a copy has the version and size that the original has now."""
        there, path = self._generation.files.get(name), self._directory / name
        return (
            there is not None
            and there.version is not None
            and self._versions.get(name) == there.version
            and path.is_file()
            and path.stat().st_size == there.size
        )

    def _is_current(self, name: str, progress: Progress) -> bool:
        if not self._is_same(name):
            return False
        digest = self._digests.get(name)
        return digest is None or damaged_part(self._directory / name, digest, progress) is None

    def _download(self, name: str, progress: Progress) -> str | None:
        """Downloads a file; returns what is wrong with it."""
        path, digest = self._directory / name, self._digests.get(name)
        there = self._generation.files.get(name)
        if there is None:
            path.unlink(missing_ok=True)
            return f"{self._remote.url}/{name}: is missing, {MANIFEST_NAME} lists it"
        make_directory(path.parent)
        arriving = path.with_name(f".{path.name}.arriving-{secrets.token_hex(4)}")
        try:
            for again in (True, False):
                self._remote.download(self._generation.prefix + name, arriving, progress)
                size = arriving.stat().st_size
                is_right = (
                    size == there.size if digest is None else damaged_part(arriving, digest) is None
                )
                # What is wrong there will not come right on the way.
                if is_right or not again or (digest and digest.size != there.size):
                    break
                progress(-size)
            _sync(arriving)
            arriving.replace(path)
        finally:
            arriving.unlink(missing_ok=True)
        _sync(path.parent)
        if not is_right and digest is not None:
            return damaged_part(path, digest)
        if not is_right:
            return f"{self._remote.url}/{name}: {size} bytes arrived, not {there.size}"
        if there.version is not None:
            self._versions[name] = there.version
        return None

    def _remove_all_but(self, names: Collection[str]) -> None:
        own = {_ORIGIN, _LOCK} | ({MANIFEST_NAME} if self._generation.manifest else set())
        for root, _, files in os.walk(self._directory):
            for file in files:
                path = Path(root, file)
                name = path.relative_to(self._directory).as_posix()
                if name not in names and name not in own:
                    path.unlink()

    def _note(self) -> None:
        _write_json(self._directory / _ORIGIN, {"url": self._remote.url, "files": self._versions})


def _read_manifest(remote: RemoteDirectory, prefix: str) -> dict[str, Any]:
    content = remote.read(prefix + MANIFEST_NAME)
    with TemporaryDirectory() as scratch:
        path = Path(scratch, MANIFEST_NAME)
        path.write_bytes(content)
        try:
            manifest = read_json(path)
            file_digests(path.parent, manifest)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{remote.url}/{prefix}: {error}") from error
    return manifest


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    arriving = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    arriving.write_text(json.dumps(content), encoding="utf-8")
    arriving.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lets one process at a time change a copy."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
