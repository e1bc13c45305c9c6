"""Whether files are still what was written, by their sizes and checksums."""

from collections.abc import Mapping
from pathlib import Path

from checkpointing.errors import CheckpointingError, CorruptCheckpointError
from checkpointing.mapping.tensors import StateDictSource, TensorSource
from checkpointing.storage.digest import FileDigest, checksum_of, digest_of_file
from checkpointing.storage.manifest import size_problem
from checkpointing.storage.read import load_torch_file, open_tensor_file
from checkpointing.storage.write import Progress, named_tensors, tensor_bytes


def damage(directory: Path, digests: Mapping[str, FileDigest], progress: Progress) -> list[str]:
    """What is wrong with files of a checkpoint, one line each.

    Args:
        directory: the checkpoint.
        digests: what each file must hold, by its path in the directory.
        progress: called with the number of bytes just read.
    """
    problems = []
    for name, digest in digests.items():
        file = directory / name
        problem = size_problem(file, digest)
        if problem is None and digest_of_file(file, progress).checksum != digest.checksum:
            problem = f"{file}: {_damaged_part(file, digest)}"
        if problem is not None:
            problems.append(problem)
    return problems


def check_intact(
    directory: Path, digests: Mapping[str, FileDigest], progress: Progress = lambda _: None
) -> None:
    """Checks files of a checkpoint; arguments as for :func:`damage`.

    Raises:
        CorruptCheckpointError: names every file that is damaged, and the tensors in it.
    """
    problems = damage(directory, digests, progress)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise CorruptCheckpointError(
            f"{directory}: is not what was saved\n{lines}\n"
            "Use another checkpoint, or a copy of this one from elsewhere."
        )


def _damaged_part(file: Path, digest: FileDigest) -> str:
    """Where a file differs from what was saved: its tensors, or what is around them."""
    try:
        source = _tensors(file)
        changed = [
            name
            for name, checksum in digest.tensors.items()
            if name not in source.metas or checksum_of(tensor_bytes(source.read(name))) != checksum
        ]
    except CheckpointingError:
        return "is damaged, and cannot be read at all"
    if changed:
        return f"is damaged: the data of {', '.join(changed)}"
    return "is damaged" + (": what it holds beside the data of tensors" if digest.tensors else "")


def _tensors(file: Path) -> TensorSource:
    if file.suffix == ".safetensors":
        return open_tensor_file(file)
    if file.suffix in (".pt", ".bin", ".pth"):
        return StateDictSource(dict(named_tensors(load_torch_file(file))))
    return StateDictSource({})
