"""An output directory that a URL names: checkpoints are written here and uploaded."""

import logging
from pathlib import Path

from checkpointing.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafePathError,
)
from checkpointing.resume import SavedCheckpoint, as_saved, is_dcp
from checkpointing.retention import Retention, removable
from checkpointing.storage.commit import remove_directory
from checkpointing.storage.manifest import load_manifest
from checkpointing.storage.mirror import complete_generation, mirror, place_for
from checkpointing.storage.publish import is_being_removed, remove, upload
from checkpointing.storage.remote import RemoteDirectory

logger = logging.getLogger(__name__)


class RemoteOutput:
    """Where a run's checkpoints are uploaded to.

    The last one stays on this machine too, as do those that could not be uploaded.

    Args:
        url: of the output directory.

    Attributes:
        directory: where they are written before.

    Raises:
        ConfigError: if the URL's protocol is unknown or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._remote = RemoteDirectory(url)
        self.url = self._remote.url
        self.directory = place_for(self.url, "write")
        self._uploaded: list[Path] = []

    def checkpoints(self) -> list[SavedCheckpoint]:
        """The complete checkpoints there, the newest last; a damaged manifest is said to be.

        Their directories are those that they have, or would have, on this machine.

        Raises:
            RemoteError: if the place cannot be reached.
        """
        found = []
        for name in self._names():
            try:
                generation = complete_generation(self._remote / name)
                manifest = None if generation is None else generation.manifest
                saved = None if manifest is None else as_saved(self.directory / name, manifest)
            except (CorruptCheckpointError, UnsafePathError) as error:
                logger.warning("not used: %s", error)
                continue
            if saved is not None:
                found.append(saved)
        return sorted(found, key=lambda checkpoint: checkpoint.age)

    def fetch_newest(self) -> SavedCheckpoint:
        """Downloads what a run reads of the newest intact checkpoint, which is most of it.

        Raises:
            CheckpointNotFoundError: if there is none.
            CorruptCheckpointError: if every one is damaged.
            RemoteError: if the place cannot be reached.
        """
        there = [one for one in self.checkpoints() if not is_dcp(one)]
        self._tell_what_is_only_here(there)
        for checkpoint in reversed(there):
            try:
                directory = mirror(self._remote / checkpoint.directory.name)
            except CorruptCheckpointError as error:
                logger.warning("%s\nNOT RESUMED FROM; an older checkpoint is looked for", error)
                continue
            return SavedCheckpoint(directory, checkpoint.manifest)
        if there:
            raise CorruptCheckpointError(
                f"{self.url}: all of its {len(there)} checkpoints are damaged, as said above; "
                "get copies of them from elsewhere, or start the run afresh in another output_dir"
            )
        raise CheckpointNotFoundError(
            f"{self.url}: holds no complete checkpoint to resume from; check output_dir, or start "
            "the run without resume_from_checkpoint"
        )

    def upload(self, saved: Path, *, show_progress: bool = True) -> None:
        """Uploads a checkpoint, then removes those from this machine that were uploaded before it.

        Raises:
            WriteError: if it cannot be uploaded.
        """
        upload(saved, self._remote / saved.name, show_progress=show_progress)
        for before in self._uploaded:
            if before != saved and before.is_dir():
                remove_directory(before)
        self._uploaded = [saved]

    def remove_old(self, retention: Retention, run_id: str, just_saved: Path) -> None:
        """As :func:`~checkpointing.retention.remove_old_checkpoints`, there."""
        for name in self._names():
            directory = self._remote / name
            if is_being_removed(directory, run_id):
                remove(directory, run_id)
        for checkpoint in removable(self.checkpoints(), retention, run_id, {just_saved}):
            remove(self._remote / checkpoint.directory.name, run_id)

    def _names(self) -> list[str]:
        return [name for name in self._remote.directories() if not name.startswith(".")]

    def _tell_what_is_only_here(self, there: list[SavedCheckpoint]) -> None:
        uploaded = {(each.directory.name, each.manifest.get("saved_at_ns")) for each in there}
        for directory in sorted(self.directory.glob("[!.]*/manifest.json")):
            saved = directory.parent
            manifest = load_manifest(saved) or {}
            if (saved.name, manifest.get("saved_at_ns")) in uploaded:
                remove_directory(saved)
            else:
                logger.warning(
                    "%s: is not at %s, where it could not be uploaded or was removed since; to "
                    "resume from it, give its directory",
                    saved,
                    self.url,
                )
