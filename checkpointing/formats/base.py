"""What every format can do."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from checkpointing.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from checkpointing.families import FAMILIES
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.model_parallel import ONE_RANK, Cut, Parallel
from checkpointing.mapping.plan import plan_to_foreign
from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.mapping.ties import is_tied
from checkpointing.storage.paths import inside
from checkpointing.storage.read import open_tensor_file, read_json
from checkpointing.storage.write import plan_shards
from checkpointing.storage.writer import CheckpointWriter

CheckpointFiles = Sequence[str] | Mapping[str, str] | None
"""File names; or ``{"filename_format", "max_filename"}``; or ``None`` to look for them."""

SHARD_NAME = "model-{:05d}-of-{:05d}"


@dataclass(frozen=True)
class OpenModel:
    """A model on disk of which the headers have been read.

    Attributes:
        native: its tensors in the native layout.
        config: what its config file says, or ``None`` where it has none that is understood.
        cuts: for model-parallel shards, how each tensor was cut.
        ranks: number of model-parallel shards.
    """

    native: TensorSource
    config: ModelConfig | None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    ranks: int = 1


@dataclass(frozen=True)
class WriteOptions:
    """How weights are to be written.

    Attributes:
        safe_serialization: safetensors rather than ``torch.save``, where the format has both.
        max_shard_bytes: largest file; ``None`` for one file.
        parallel: number of ranks, each with files of its own, where the format has that.
    """

    safe_serialization: bool
    max_shard_bytes: int | None
    parallel: Parallel = ONE_RANK


class Format(Protocol):
    """A layout of models on disk.

    Attributes:
        name: that commands take.
        config_names: of the config files that it may have, the first that is there counts; the
            first of them is made where there is another one.
        own_files: names of files beside the weights that are not true of them in another format.
    """

    name: str
    config_names: tuple[str, ...]
    own_files: frozenset[str]

    def find_files(self, directory: Path, checkpoint_files: CheckpointFiles) -> list[Path]:
        """The weight files of a checkpoint, all of them existing."""

    def stored(self, files: Sequence[Path]) -> list[TensorMeta]:
        """Shape and dtype of every tensor as it is stored."""

    def open(self, directory: Path, files: Sequence[Path], model_type: str | None) -> OpenModel:
        """Reads the headers and checks them."""

    def plan(self, native: TensorSource, base: OpenModel) -> TensorSource:
        """The tensors as the format stores them; finds all problems, writes nothing."""

    def check_ranks(self, parallel: Parallel, base: OpenModel) -> None:
        """Checks that a model can be written for so many ranks; raises a ``ConfigError``."""

    def file_names(
        self, foreign: TensorSource, base: OpenModel, options: WriteOptions
    ) -> list[str]:
        """Names of the weight files that :meth:`write` makes."""

    def write(
        self,
        writer: CheckpointWriter,
        foreign: TensorSource,
        base: OpenModel,
        options: WriteOptions,
    ) -> None:
        """Writes what :meth:`plan` gave."""


def check_one_rank(parallel: Parallel, format: str) -> None:
    """Checks that a format without files for ranks is asked for none.

    Raises:
        ConfigError: if it is.
    """
    if parallel != ONE_RANK:
        raise ConfigError(f"only Megatron's format is written for several ranks, not {format}")


def stored_in(files: Sequence[Path]) -> list[TensorMeta]:
    """Shape and dtype of every tensor of files that hold nothing else."""
    return [meta for file in files for meta in open_tensor_file(file).metas.values()]


def plan_foreign(native: TensorSource, base: OpenModel, format: str) -> TensorSource:
    """The tensors of a native model in a foreign format; nothing is read but a stored head.

    Args:
        native: the model's tensors.
        base: the model that it was trained from, which has the same sizes.
        format: the foreign format.

    Raises:
        TensorMismatchError: lists every tensor that does not belong to the model.
    """
    layout = native_layout(native, base, format)
    return plan_to_foreign(layout, native.metas, "saving a model").over(native)


def native_layout(native: TensorSource, base: OpenModel, format: str) -> Layout:
    """The layout of a native model in a foreign format."""
    if base.config is None:
        raise ConfigError(
            f"the weights have neither config.json nor params.json beside them, without which "
            f"their layout in the {format} format is not known; copy the one of the model that "
            "they came from into their directory"
        )
    family = FAMILIES[base.config.family]
    tied = is_tied(family, "native", native, base.config.dims.tied, "the model")
    return layout_of(family.name, format, replace(base.config.dims, tied=tied))


# One model is planned several times, on its way in and out, and its layout may be long.
@lru_cache(maxsize=1)
def layout_of(family: str, format: str, dims: Dims) -> Layout:
    """The layout of a family's model of these sizes in a foreign format."""
    return Layout(FAMILIES[family], format, dims)


def named_files(directory: Path, checkpoint_files: CheckpointFiles) -> list[Path]:
    """The files that a user names, sorted by the numbers in their names.

    Raises:
        CheckpointNotFoundError: lists the files that are not there.
        ConfigError: if the description is not understood.
    """
    if isinstance(checkpoint_files, Mapping):
        names = _formatted_names(checkpoint_files)
    else:
        names = [str(name) for name in checkpoint_files or ()]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"checkpoint_files: {names}: name every file once, and at least one")
    paths = sorted((directory / name for name in names), key=_number_key)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise CheckpointNotFoundError(
            f"checkpoint_files: not there: {', '.join(missing)}; "
            "check checkpoint_dir, or leave checkpoint_files out to use all that is there"
        )
    return paths


def _formatted_names(description: Mapping[str, str]) -> list[str]:
    if set(description) != {"filename_format", "max_filename"}:
        raise ConfigError(
            f"checkpoint_files: keys {sorted(description)}; give filename_format, such as "
            "'model-{}-of-{}.safetensors', and max_filename, such as '00030'"
        )
    template, last = description["filename_format"], str(description["max_filename"])
    if template.count("{}") != 2 or not last.isdigit():
        raise ConfigError(
            f"checkpoint_files: filename_format {template!r} must hold two {{}} and max_filename "
            f"{last!r} must be a number with its leading zeros, in quotes"
        )
    return [
        template.format(str(number).zfill(len(last)), last) for number in range(1, int(last) + 1)
    ]


def _number_key(path: Path) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)
    ]


def indexed_files(index: Path) -> list[Path]:
    """The files that an index names, checked to lie beside it.

    Raises:
        CorruptCheckpointError: if it is no index.
        UnsafePathError: if it names a file elsewhere.
        CheckpointNotFoundError: lists the files that are not there.
    """
    weight_map = read_index(index)
    paths = [inside(index.parent, name, index) for name in dict.fromkeys(weight_map.values())]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointNotFoundError(
            f"{index}: names files that are not there: {', '.join(missing)}; "
            "get them, or make the index anew"
        )
    return sorted(paths, key=_number_key)


def read_index(index: Path) -> dict[str, str]:
    """The ``weight_map`` of an index: for each tensor the file that holds it.

    Raises:
        CorruptCheckpointError: if the file is no index.
        UnsafePathError: if it names something else than a file.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{index}: has no weight_map; get the index anew")
    for name in weight_map.values():
        if not isinstance(name, str):
            inside(index.parent, name, index)
    return weight_map


def shard_names(source: TensorSource, options: WriteOptions) -> list[str]:
    """Names of the files that :func:`write_shards` makes, in order."""
    count = len(plan_shards(source.metas, options.max_shard_bytes))
    suffix = ".safetensors" if options.safe_serialization else ".bin"
    return [SHARD_NAME.format(number, count) + suffix for number in range(1, count + 1)]


def write_shards(
    writer: CheckpointWriter, source: TensorSource, options: WriteOptions
) -> tuple[dict[str, str], int]:
    """Writes tensors as one or several files named as Hugging Face and torchtune name them.

    Returns:
        For each tensor the file that holds it, and the number of bytes of all tensors.
    """
    shards = plan_shards(source.metas, options.max_shard_bytes)
    file_of = {}
    for file_name, names in zip(shard_names(source, options), shards, strict=True):
        writer.tensors(file_name, source, names)
        file_of.update(dict.fromkeys(names, file_name))
    return file_of, sum(meta.nbytes for meta in source.metas.values())
