"""Whether a checkpoint on the disk is what was saved."""

from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import CheckpointingError, CheckpointNotFoundError
from checkpointing.formats.detect import find_model
from checkpointing.progress import bytes_progress
from checkpointing.storage.integrity import damage
from checkpointing.storage.location import is_remote, path_on_this_machine
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests, load_manifest
from checkpointing.storage.mirror import complete_generation, place_for, refresh
from checkpointing.storage.remote import RemoteDirectory
from checkpointing.storage.side_files import is_weight_file, is_weight_name


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


def verify(directory: str | Path, model_type: str | None = None) -> Verification:
    """Looks at every byte of a checkpoint that this project wrote, and at the headers of others.

    Args:
        directory: a checkpoint or model in any format, or its URL: it is downloaded as far as the
            copy here is not the same.
        model_type: needed where no config file names the family of one without a manifest.

    Raises:
        CheckpointNotFoundError: if there is nothing to verify.
        CorruptCheckpointError: if the manifest itself is damaged.
    """
    if is_remote(directory):
        return _verify_remote(RemoteDirectory(str(directory)), model_type)
    directory = path_on_this_machine(directory)
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
        _surplus(path)
        for path in sorted(directory.rglob("*"))
        if is_weight_file(path) and path.relative_to(directory).as_posix() not in digests
    ]
    return Verification(len(digests), total, True, tuple(problems))


def _verify_remote(remote: RemoteDirectory, model_type: str | None) -> Verification:
    """Every file is compared while it is copied, and one that was copied before once more."""
    problems = refresh(remote, whole=True)
    copy = place_for(remote.url, "read")
    manifest = load_manifest(copy)
    if manifest is None:
        return _verify_structure(copy, model_type)
    digests = file_digests(copy, manifest)
    total = sum(digest.size for digest in digests.values())
    found = complete_generation(remote)
    problems += [
        _surplus(f"{remote.url}/{name}")
        for name in sorted(found.files if found is not None else ())
        if is_weight_name(name) and name not in digests
    ]
    return Verification(len(digests), total, True, tuple(problems))


def _surplus(path: object) -> str:
    return f"{path}: is not in {MANIFEST_NAME}, but would be taken for weights; move it elsewhere"


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
