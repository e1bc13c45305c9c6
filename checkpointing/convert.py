"""Changing the format of a model: no model is built, and tensors are converted as they are written.

:func:`plan_conversion` finds all that is wrong from headers and configs; :func:`write_model`
writes what it gave.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from checkpointing.errors import ConfigError
from checkpointing.families import FAMILIES
from checkpointing.formats.base import Format, OpenModel, WriteOptions
from checkpointing.formats.detect import FORMATS, FoundModel, find_model
from checkpointing.formats.hf import config_for_weights
from checkpointing.formats.hf_config import CONFIG_NAME
from checkpointing.formats.made_configs import hf_config_for, params_for
from checkpointing.formats.meta import PARAMS_NAME
from checkpointing.formats.tune import missing_config
from checkpointing.mapping.model_parallel import ONE_RANK, Parallel
from checkpointing.mapping.tensors import TensorSource
from checkpointing.nearest import hint
from checkpointing.progress import bytes_progress
from checkpointing.storage.commit import check_room, recover, staged_directory
from checkpointing.storage.location import is_remote, path_on_this_machine
from checkpointing.storage.manifest import MANIFEST_NAME, read_manifest
from checkpointing.storage.mirror import local, origin_of
from checkpointing.storage.partial import (
    Measure,
    finished_files,
    partial_directory,
    partial_path,
)
from checkpointing.storage.publish import (
    check_remote_destination,
    lie_in_each_other,
    published,
)
from checkpointing.storage.read import read_json
from checkpointing.storage.remote import RemoteDirectory
from checkpointing.storage.side_files import side_files
from checkpointing.storage.write import parse_size
from checkpointing.storage.writer import CheckpointWriter

_GENERATION_CONFIG = "generation_config.json"
# Written anew or not true of other files; Meta's checklist holds checksums of its own weights.
_NOT_COPIED = {CONFIG_NAME, PARAMS_NAME, "checklist.chk"}


@dataclass(frozen=True)
class ModelToWrite:
    """All that will be written, checked, before a byte of it is.

    Attributes:
        source: directory of the model that it is made from.
        format: the format to write.
        base: the model that it is made from.
        tensors: as the format stores them.
        config_text: name and content of the config file, ``None`` for none.
        side_files: files to copy as they are.
        max_shard_bytes: largest weight file.
        parallel: number of ranks, each with weight files of its own.
        inputs: all other files that it is made from.
        computed_with: what else the tensors depend on, for JSON.
        measure: what measures the tensors while they are written.
        facts: for the manifest.
        notes: what the user should know, one line each.
    """

    source: Path
    format: Format
    base: OpenModel
    tensors: TensorSource
    config_text: tuple[str, str] | None
    side_files: tuple[Path, ...]
    max_shard_bytes: int
    parallel: Parallel = ONE_RANK
    inputs: tuple[Path, ...] = ()
    computed_with: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(meta.nbytes for meta in self.tensors.metas.values())

    @property
    def weight_files(self) -> list[str]:
        """Names of the weight files."""
        return self.format.file_names(self.tensors, self.base, self.options)

    @property
    def options(self) -> WriteOptions:
        """How the weights are written."""
        return WriteOptions(True, self.max_shard_bytes, self.parallel)

    @cached_property
    def key(self) -> str:
        """Hexadecimal; a plan that might write other bytes has another one.

        Files count with their paths, sizes and times of modification.
        """
        made_of = {
            "versions": [_version("tunepoint"), torch.__version__],
            "files": [_state(path) for path in (*self.inputs, *self.side_files)],
            "computed_with": self.computed_with,
            "tensors": [(name, str(meta)) for name, meta in self.tensors.metas.items()],
            "weight_files": [self.weight_files, self.max_shard_bytes],
            "config": self.config_text,
            "facts": self.facts,
        }
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _state(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def plan_conversion(
    source: str | Path,
    to: str,
    model_type: str | None = None,
    max_shard_size: str | int = "5GB",
    parallel: Parallel = ONE_RANK,
) -> ModelToWrite:
    """Plans the same model in another format, with the same bits.

    Args:
        source: directory of a model in any format, or its URL.
        to: ``"hf"``, ``"meta"``, ``"megatron"`` or ``"tune"``.
        model_type: needed where no config file names the family.
        max_shard_size: largest file; Meta's and Megatron's have one file for each rank instead.
        parallel: number of ranks, of Megatron's format.

    Raises:
        CheckpointNotFoundError: if there is no model.
        ConfigError: if the format is unknown or cannot hold the model.
        TensorMismatchError: lists every tensor that does not belong to the model.
    """
    found = find_model(local(source))
    return plan_model(found, found.open(model_type), to, max_shard_size, parallel)


def plan_model(
    found: FoundModel,
    model: OpenModel,
    to: str,
    max_shard_size: str | int = "5GB",
    parallel: Parallel = ONE_RANK,
) -> ModelToWrite:
    """Plans the writing of an opened model, whose tensors may be others than its files hold.

    Args:
        found: where it comes from.
        model: its native tensors and config.
        to: ``"hf"``, ``"meta"``, ``"megatron"`` or ``"tune"``.
        max_shard_size: largest file.
        parallel: number of ranks, of Megatron's format.

    Raises:
        ConfigError: if the format is unknown or cannot hold the model, or so many ranks.
        TensorMismatchError: lists every tensor that does not belong to the model.
    """
    if to not in FORMATS:
        raise ConfigError(f"format: {to!r} is unknown, {hint(to, FORMATS)}")
    if model.config is None and to != "tune":
        raise missing_config(found.directory)
    read_manifest(found.directory)  # a checkpoint of ours says if a file of it is damaged
    made_params = to == "meta" and not _has_params(found)
    if made_params and model.config is not None:
        params_for(model.config, found.directory)  # refuses before the tensors do
    FORMATS[to].check_ranks(parallel, model)
    tensors = FORMATS[to].plan(model.native, model)
    left_out = _NOT_COPIED | found.format.own_files
    copied = tuple(p for p in side_files(found.directory) if p.name not in left_out)
    family = None if model.config is None else model.config.family
    return ModelToWrite(
        source=found.directory,
        format=FORMATS[to],
        base=model,
        tensors=tensors,
        config_text=_config_text(found, model, to, tensors),
        side_files=copied,
        max_shard_bytes=parse_size(max_shard_size),
        parallel=parallel,
        inputs=(*found.files, *([found.config_file] if found.config_file else [])),
        facts={
            "format": to,
            "family": family,
            "converted_from": {
                "directory": origin_of(found.directory),
                "format": found.format.name,
            },
        },
        notes=tuple(_notes(found, model, to, {path.name for path in copied})),
    )


def _has_params(found: FoundModel) -> bool:
    return found.config_file is not None and found.config_file.name == PARAMS_NAME


def _config_text(
    found: FoundModel, model: OpenModel, to: str, tensors: TensorSource
) -> tuple[str, str] | None:
    own = found.config_file
    if own is None or model.config is None:
        return None
    names = FORMATS[to].config_names
    name = own.name if own.name in names else names[0]
    if own.name == name == CONFIG_NAME:
        layout = "native" if to == "tune" else to
        return name, config_for_weights(own, tensors, FAMILIES[model.config.family], layout)
    if own.name == name:
        return name, own.read_text(encoding="utf-8")
    if name == PARAMS_NAME:
        made = params_for(model.config, found.directory)
    else:
        dtypes = Counter(meta.dtype for meta in tensors.metas.values())
        dtype: torch.dtype = dtypes.most_common(1)[0][0]
        made = hf_config_for(model.config, dtype, _token_ids(found.directory), found.directory)
    return name, json.dumps(made, indent=2) + "\n"


def _token_ids(directory: Path) -> dict[str, Any]:
    path = directory / _GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def _notes(found: FoundModel, model: OpenModel, to: str, copied: set[str]) -> list[str]:
    notes = []
    config = model.config
    own = found.config_file
    if config is None or own is None:
        return ["there is no config file, so the tensors were not checked against one"]
    if to == "hf" and own.name == PARAMS_NAME:
        if "eos_token_id" not in _token_ids(found.directory):
            notes.append(
                "params.json does not know the bos and eos token ids: they are null in config.json"
            )
        if "tokenizer.json" not in copied:
            notes.append(
                "there is no tokenizer.json, which transformers and the recipes here read: copy "
                "the one of the model's Hugging Face repository"
            )
    if to == "meta" and own.name == CONFIG_NAME:
        notes.append(
            f"params.json has no place for the context length, {config.max_seq_len} tokens"
        )
        if config.dims.head_dim * config.dims.heads != config.dims.hidden:
            notes.append(
                f"head_dim {config.dims.head_dim} is not dim / n_heads: `tune` reads it from "
                "params.json, Meta's own code does not"
            )
        if config.family != "llama":
            notes.append(f"params.json names no family: read it with --model-type {config.family}")
    return notes


def check_destination(
    destination: str | Path, apart_from: tuple[str | Path, ...], overwrite: bool
) -> None:
    """Checks that writing a directory can destroy nothing.

    Args:
        destination: the directory to write, or its URL.
        apart_from: directories that are read, or their URLs; neither may lie in the other.
        overwrite: replace a model that was written by the same means before.

    Raises:
        ConfigError: if it cannot be written.
    """
    for directory in apart_from:
        if lie_in_each_other(destination, directory):
            raise ConfigError(
                f"{destination} and {directory} lie in each other; choose a place elsewhere, so "
                "that nothing that is read is overwritten"
            )
    if is_remote(destination):
        check_remote_destination(RemoteDirectory(str(destination)), overwrite)
        return
    destination = path_on_this_machine(destination)
    if not destination.exists():
        return
    if not overwrite:
        raise ConfigError(f"{destination} exists; choose another place, or add --overwrite")
    # Whatever else the directory holds would go with it.
    ours = destination.is_dir() and (destination / MANIFEST_NAME).is_file()
    if not ours and not (destination.is_dir() and not any(destination.iterdir())):
        raise ConfigError(
            f"{destination} was not written by `tune` (it has no {MANIFEST_NAME}) and is not "
            "overwritten; remove it yourself or choose another place"
        )


def write_model(plan: ModelToWrite, destination: str | Path, overwrite: bool = False) -> None:
    """Writes a planned model; the directory appears whole, or not at all.

    If it was cut short before, by a kill or as below, it goes on: weight files that were finished,
    and whose checksums hold, are not written again.

    Args:
        plan: from :func:`plan_conversion` or :func:`plan_model`.
        destination: the directory to write, or its URL.
        overwrite: replace an existing one.

    Raises:
        ConfigError: if the destination exists, or lies in the source or around it, or if another
            process is at the same.
        OutOfSpaceError: if the disk has no room; what is finished stays.
        WriteError: if the system refuses to write; what is finished stays. Or if it cannot be
            uploaded.
        KeyboardInterrupt: if the user stops it; what is finished stays, a note of it says where.
    """
    check_destination(destination, (plan.source,), overwrite)
    with published(destination) as directory:
        recover(directory.parent)
        with partial_directory(directory, plan.key, plan.weight_files, plan.measure) as partial:
            missing = plan.nbytes - partial.nbytes
            check_room(directory, missing)
            with bytes_progress(f"writing {directory.name}", missing) as progress:
                writer = partial.writer(progress)
                for path in plan.side_files:
                    writer.copy(path)
                if plan.config_text is not None:
                    writer.text(*plan.config_text)
                plan.format.write(writer, plan.tensors, plan.base, plan.options)
                writer.manifest(plan.facts)


def resume_notes(plan: ModelToWrite, destination: str | Path) -> tuple[str, ...]:
    """What the user should know of what an earlier process has finished of a planned model.

    Nothing is said of a destination that a URL names.
    """
    if is_remote(destination):
        return ()
    partial = partial_path(path_on_this_machine(destination), plan.key)
    count = len(finished_files(partial, plan.weight_files))
    if not count:
        return ()
    return (f"goes on with {partial}: {count} of {len(plan.weight_files)} weight files are there",)


@contextmanager
def written(directory: Path, nbytes: int) -> Iterator[CheckpointWriter]:
    """Yields what writes a directory, which appears whole when the block ends, or not at all.

    Args:
        directory: to write.
        nbytes: size of its tensors.
    """
    recover(directory.parent)
    check_room(directory, nbytes)
    with (
        bytes_progress(f"writing {directory.name}", nbytes) as progress,
        staged_directory(directory) as staging,
    ):
        yield CheckpointWriter(staging, progress)
