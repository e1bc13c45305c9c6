"""The manifest: every file of a checkpoint, and what the checkpoint is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.paths import is_within
from checkpointing.storage.read import read_json

MANIFEST_NAME = "manifest.json"


def write_manifest(
    directory: Path, facts: Mapping[str, Any], digests: Mapping[str, FileDigest]
) -> None:
    """Writes the manifest of a directory that holds all its other files already.

    Args:
        directory: the checkpoint.
        facts: what it is: format, family, epoch, step and the like.
        digests: of each file, by its path in the directory.
    """
    content = {**facts, "files": {name: digests[name].to_entry() for name in sorted(digests)}}
    text = json.dumps(content, indent=2) + "\n"
    (directory / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or ``None`` if the directory holds none.

    Raises:
        CorruptCheckpointError: if the manifest is damaged, a file that it lists is not there, or
            has another size.
    """
    manifest = load_manifest(directory)
    if manifest is None:
        return None
    for name, digest in file_digests(directory, manifest).items():
        problem = size_problem(directory / name, digest)
        if problem is not None:
            raise CorruptCheckpointError(
                f"{problem}; the checkpoint is damaged: use another one, or its copy elsewhere"
            )
    return manifest


def load_manifest(directory: Path) -> dict[str, Any] | None:
    """The content of a manifest, or ``None`` if the directory holds none; no file is looked at.

    Raises:
        CorruptCheckpointError: if the manifest is damaged.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    manifest = read_json(path)
    file_digests(directory, manifest)
    return manifest


def file_digests(directory: Path, manifest: Mapping[str, Any]) -> dict[str, FileDigest]:
    """What each file of a checkpoint must hold, by its path in the directory.

    Raises:
        CorruptCheckpointError: if the manifest does not say it, or names a file elsewhere.
    """
    path = directory / MANIFEST_NAME
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CorruptCheckpointError(f"{path}: lists no files; the file is damaged")
    digests = {}
    for name, entry in files.items():
        if not is_within(directory / name, directory):
            raise CorruptCheckpointError(f"{path}: lists {name!r}, outside of the checkpoint")
        digest = FileDigest.from_entry(entry)
        if digest is None:
            raise CorruptCheckpointError(
                f"{path}: does not tell size and checksum of {name!r}; the file is damaged"
            )
        digests[name] = digest
    return digests


def size_problem(file: Path, digest: FileDigest) -> str | None:
    """What is wrong with a file as far as its size tells."""
    size = file.stat().st_size if file.is_file() else None
    if size == digest.size:
        return None
    found = "is missing" if size is None else f"has {size} bytes"
    return f"{file}: {found}, the manifest says {digest.size} bytes"
