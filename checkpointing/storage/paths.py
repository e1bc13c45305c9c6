"""Paths that come from a file are not trusted."""

import errno
import os
from pathlib import Path

from checkpointing.errors import UnsafePathError


def inside(directory: Path, name: str, named_by: Path) -> Path:
    """The path of a file that another file names, checked to lie in the directory.

    Args:
        directory: where the file must lie.
        name: the file's name, as found.
        named_by: the file that names it, for the error.

    Raises:
        UnsafePathError: if the name is a path to somewhere else.
    """
    plain = isinstance(name, str) and Path(name).name == name and name not in ("", "..")
    if not plain or "\\" in name or not _can_exist(directory / name):
        raise UnsafePathError(
            f"{named_by}: names the file {name!r}, which is not a plain file name in {directory}; "
            "the file is damaged or was made to mislead: get the checkpoint anew"
        )
    return directory / name


def refuse_link_outside(path: Path) -> None:
    """Refuses a link that leads out of the directory that it lies in.

    The Hub's cache is excepted, of which every file is a link into a directory of the same model.

    Raises:
        UnsafePathError: if the path is such a link.
    """
    if path.is_symlink() and not leads_nowhere_else(path):
        raise UnsafePathError(
            f"{path}: is a link to {path.resolve()}, outside of its directory, and is not followed;"
            " put the file itself there, or name the directory where it lies"
        )


def leads_nowhere_else(path: Path) -> bool:
    """Whether a path stays in its directory, or is a file of the Hub's cache."""
    target = path.resolve()
    cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    return cached or is_within(target, path.parent)


def is_within(path: Path, directory: Path) -> bool:
    """Whether a path is the directory or lies in it, links followed."""
    if not _can_exist(path):
        return False
    resolved, parent = path.resolve(), directory.resolve()
    return resolved == parent or parent in resolved.parents


def path_named(name: object) -> Path | None:
    """The path that a file names; ``None`` if it names none, or one that cannot exist."""
    if not isinstance(name, str) or not name or not _can_exist(Path(name)):
        return None
    return Path(name)


def _can_exist(path: Path) -> bool:
    """Whether a name is one that a file system takes: not too long, and without a zero byte."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:
        return False
    return True
