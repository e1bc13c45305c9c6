"""The manifest: every file of a checkpoint, and what the checkpoint is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.paths import is_within
from checkpointing.storage.read import read_json

MANIFEST_NAME = "manifest.json"
_CHUNK = 1 << 22


def write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes the manifest of a directory that holds all its other files already.

    Args:
        directory: the checkpoint.
        facts: what it is: format, family, epoch, step and the like.
    """
    files = {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "xxh3_64": file_checksum(path),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    content = {**facts, "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def file_checksum(path: Path) -> str:
    """The XXH3 64-bit hash of a file, in hexadecimal."""
    # Imported here: loading a model needs no checksum, and `import checkpointing` stays light.
    import xxhash

    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or ``None`` if the directory holds none.

    Raises:
        CorruptCheckpointError: if the manifest is damaged, a file that it lists is not there, or
            has another size.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    manifest = read_json(path)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CorruptCheckpointError(f"{path}: lists no files; the file is damaged")
    for name, entry in files.items():
        file = directory / name
        if not is_within(file, directory):
            raise CorruptCheckpointError(f"{path}: lists {name!r}, outside of the checkpoint")
        size = file.stat().st_size if file.is_file() else None
        expected = entry.get("size") if isinstance(entry, dict) else None
        if size is None or size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CorruptCheckpointError(
                f"{file}: {found}, the manifest says {expected} bytes; the checkpoint is damaged: "
                "resume from another one"
            )
    return manifest
