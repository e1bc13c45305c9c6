"""Whether files are still what was written, by their sizes and checksums."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.digest import FileDigest, Part, checksum_of
from checkpointing.storage.manifest import size_problem
from checkpointing.storage.new_file import Progress
from checkpointing.storage.threads import Check, run

# What one thread reads at a time.
_RANGE = 64 << 20
# What is read at a time: larger reads cost less, and what is digested should still be in a cache.
_BLOCK = 2 << 20


def _quietly(nbytes: int) -> None:
    pass


def damage(directory: Path, digests: Mapping[str, FileDigest], progress: Progress) -> list[str]:
    """What is wrong with files of a checkpoint, one line each.

    Args:
        directory: the checkpoint.
        digests: what each file must hold, by its path in the directory.
        progress: called with the number of bytes just read.
    """
    found = (damaged_part(directory / name, digest, progress) for name, digest in digests.items())
    return [problem for problem in found if problem is not None]


def check_intact(
    directory: Path, digests: Mapping[str, FileDigest], progress: Progress = _quietly
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


def damaged_part(path: Path, digest: FileDigest, progress: Progress = _quietly) -> str | None:
    """What of a file is not what was saved; ``None`` if all is.

    Args:
        path: the file.
        digest: what it must hold.
        progress: called with the number of bytes just read.

    Raises:
        OSError: if the disk refuses to read it; names the file.
    """
    problem = size_problem(path, digest)
    if problem is not None:
        return problem
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        jobs = [partial(_changed, descriptor, parts, progress) for parts in _jobs(digest)]
        changed = [part.tensor for found in run(jobs) for part in found]
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)
    if not changed:
        return None
    tensors = ", ".join(dict.fromkeys(name for name in changed if name))
    if tensors:
        return f"{path}: is damaged: the data of {tensors}"
    around = any(part.tensor for part in digest.parts)
    return f"{path}: is damaged" + (": what it holds beside the data of tensors" if around else "")


def _jobs(digest: FileDigest) -> Iterator[list[tuple[int, Part]]]:
    """Parts that lie beside each other and where they begin, about as many bytes each time."""
    together: list[tuple[int, Part]] = []
    start = 0
    for part in digest.parts:
        together.append((start, part))
        start += part.size
        if start - together[0][0] >= _RANGE:
            yield together
            together = []
    if together:
        yield together


def _changed(
    descriptor: int, parts: Sequence[tuple[int, Part]], progress: Progress, check: Check
) -> list[Part]:
    buffer = memoryview(bytearray(_BLOCK))
    return [
        part
        for start, part in parts
        if checksum_of(_read(descriptor, start, part.size, buffer, progress, check))
        != part.checksum
    ]


def _read(
    descriptor: int, start: int, size: int, buffer: memoryview, progress: Progress, check: Check
) -> Iterator[memoryview]:
    end = start + size
    while start < end:
        check()
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if count == 0:
            return
        yield buffer[:count]
        progress(count)
        start += count
