"""Paths that come from a file are not trusted."""

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
    if not plain or "\\" in name:
        raise UnsafePathError(
            f"{named_by}: names the file {name!r}, which is not a plain file name in {directory}; "
            "the file is damaged or was made to mislead: get the checkpoint anew"
        )
    return directory / name


def is_within(path: Path, directory: Path) -> bool:
    """Whether a path is the directory or lies in it, links followed."""
    resolved, parent = path.resolve(), directory.resolve()
    return resolved == parent or parent in resolved.parents
