"""Directories that a URL names: on object stores, and whatever else fsspec reaches.

https://filesystem-spec.readthedocs.io. What is atomic on an object store is the writing of one
object, and there is no renaming. So a checkpoint there exists as soon as its manifest does, which
is written last; :mod:`checkpointing.storage.publish` has the details.
"""

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.errors import (
    CheckpointingError,
    CheckpointNotFoundError,
    ConfigError,
    OutOfSpaceError,
    RemoteError,
)
from checkpointing.storage.new_file import Progress

_T = TypeVar("_T")
# Seconds to wait after the first failure and the second; the third is final.
_WAITS = (0.5, 2.0)
# Where a directory must be made before a file in it, and stays when it is empty. Elsewhere to make
# one may make a bucket.
_WITH_DIRECTORIES = {"file", "local", "memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs"}
# What tells that an object is still the same, the surest first.
_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "content_md5", "generation", "xet_hash", "blob_id"),
    *("mtime", "LastModified", "last_modified", "updated", "created"),
)
_EXTRAS = {"s3": "s3", "s3a": "s3"}


@dataclass(frozen=True)
class RemoteFile:
    """A file that was found.

    Attributes:
        size: in bytes.
        version: changes whenever the file does; ``None`` if the file system does not tell.
    """

    size: int
    version: str | None


class RemoteDirectory:
    """A directory that a URL names. It need not exist.

    Args:
        url: such as ``s3://bucket/run``.

    Raises:
        ConfigError: if the URL's protocol is unknown or its package is not installed.
        RemoteError: if the place cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._protocol = self.url.partition("://")[0].lower()
        self._fs, path = _filesystem(self.url, self._protocol)
        self._path = path.rstrip("/")

    def __truediv__(self, name: str) -> "RemoteDirectory":
        return RemoteDirectory(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def files(self) -> dict[str, RemoteFile]:
        """All files in the directory and below it, by their paths in it."""
        found: dict[str, Any] = {}
        with self._reaching("cannot be listed"), suppress(FileNotFoundError, NotADirectoryError):
            self._fs.invalidate_cache()
            found = _attempts(lambda: self._fs.find(self._path, detail=True))
        inside = f"{self._path}/"
        return {
            path.removeprefix(inside): _as_file(info)
            for path, info in found.items()
            if path.startswith(inside) and path != inside and info["type"] == "file"
        }

    def some_files(self, names: Iterable[str]) -> dict[str, RemoteFile]:
        """Those of the named files that are there."""
        found = {}
        with self._reaching("cannot be looked at"):
            self._fs.invalidate_cache()
            for name in names:
                with suppress(FileNotFoundError, NotADirectoryError):
                    info = _attempts(lambda name=name: self._fs.info(self._within(name)))  # type: ignore[misc]
                    if info["type"] == "file":
                        found[name] = _as_file(info)
        return found

    def directories(self) -> list[str]:
        """Names of the directories in it, sorted."""
        found: list[Any] = []
        with self._reaching("cannot be listed"), suppress(FileNotFoundError, NotADirectoryError):
            self._fs.invalidate_cache()
            found = _attempts(lambda: self._fs.ls(self._path, detail=True))
        return sorted(
            info["name"].rstrip("/").rpartition("/")[2]
            for info in found
            if info["type"] == "directory" and info["name"].rstrip("/") != self._path
        )

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        with self._reaching(f"{name} cannot be read"):
            content: bytes = _attempts(lambda: self._fs.cat_file(self._within(name)))
        return content

    def download(self, name: str, file: Path, progress: Progress) -> None:
        """Reads a file into one on this machine; a connection that breaks is tried again.

        Args:
            name: of the file.
            file: is overwritten.
            progress: called with the number of bytes just read.

        Raises:
            CheckpointNotFoundError: if the file is not there.
            OutOfSpaceError: if the disk here is full.
            RemoteError: if it cannot be read.
        """
        with self._reaching(f"{name} cannot be downloaded"), _counting(progress) as counted:
            _attempts(lambda: self._fs.get_file(self._within(name), str(file), callback=counted()))

    def upload(self, file: Path, name: str, progress: Progress) -> None:
        """Writes a file as it is on this machine; a connection that breaks is tried again.

        Args:
            file: on this machine.
            name: of the file there.
            progress: called with the number of bytes just written.

        Raises:
            RemoteError: if it cannot be written, or does not arrive whole.
        """
        path, size = self._within(name), file.stat().st_size

        def put() -> None:
            self._make_parent(path)
            self._fs.put_file(str(file), path, callback=counted())
            self._fs.invalidate_cache()
            arrived = self._fs.info(path)["size"]
            if arrived != size:
                raise OSError(f"of {size} bytes {arrived} arrived")

        with self._reaching(f"{name} cannot be uploaded"), _counting(progress) as counted:
            _attempts(put)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        path = self._within(name)
        with self._reaching(f"{name} cannot be written"):
            self._make_parent(path)
            _attempts(lambda: self._fs.pipe_file(path, content))

    def copy(self, name: str, copied: str) -> None:
        """Copies a file within the directory; object stores do so by themselves."""
        path = self._within(copied)
        with self._reaching(f"{name} cannot be copied"):
            self._make_parent(path)
            _attempts(lambda: self._fs.cp_file(self._within(name), path))

    def remove(self, names: Iterable[str]) -> None:
        """Removes files one after another, in this order; one that is gone already is no error."""
        with self._reaching("cannot be removed"):
            for name in names:
                with suppress(FileNotFoundError):
                    _attempts(lambda name=name: self._fs.rm_file(self._within(name)))  # type: ignore[misc]

    def remove_empty_directories(self) -> None:
        """Removes what is left of a directory whose files are removed, where that is anything."""
        if self._protocol not in _WITH_DIRECTORIES:
            return
        with self._reaching("cannot be removed"):
            self._fs.invalidate_cache()
            below = [path for path, _, _ in self._fs.walk(self._path)]
            for path in sorted(below, key=len, reverse=True):
                with suppress(OSError):
                    self._fs.rmdir(path)

    def _within(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _make_parent(self, path: str) -> None:
        if self._protocol in _WITH_DIRECTORIES:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """Makes whatever a file system raises in the block one of our errors."""
        try:
            yield
        except CheckpointingError:
            raise
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{self.url}: {what}: it is not there, or the bucket is not; check the URL"
            ) from error
        except Exception as error:
            # The libraries behind fsspec have exceptions of their own, with no base in common.
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpaceError(
                    f"{self.url}: {what}: {error}; make room, or set TUNEPOINT_CACHE to a "
                    "directory on a larger disk"
                ) from error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise RemoteError(
                f"{self.url}: {what}: {reason}; check the network, the URL and the credentials"
            ) from error


def _filesystem(url: str, protocol: str) -> tuple[Any, str]:
    # Comes with torch and huggingface_hub; imported here because few runs need it.
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        how = f': pip install "tunepoint[{extra}]"' if extra else ""
        raise ConfigError(f"{url}: a package for it is missing: {error}{how}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; use a protocol of fsspec, such as s3://") from error
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RemoteError(f"{url}: cannot be opened: {reason}; check the URL") from error
    return fs, path


def _as_file(info: dict[str, Any]) -> RemoteFile:
    known = (f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key) is not None)
    return RemoteFile(int(info["size"] or 0), next(known, None))


def _attempts(action: Callable[[], _T]) -> _T:
    """Does something three times at most, for as long as another time may help."""
    for wait in _WAITS:
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError, PermissionError, NotImplementedError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(wait)
    return action()


@contextmanager
def _counting(progress: Progress) -> Iterator[Callable[[], Any]]:
    """Gives callbacks of fsspec that count bytes, each from the start again."""
    from fsspec.callbacks import Callback

    counted = 0

    class Count(Callback):
        def relative_update(self, inc: int = 1) -> None:
            nonlocal counted
            counted += inc
            progress(inc)

    def start() -> Callback:
        nonlocal counted
        progress(-counted)
        counted = 0
        return Count()

    yield start
