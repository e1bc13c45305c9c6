"""Limits on memory as containers have them: the page cache counts, and is taken back if needed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Version 1 of the kernel's control groups has a tree for memory, version 2 one for all.
_TREES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@contextmanager
def limited_memory(nbytes: int) -> Iterator[Path | None]:
    """Yields the file that a process's number is written to; ``None`` where that is not allowed."""
    for root, name in _TREES:
        group = root / f"tunepoint-benchmark-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).is_file():
                (group / name).write_text(str(nbytes))
                yield group / "cgroup.procs"
                return
        finally:
            group.rmdir()
    yield None
