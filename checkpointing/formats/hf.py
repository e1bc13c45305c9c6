"""Hugging Face: ``config.json`` and ``model*.safetensors`` or ``pytorch_model*.bin``."""

import json
from collections.abc import Sequence
from pathlib import Path

from checkpointing.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TensorMismatchError,
)
from checkpointing.formats.base import (
    CheckpointFiles,
    OpenModel,
    WriteOptions,
    check_one_rank,
    indexed_files,
    layout_of,
    named_files,
    plan_foreign,
    read_index,
    shard_names,
    stored_in,
    write_shards,
)
from checkpointing.formats.config_types import read_config
from checkpointing.formats.hf_config import CONFIG_NAME, parse_hf_config, read_hf_config
from checkpointing.formats.hf_names import read_names
from checkpointing.formats.recognise import refuse_multimodal
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.plan import plan_to_native
from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.mapping.ties import tied_names
from checkpointing.storage.read import FilesSource, read_json
from checkpointing.storage.writer import CheckpointWriter

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


class HFFormat:
    """The format of transformers."""

    name = "hf"
    config_names: tuple[str, ...] = (CONFIG_NAME,)
    own_files: frozenset[str] = frozenset()

    def find_files(self, directory: Path, checkpoint_files: CheckpointFiles) -> list[Path]:
        if checkpoint_files is not None:
            return named_files(directory, checkpoint_files)
        for name in (_SINGLE_FILES[0], SAFETENSORS_INDEX, _SINGLE_FILES[1], TORCH_INDEX):
            path = directory / name
            if path.is_file():
                return [path] if name in _SINGLE_FILES else indexed_files(path)
        raise CheckpointNotFoundError(
            f"{directory}: holds none of {', '.join(_SINGLE_FILES)}, {SAFETENSORS_INDEX}, "
            f"{TORCH_INDEX}; check checkpoint_dir, or name the files in checkpoint_files"
        )

    def stored(self, files: Sequence[Path]) -> list[TensorMeta]:
        return stored_in(files)

    def open(self, directory: Path, files: Sequence[Path], model_type: str | None) -> OpenModel:
        path = directory / CONFIG_NAME
        refuse_multimodal(path, read_config(path))
        raw, family = read_hf_config(directory, model_type)
        stored = FilesSource(files)
        names = read_names(stored.metas, family, str(directory))
        source = names.over(stored)
        if names.of_bare_model and raw.get("tie_word_embeddings") is None:
            # Otherwise that the head is missing would say that it is tied.
            raw["tie_word_embeddings"] = family.hf_defaults.get("tie_word_embeddings", False)
        config = parse_hf_config(path, raw, family, self.name, source)
        layout = layout_of(family.name, self.name, config.dims)
        _check_index(files, stored, layout.optional())
        try:
            plan = plan_to_native(layout, source.metas, str(directory))
        except TensorMismatchError as error:
            head, _ = tied_names(family, self.name)
            bare = names.of_bare_model and head
            if not bare or config.dims.tied or head in source.metas:
                raise
            raise TensorMismatchError(
                str(directory),
                error.problems,
                "The names lack the prefix model., as those of a decoder that was saved by itself, "
                f"without its head: save the whole model, with {head}, or set tie_word_embeddings "
                "in config.json if the embeddings are the head.",
            ) from None
        return OpenModel(plan.over(source), config)

    def plan(self, native: TensorSource, base: OpenModel) -> TensorSource:
        return plan_foreign(native, base, self.name)

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
        weight_map, total = write_shards(writer, foreign, options)
        # Always an index, also for one file: engines take every *.safetensors file of a directory
        # for weights if there is none.
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        name = SAFETENSORS_INDEX if options.safe_serialization else TORCH_INDEX
        writer.text(name, json.dumps(index, indent=2) + "\n")


def _check_index(files: Sequence[Path], source: FilesSource, optional: set[str]) -> None:
    """Finds an index that does not tell where the tensors are.

    An optional tensor may be in the index and in no file: torchtune leaves such entries.
    """
    names = {path.name for path in files}
    for index_name in (SAFETENSORS_INDEX, TORCH_INDEX):
        index = files[0].parent / index_name
        weight_map = read_index(index) if index.is_file() else {}
        if not names <= set(weight_map.values()):
            continue
        wrong = [
            f"{tensor} (not in {file})"
            for tensor, file in weight_map.items()
            if file in names
            and not (tensor in optional and tensor not in source.file_of)
            and (tensor not in source.file_of or source.file_of[tensor].name != file)
        ]
        if wrong:
            raise CorruptCheckpointError(
                f"{index}: says wrongly where tensors are: {', '.join(wrong[:5])}"
                f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}; "
                "the index or a file is of another checkpoint: get them anew"
            )


def config_for_weights(
    config_file: Path, weights: TensorSource, family: Family, format: str
) -> str:
    """``config.json`` as it must read beside these weights.

    Only what would be untrue is changed: the dtype in which transformers would load them, and
    whether the embeddings are tied.

    Args:
        config_file: the model's own.
        weights: what will lie beside it.
        family: of the model.
        format: of the weights, ``"hf"`` or ``"native"``.
    """
    config = read_json(config_file)
    dtypes = {meta.dtype for meta in weights.metas.values() if meta.dtype.is_floating_point}
    if len(dtypes) == 1:
        dtype = str(dtypes.pop()).removeprefix("torch.")
        config.update({key: dtype for key in ("dtype", "torch_dtype") if key in config})
    head, _ = tied_names(family, format)
    if head and config.get("tie_word_embeddings", False) != (head not in weights.metas):
        config["tie_word_embeddings"] = head not in weights.metas
    return json.dumps(config, indent=2) + "\n"
