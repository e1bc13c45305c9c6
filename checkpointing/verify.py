"""Whether a checkpoint on the disk is what was saved."""

from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import CheckpointingError, CheckpointNotFoundError
from checkpointing.formats.detect import find_model
from checkpointing.progress import bytes_progress
from checkpointing.storage.integrity import damage
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests, load_manifest
from checkpointing.storage.side_files import is_weight_file


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        files: number of files that were looked at.
        nbytes: their size.
        has_checksums: there is a manifest with checksums; without one only the structure shows
            damage.
        problems: what is wrong, one line each; empty if nothing is.
    """

    files: int
    nbytes: int
    has_checksums: bool
    problems: tuple[str, ...]


def verify(directory: Path, model_type: str | None = None) -> Verification:
    """Looks at every byte of a checkpoint that this project wrote, and at the headers of others.

    Args:
        directory: a checkpoint or model in any format.
        model_type: needed where no config file names the family of one without a manifest.

    Raises:
        CheckpointNotFoundError: if there is nothing to verify.
        CorruptCheckpointError: if the manifest itself is damaged.
    """
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory}: is no directory; correct the path")
    manifest = load_manifest(directory)
    if manifest is None:
        return _verify_structure(directory, model_type)
    digests = file_digests(directory, manifest)
    total = sum(digest.size for digest in digests.values())
    with bytes_progress("verifying", total) as progress:
        problems = damage(directory, digests, progress)
    problems += [
        f"{path}: is not in {MANIFEST_NAME}, but would be taken for weights; move it elsewhere"
        for path in sorted(directory.rglob("*"))
        if is_weight_file(path) and path.relative_to(directory).as_posix() not in digests
    ]
    return Verification(len(digests), total, True, tuple(problems))


def _verify_structure(directory: Path, model_type: str | None) -> Verification:
    """Headers, index and names of a model that this project did not write."""
    found = find_model(directory)
    problems = []
    try:
        found.open(model_type)
    except CheckpointingError as error:
        problems.append(str(error))
    sizes = [file.stat().st_size for file in found.files]
    return Verification(len(sizes), sum(sizes), False, tuple(problems))
