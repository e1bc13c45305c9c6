"""Paths and URLs."""

import re
from pathlib import Path

from checkpointing.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_remote(location: object) -> bool:
    """Whether a path is a URL."""
    return isinstance(location, str) and _URL.match(location) is not None


def path_or_url(text: str) -> Path | str:
    """A path, or a URL as it is: a ``Path`` would lose one of its slashes."""
    return text if is_remote(text) else Path(text)


def path_on_this_machine(location: str | Path) -> Path:
    """A path that is no URL.

    Raises:
        ConfigError: if it is one, or was one before it was made a ``Path``.
    """
    if is_remote(location):
        raise ConfigError(f"{location}: a place on this machine is needed here, not a URL")
    if _COLLAPSED.match(str(location)) and not Path(location).exists():
        raise ConfigError(f"{location}: if this is to be a URL, give it as a string, not as a Path")
    return Path(location)
