"""What a new checkpoint keeps of the one in whose place it comes."""

import os
import shutil
from collections.abc import Callable
from errno import EMLINK, ENOSYS, EOPNOTSUPP, EPERM
from pathlib import Path

from checkpointing.storage.digest import FileDigest, Part, checksum_of
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests, load_manifest

_NO_LINKS = (EPERM, EMLINK, ENOSYS, EOPNOTSUPP)
_BLOCK = 2 << 20


def keep_files(
    existing: Path, staging: Path, wanted: Callable[[str], bool]
) -> dict[str, FileDigest]:
    """Puts files of a checkpoint into the directory of another one too, without their data.

    Args:
        existing: the checkpoint, if it is there.
        staging: the directory of the other one.
        wanted: whether to keep a file, by its path in the checkpoint.

    Returns:
        What each must hold: as its manifest says, also of one that is missing, so that damage does
        not get lost; as it is, where the manifest does not name it.

    Raises:
        CorruptCheckpointError: if the manifest is damaged.
    """
    found = []
    for path in sorted(existing.rglob("*")):
        name = path.relative_to(existing).as_posix()
        if path.is_dir() or name == MANIFEST_NAME or not wanted(name):
            continue
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        _link(path, staging / name)
        found.append(name)
    manifest = load_manifest(existing)
    told = {} if manifest is None else file_digests(existing, manifest)
    kept = {name: digest for name, digest in told.items() if wanted(name)}
    for name in found:
        if name not in kept:
            kept[name] = _digest_of(existing / name)
    return kept


def _link(path: Path, new: Path) -> None:
    # Nobody writes into a file of a checkpoint, so that two may share it.
    try:
        os.link(path, new, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(path, new, follow_symlinks=False)


def _digest_of(path: Path) -> FileDigest:
    with path.open("rb") as file:
        checksum = checksum_of(iter(lambda: file.read(_BLOCK), b""))
    return FileDigest((Part(path.stat().st_size, checksum),))
