"""Going on after a stop: the newest checkpoint, and the recipe state."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsafePathError,
)
from checkpointing.mapping.tensors import is_dtensor
from checkpointing.progress import bytes_progress
from checkpointing.storage.integrity import check_intact
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests, read_manifest
from checkpointing.storage.read import load_torch_file
from checkpointing.storage.tensor_classes import loads_without_code
from checkpointing.storage.write import archive_of, tensors_by_name

logger = logging.getLogger(__name__)

RECIPE_STATE_NAME = "recipe_state.pt"
DCP_FORMAT = "dcp"
"""What the manifest of a :class:`~checkpointing.DistributedCheckpointer` calls its format."""
_RUN_ID = "run_id"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint in an output directory."""

    directory: Path
    manifest: Mapping[str, Any]

    @property
    def age(self) -> tuple[int, int, int]:
        """Grows with every checkpoint of a run: training step, epoch, time of saving."""
        step, epoch = self.manifest.get("step"), self.manifest.get("epoch")
        return (
            -1 if step is None else step,
            -1 if epoch is None else epoch,
            self.manifest.get("saved_at_ns") or 0,
        )


def saved_checkpoints(output_dir: Path) -> list[SavedCheckpoint]:
    """The complete checkpoints in a directory, the newest last.

    What a directory is called does not matter. One without a manifest is none of ours, and one
    that no run saved, such as a converted model, is nothing to resume from. A damaged one is left
    out, and said to be.
    """
    found = []
    for directory in sorted(output_dir.iterdir()) if output_dir.is_dir() else []:
        if directory.is_dir() and not directory.name.startswith("."):
            try:
                checkpoint = _of_a_run(directory)
            except (CorruptCheckpointError, UnsafePathError) as error:
                logger.warning("not used: %s", error)
                continue
            if checkpoint is not None:
                found.append(checkpoint)
    return sorted(found, key=lambda checkpoint: checkpoint.age)


def _of_a_run(directory: Path) -> SavedCheckpoint | None:
    """The checkpoint in a directory, if a run saved it."""
    manifest = read_manifest(directory)
    return None if manifest is None else as_saved(directory, manifest)


def as_saved(directory: Path, manifest: Mapping[str, Any]) -> SavedCheckpoint | None:
    """The checkpoint that a manifest tells of, if a run saved it.

    Raises:
        CorruptCheckpointError: if what the manifest says cannot be.
    """
    if _RUN_ID not in manifest:
        return None
    numbers = [manifest.get(key) for key in ("step", "epoch", "saved_at_ns")]
    are_numbers = all(number is None or type(number) is int for number in numbers)
    if not are_numbers or not isinstance(manifest[_RUN_ID], str):
        raise CorruptCheckpointError(
            f"{directory / MANIFEST_NAME}: says that the checkpoint is of step, epoch and time "
            f"{numbers} and run {manifest[_RUN_ID]!r}; the file is damaged: resume from another one"
        )
    return SavedCheckpoint(directory, manifest)


def is_dcp(checkpoint: SavedCheckpoint) -> bool:
    """Whether it holds the files of torch's distributed checkpoints, not those of a format."""
    return checkpoint.manifest.get("format") == DCP_FORMAT


def checkpoint_to_resume(
    output_dir: Path, wanted: bool | str | Path, adapter_name: str
) -> SavedCheckpoint:
    """The newest intact checkpoint of a directory, or just the one that is named.

    Whatever a run reads of it is compared with its checksums.

    Args:
        output_dir: where the run's checkpoints lie.
        wanted: ``True``, or the directory of a checkpoint.
        adapter_name: name of a native adapter in a checkpoint.

    Raises:
        CheckpointNotFoundError: if there is none.
        CorruptCheckpointError: if the named one, or every one, is damaged; names what is.
        ConfigError: if the named one is of another kind.
    """
    if not isinstance(wanted, bool):
        directory = Path(wanted)
        checkpoint = _of_a_run(directory)
        if checkpoint is None:
            raise CheckpointNotFoundError(
                f"{directory}: is no checkpoint of a run, it has no manifest.json of one; give the "
                "directory of a checkpoint, such as epoch_0"
            )
        if is_dcp(checkpoint):
            raise ConfigError(
                f"{directory}: was saved by DistributedCheckpointer, which alone can load it; name "
                "a checkpoint of this checkpointer"
            )
        _check_what_is_read(checkpoint, adapter_name)
        return checkpoint
    checkpoints = [one for one in saved_checkpoints(output_dir) if not is_dcp(one)]
    for checkpoint in reversed(checkpoints):
        try:
            _check_what_is_read(checkpoint, adapter_name)
            return checkpoint
        except CorruptCheckpointError as error:
            logger.warning("%s\nNOT RESUMED FROM; an older checkpoint is looked for", error)
    if checkpoints:
        raise CorruptCheckpointError(
            f"{output_dir}: all of its {len(checkpoints)} checkpoints are damaged, as said above; "
            "get copies of them from elsewhere, or start the run afresh in another output_dir"
        )
    raise CheckpointNotFoundError(
        f"{output_dir}: holds no complete checkpoint to resume from; check output_dir, or "
        "start the run without resume_from_checkpoint. To go on from checkpoints of torchtune, "
        "which have no manifest, name its recipe_checkpoint and adapter_checkpoint"
    )


def _check_what_is_read(checkpoint: SavedCheckpoint, adapter_name: str) -> None:
    digests = file_digests(checkpoint.directory, checkpoint.manifest)
    if adapter_name in digests:
        read = {name for name in (adapter_name, RECIPE_STATE_NAME) if name in digests}
    else:
        read = {name for name in digests if "/" not in name}
    own = {name: digests[name] for name in digests if name in read}
    with bytes_progress("verifying", sum(digest.size for digest in own.values())) as progress:
        check_intact(checkpoint.directory, own, progress)


def load_recipe_state(path: Path) -> dict[str, Any]:
    """The recipe state of a checkpoint; no code in the file is run.

    In a job of several processes, each of which needs a part of the tensors, these are views of a
    private memory map of the file. It stays when the file is removed, and keeps its place on the
    disk for as long as one of them is used.

    Raises:
        CheckpointNotFoundError: if the file is not there.
        CorruptCheckpointError: if it is damaged or holds no dictionary.
        ConfigError: if it needs torchao, which is missing or too old or new for it.
    """
    shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    state = load_torch_file(path, mmap=shared)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path}: holds a {type(state).__name__}, no recipe state")
    return state


def check_recipe_state(state: Mapping[str, Any]) -> None:
    """Checks that a recipe state can be read again without running code, before it is written.

    Raises:
        ConfigError: names the first value that is no tensor (of torch, or the state of a torchao
            optimizer), number, string, or list or dictionary of these; or a tensor that cannot be
            saved from several processes, or not beside tensors that are.
    """
    _check_plain(state, "recipe state")
    if any(map(is_dtensor, tensors_by_name(state).values())):
        archive_of(state)


# Exact types: a subclass, such as numpy's float64, is pickled as itself.
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def _check_plain(value: object, where: str) -> None:
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():  # type: ignore[attr-defined]
            _check_plain(key, f"{where}: a key")
            _check_plain(item, f"{where}.{key}")
    elif type(value) in (list, tuple, set):
        for number, item in enumerate(value):  # type: ignore[arg-type]
            _check_plain(item, f"{where}[{number}]")
    elif is_dtensor(value):
        # Imported here: it takes long, and only who has tensors in shards needs it.
        from checkpointing.mapping.dtensors import rows_of_dtensor

        rows_of_dtensor(value, where)
    elif type(value) not in _PLAIN and not _is_readable_tensor(value):
        raise ConfigError(
            f"{where}: a {type(value).__name__} cannot be saved so that it loads without running "
            "code; turn it into tensors, numbers, strings, lists and dictionaries first"
        )


def _is_readable_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and loads_without_code(value)
