"""tune: the native layout, as ``torch.save`` or safetensors files, and any config beside them."""

from collections.abc import Sequence
from pathlib import Path

from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.formats.base import (
    CheckpointFiles,
    OpenModel,
    WriteOptions,
    check_one_rank,
    layout_of,
    named_files,
    native_layout,
    shard_names,
    stored_in,
    write_shards,
)
from checkpointing.formats.hf_config import CONFIG_NAME, parse_hf_config, read_hf_config
from checkpointing.formats.meta import PARAMS_NAME, parse_params
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.plan import check_native
from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.storage.read import FilesSource
from checkpointing.storage.writer import CheckpointWriter

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
_NOT_WEIGHTS = ("adapter_model", "recipe_state")


class TuneFormat:
    """The native layout on disk, as torchtune writes it."""

    name = "tune"
    config_names: tuple[str, ...] = (CONFIG_NAME, PARAMS_NAME)
    own_files: frozenset[str] = frozenset()

    def find_files(self, directory: Path, checkpoint_files: CheckpointFiles) -> list[Path]:
        if checkpoint_files is not None:
            return named_files(directory, checkpoint_files)
        found = [
            path.name
            for path in directory.glob("*")
            if path.suffix in _WEIGHT_SUFFIXES and not path.name.startswith(_NOT_WEIGHTS)
        ]
        if not found:
            raise CheckpointNotFoundError(
                f"{directory}: holds no weights ({', '.join(_WEIGHT_SUFFIXES)}); "
                "check checkpoint_dir, or name the files in checkpoint_files"
            )
        return named_files(directory, found)

    def stored(self, files: Sequence[Path]) -> list[TensorMeta]:
        return stored_in(files)

    def open(self, directory: Path, files: Sequence[Path], model_type: str | None) -> OpenModel:
        source = FilesSource(files)
        config = _read_config(directory, source, model_type)
        if config is not None:
            layout = layout_of(config.family, "hf", config.dims)
            check_native(layout, source.metas, str(directory))
        return OpenModel(source, config)

    def plan(self, native: TensorSource, base: OpenModel) -> TensorSource:
        if base.config is not None:
            check_native(native_layout(native, base, "hf"), native.metas, "saving a model")
        return native

    def check_ranks(self, parallel: Parallel, base: OpenModel) -> None:
        check_one_rank(parallel, self.name)

    def file_names(
        self, foreign: TensorSource, base: OpenModel, options: WriteOptions
    ) -> list[str]:
        return shard_names(foreign, options)

    def write(
        self,
        writer: CheckpointWriter,
        foreign: TensorSource,
        base: OpenModel,
        options: WriteOptions,
    ) -> None:
        write_shards(writer, foreign, options)


def _read_config(
    directory: Path, source: TensorSource, model_type: str | None
) -> ModelConfig | None:
    """The config of the model that the weights came from; native weights may lie without one."""
    path = directory / CONFIG_NAME
    if path.is_file():
        raw, family = read_hf_config(directory, model_type)
        return parse_hf_config(path, raw, family, "native", source)
    path = directory / PARAMS_NAME
    if path.is_file():
        return parse_params(path, source, "native", model_type)
    return None


def missing_config(directory: Path) -> ConfigError:
    """The error for a model that must be built, and has no config file."""
    return ConfigError(
        f"{directory}: has neither {CONFIG_NAME} nor {PARAMS_NAME}, so the model cannot be built; "
        "copy the one of the model that the weights came from into it"
    )
