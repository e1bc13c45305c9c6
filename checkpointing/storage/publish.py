"""Writing a checkpoint to a directory that a URL names.

It is written on this machine, and uploaded when it is complete; the manifest is uploaded last, and
makes it a checkpoint. What is not one is marked: ``.incomplete`` is written before anything else
and removed after everything else.

A checkpoint that is there is replaced so that at every instant the old or the new one is complete.
The new one is first uploaded into ``.new`` in the directory. With its manifest it is what readers
here take, whatever lies around it. Then the files around it are replaced by copies, again the
manifest last, for other programs, and ``.new`` is removed.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpointing.errors import CheckpointingError, ConfigError, WriteError
from checkpointing.progress import bytes_progress
from checkpointing.storage.commit import remove_directory
from checkpointing.storage.location import is_remote, path_on_this_machine
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests, load_manifest
from checkpointing.storage.mirror import INCOMPLETE_NAME, NEW_DIR, origin_of, place_for
from checkpointing.storage.paths import is_within
from checkpointing.storage.remote import RemoteDirectory

logger = logging.getLogger(__name__)

_NEW_MANIFEST = f"{NEW_DIR}/{MANIFEST_NAME}"


def upload(directory: Path, remote: RemoteDirectory, *, show_progress: bool = True) -> None:
    """Uploads a checkpoint; it exists there with all its files or not at all.

    What an upload that was cut short has left there is removed first.

    Args:
        directory: a complete checkpoint of ours.
        remote: where it will be. A checkpoint that is there is replaced.
        show_progress: show a bar, if it takes long.

    Raises:
        WriteError: if it cannot be uploaded; says what there is.
    """
    manifest = load_manifest(directory)
    assert manifest is not None
    digests = file_digests(directory, manifest)
    arrived: list[str] = []
    state = "there is no such checkpoint there"
    try:
        _finish_replacement(remote)
        found = remote.files()
        replaces = MANIFEST_NAME in found
        if replaces:
            state = "the checkpoint that was there before is as it was"
        prefix = f"{NEW_DIR}/" if replaces else ""
        _mark(remote, "saving")
        remote.remove(name for name in found if name.startswith(prefix) and name != INCOMPLETE_NAME)
        total = sum(digest.size for digest in digests.values())
        with bytes_progress(f"uploading {remote.name}", total, show_progress) as progress:
            for name in digests:
                remote.upload(directory / name, prefix + name, progress)
                arrived.append(name)
            remote.upload(directory / MANIFEST_NAME, prefix + MANIFEST_NAME, lambda _: None)
    except CheckpointingError as error:
        raise WriteError(
            f"{remote.url}: could not be uploaded ({len(arrived)} of {len(digests)} files were): "
            f"{error}; {state}; the checkpoint is whole on this machine, in {directory}"
        ) from error
    try:
        _finish_replacement(remote)
        remote.remove([INCOMPLETE_NAME])
    except CheckpointingError as error:
        logger.warning(
            "%s: the checkpoint is complete, for `tune` alone: other programs find it in %s/%s "
            "until it is saved again: %s",
            remote.url,
            remote.url,
            NEW_DIR,
            error,
        )


def remove(remote: RemoteDirectory, run_id: str) -> None:
    """Removes a checkpoint so that no part of it is ever taken for one.

    Args:
        remote: the checkpoint.
        run_id: of the run that removes it, which may so finish it another time.

    Raises:
        RemoteError: if it cannot be removed.
    """
    found = remote.files()
    _mark(remote, "removing", run_id)
    manifests = [name for name in (MANIFEST_NAME, _NEW_MANIFEST) if name in found]
    remote.remove(manifests)
    remote.remove(name for name in found if name not in (*manifests, INCOMPLETE_NAME))
    remote.remove([INCOMPLETE_NAME])
    remote.remove_empty_directories()


def is_being_removed(remote: RemoteDirectory, run_id: str) -> bool:
    """Whether a run began to remove a checkpoint, and has not ended."""
    found = remote.files()
    if INCOMPLETE_NAME not in found or MANIFEST_NAME in found or _NEW_MANIFEST in found:
        return False
    try:
        mark: Any = json.loads(remote.read(INCOMPLETE_NAME))
    except (CheckpointingError, ValueError):
        return False
    return isinstance(mark, dict) and (mark.get("what"), mark.get("run")) == ("removing", run_id)


def check_remote_destination(remote: RemoteDirectory, overwrite: bool) -> None:
    """Checks that writing a directory can destroy nothing but a checkpoint of ours.

    Raises:
        ConfigError: if it cannot be written.
    """
    found = remote.files()
    if not found or (INCOMPLETE_NAME in found and MANIFEST_NAME not in found):
        return
    if not overwrite:
        raise ConfigError(f"{remote.url} exists; choose another place, or add --overwrite")
    if MANIFEST_NAME not in found:
        raise ConfigError(
            f"{remote.url} was not written by `tune` (it has no {MANIFEST_NAME}) and is not "
            "overwritten; remove it yourself or choose another place"
        )


@contextmanager
def published(destination: str | Path) -> Iterator[Path]:
    """Yields the directory to write; what is written there for a URL is uploaded in the end.

    Raises:
        WriteError: if it cannot be uploaded.
    """
    if not is_remote(destination):
        yield path_on_this_machine(destination)
        return
    remote = RemoteDirectory(str(destination))
    directory = place_for(remote.url, "write") / remote.name
    yield directory
    upload(directory, remote)
    remove_directory(directory)


def lie_in_each_other(one: str | Path, other: str | Path) -> bool:
    """Whether of two directories one is the other or lies in it; either may be a URL.

    A copy of what was read by URL lies where the URL says.
    """
    first, second = (
        str(each).rstrip("/") if is_remote(each) else origin_of(path_on_this_machine(each))
        for each in (one, other)
    )
    if is_remote(first) != is_remote(second):
        return False
    if is_remote(first):
        return f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")
    return is_within(Path(first), Path(second)) or is_within(Path(second), Path(first))


def _mark(remote: RemoteDirectory, what: str, run_id: str | None = None) -> None:
    facts = {
        "what": what,
        "run": run_id,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
    }
    remote.write(INCOMPLETE_NAME, json.dumps(facts).encode())


def _finish_replacement(remote: RemoteDirectory) -> None:
    """Puts a complete new checkpoint in the place of the old one, and removes where it was."""
    found = remote.files()
    if _NEW_MANIFEST not in found:
        return
    new = [name for name in found if name.startswith(f"{NEW_DIR}/") and name != _NEW_MANIFEST]
    old = [name for name in found if not name.startswith(".") and name != MANIFEST_NAME]
    _mark(remote, "saving")
    remote.remove([MANIFEST_NAME])
    remote.remove(old)
    for name in (*new, _NEW_MANIFEST):
        remote.copy(name, name.removeprefix(f"{NEW_DIR}/"))
    remote.remove([_NEW_MANIFEST, *new])
    (remote / NEW_DIR).remove_empty_directories()
