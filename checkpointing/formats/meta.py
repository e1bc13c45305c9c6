"""Meta: ``params.json`` and ``consolidated.NN.pth``, one file for each model-parallel rank."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.formats.base import (
    CheckpointFiles,
    OpenModel,
    WriteOptions,
    check_one_rank,
    layout_of,
    named_files,
    plan_foreign,
    stored_in,
)
from checkpointing.formats.recognise import number_field, recognise, size_field
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.model_parallel import Parallel, cut, join
from checkpointing.mapping.plan import plan_to_native
from checkpointing.mapping.rope_scaling import Llama3RopeScaling
from checkpointing.mapping.sizes import size_from_tensors
from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.mapping.ties import is_tied
from checkpointing.storage.read import open_tensor_file, read_json
from checkpointing.storage.writer import CheckpointWriter

PARAMS_NAME = "params.json"
_SHARD = "consolidated.{:02d}.pth"
_SHARD_PATTERN = re.compile(r"consolidated\.(\d+)\.(pth|pt|safetensors)")

# https://github.com/meta-llama/llama-models: Llama 3.1 scales RoPE for 128k tokens of context by
# 8, and Llama 3.2's small models by 32; params.json names the factor only in some releases.
_ROPE_FACTORS = {"LLAMA3_2": 32.0}
_ROPE_FACTOR = 8.0
_LONG_CONTEXT, _SHORT_CONTEXT = 131072, 8192


class MetaFormat:
    """The format of Meta's own releases."""

    name = "meta"
    config_names: tuple[str, ...] = (PARAMS_NAME,)
    own_files: frozenset[str] = frozenset()

    def find_files(self, directory: Path, checkpoint_files: CheckpointFiles) -> list[Path]:
        if checkpoint_files is not None:
            paths = named_files(directory, checkpoint_files)
        else:
            paths = sorted(p for p in directory.glob("*") if _SHARD_PATTERN.fullmatch(p.name))
            if not paths:
                raise CheckpointNotFoundError(
                    f"{directory}: holds no consolidated.NN.pth; check checkpoint_dir, "
                    "or name the files in checkpoint_files"
                )
        _check_complete(directory, paths)
        return paths

    def stored(self, files: Sequence[Path]) -> list[TensorMeta]:
        return stored_in(files)

    def open(self, directory: Path, files: Sequence[Path], model_type: str | None) -> OpenModel:
        ranks = [open_tensor_file(path) for path in files]
        path = directory / PARAMS_NAME
        params = read_json(path)
        family = _family(path, model_type)
        hidden = size_field(path, params, "dim")
        whole, cuts = join(family, self.name, ranks, hidden, str(directory))
        config = parse_params(path, whole, self.name, model_type)
        layout = layout_of(family.name, self.name, config.dims)
        plan = plan_to_native(layout, whole.metas, str(directory))
        return OpenModel(plan.over(whole), config, cuts, len(ranks))

    def plan(self, native: TensorSource, base: OpenModel) -> TensorSource:
        return plan_foreign(native, base, self.name)

    def check_ranks(self, parallel: Parallel, base: OpenModel) -> None:
        check_one_rank(parallel, self.name)

    def file_names(
        self, foreign: TensorSource, base: OpenModel, options: WriteOptions
    ) -> list[str]:
        return [_SHARD.format(rank) for rank in range(base.ranks)]

    def write(
        self,
        writer: CheckpointWriter,
        foreign: TensorSource,
        base: OpenModel,
        options: WriteOptions,
    ) -> None:
        shards = cut(foreign, base.cuts, base.ranks)
        for name, shard in zip(self.file_names(foreign, base, options), shards, strict=True):
            writer.tensors(name, shard)


def _check_complete(directory: Path, paths: Sequence[Path]) -> None:
    numbers = [int(m[1]) for path in paths if (m := _SHARD_PATTERN.fullmatch(path.name))]
    if len(numbers) == len(paths) and numbers != list(range(len(paths))):
        raise CheckpointNotFoundError(
            f"{directory}: the shards are numbered {numbers}, but must be 0 to "
            f"{len(paths) - 1} without a gap: get the missing files"
        )


def _family(path: Path, model_type: str | None) -> Family:
    # params.json does not name the family; Meta publishes no other than Llama.
    family = recognise(path, None, model_type or "llama")
    if "meta" not in family.formats:
        raise ConfigError(
            f"{path}: the layout of {model_type} in Meta's format is not known here; take the "
            "model's Hugging Face release"
        )
    return family


def _layers(
    path: Path, params: Mapping[str, Any], family: Family, format: str, source: TensorSource
) -> int:
    found = size_from_tensors(family, format, "layers", source.metas)
    return size_field(path, params, "n_layers", found)


def parse_params(
    path: Path, source: TensorSource, format: str, model_type: str | None
) -> ModelConfig:
    """What ``params.json`` says; vocabulary and feed-forward width are read off the tensors.

    Args:
        path: the file.
        source: the model's tensors, whole.
        format: their format, ``"meta"`` or ``"native"``.
        model_type: the recipe's, which tells what params.json leaves out.

    Raises:
        CheckpointNotFoundError: if the file is not there.
        ConfigError: if a size is missing, or contradicts the tensors.
    """
    params = read_json(path)
    family = _family(path, model_type)
    hidden = size_field(path, params, "dim")
    heads = size_field(path, params, "n_heads")
    vocab = size_from_tensors(family, format, "vocab", source.metas)
    ffn = size_from_tensors(family, format, "ffn", source.metas)
    said = params.get("vocab_size", -1)
    # Llama 2 writes -1 and leaves the size to the tokenizer.
    if said not in (-1, vocab):
        raise ConfigError(f"{path}: vocab_size is {said!r}, but the embedding has {vocab} rows")
    usual_factor = _ROPE_FACTORS.get((model_type or "").upper(), _ROPE_FACTOR)
    factor = number_field(path, params, "rope_scaling_factor", usual_factor)
    scaled = bool(params.get("use_scaled_rope", False))
    return ModelConfig(
        family=family.name,
        dims=Dims(
            layers=_layers(path, params, family, format, source),
            vocab=size_field(path, {}, "vocab_size", vocab),
            hidden=hidden,
            ffn=size_field(path, {}, "feed-forward width", ffn),
            heads=heads,
            kv_heads=size_field(path, params, "n_kv_heads", heads),
            head_dim=size_field(path, params, "head_dim", hidden // heads),
            tied=is_tied(family, format, source, None, str(path.parent)),
        ),
        norm_eps=number_field(path, params, "norm_eps", 1e-5),
        rope_theta=number_field(path, params, "rope_theta", 10000.0),
        rope_scaling=Llama3RopeScaling(factor, 1.0, 4.0, _SHORT_CONTEXT) if scaled else None,
        max_seq_len=_LONG_CONTEXT if scaled else _SHORT_CONTEXT,
    )
