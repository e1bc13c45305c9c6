"""Errors of the command line that are no other module's."""

from checkpointing.errors import CheckpointingError


class UsageError(CheckpointingError, ValueError):
    """A command was given something that does not exist or cannot be done."""


class DownloadError(CheckpointingError, OSError):
    """A download failed, or brought something else than it should."""


class UploadError(CheckpointingError, OSError):
    """An upload failed, or was refused."""
