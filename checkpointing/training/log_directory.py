"""Where a logger keeps its files."""

import logging
from pathlib import Path

from checkpointing.errors import CheckpointingError
from checkpointing.storage.location import is_remote, path_on_this_machine
from checkpointing.storage.mirror import place_for
from checkpointing.storage.remote import RemoteDirectory

logger = logging.getLogger(__name__)


class LogDirectory:
    """A directory of logs. One that a URL names is kept on this machine, and uploaded in the end.

    Args:
        location: a path, which is made if need be, or a URL.

    Attributes:
        path: the directory on this machine.
    """

    def __init__(self, location: str | Path) -> None:
        self._remote = RemoteDirectory(str(location)) if is_remote(location) else None
        if self._remote is None:
            self.path = path_on_this_machine(location)
            self.path.mkdir(parents=True, exist_ok=True)
        else:
            self.path = place_for(self._remote.url, "write")

    def file(self, name: str) -> Path:
        """A file to append to; where it goes on at a URL, what is there already comes first."""
        path = self.path / name
        if self._remote is not None:
            there = self._remote.some_files([name]).get(name)
            if there is not None and not (path.is_file() and path.stat().st_size >= there.size):
                self._remote.download(name, path, lambda _: None)
        return path

    def close(self) -> None:
        """Uploads the files; if that fails, says where they are."""
        if self._remote is None:
            return
        try:
            for path in sorted(self.path.iterdir()):
                if path.is_file() and not path.name.startswith("."):
                    self._remote.upload(path, path.name, lambda _: None)
        except CheckpointingError as error:
            logger.warning("%s\nThe logs are in %s", error, self.path)
