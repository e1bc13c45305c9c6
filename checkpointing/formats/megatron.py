"""Megatron-core: a directory for each iteration, with one file for each rank of the job.

Distributed checkpoints (``torch_dist``), which Megatron-LM and Megatron-Bridge write by default,
are read too. ``config.json`` of the model lies beside, as Hugging Face has it: Megatron's own
settings leave out what a model is called and how it is used elsewhere.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.errors import CheckpointNotFoundError, ConfigError, TensorMismatchError
from checkpointing.families import FAMILIES
from checkpointing.formats.base import (
    CheckpointFiles,
    OpenModel,
    WriteOptions,
    layout_of,
    plan_foreign,
)
from checkpointing.formats.hf_config import CONFIG_NAME, parse_hf_config, read_hf_config
from checkpointing.formats.megatron_files import (
    TRACKER_NAME,
    MegatronFiles,
    holds_model,
    is_distributed,
    open_files,
    rank_files,
)
from checkpointing.formats.megatron_settings import SETTINGS_NAME
from checkpointing.formats.megatron_shards import check_parallel, cuts, ranks_of, whole_model
from checkpointing.formats.megatron_write import VOCAB_MULTIPLE, file_name, write_ranks
from checkpointing.formats.recognise import size_field
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.padding import unpadded, vocabulary_tensors
from checkpointing.mapping.plan import plan_to_native
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource
from checkpointing.storage.writer import CheckpointWriter

# A distributed checkpoint may not say how many ranks shared the vocabulary.
_MOST_RANKS = 64


class MegatronFormat:
    """The format of Megatron-core."""

    name = "megatron"
    config_names: tuple[str, ...] = (CONFIG_NAME,)
    own_files = frozenset({TRACKER_NAME, SETTINGS_NAME, "metadata.json"})

    def find_files(self, directory: Path, checkpoint_files: CheckpointFiles) -> list[Path]:
        if checkpoint_files is not None:
            raise ConfigError(
                "checkpoint_files: a Megatron checkpoint is read whole; leave them out"
            )
        files = rank_files(directory)
        if not holds_model(files):
            raise CheckpointNotFoundError(f"{directory}: holds no Megatron model")
        return files

    def stored(self, files: Sequence[Path]) -> list[TensorMeta]:
        return list(open_files(files, files[0].parent).stored)

    def open(self, directory: Path, files: Sequence[Path], model_type: str | None) -> OpenModel:
        path = directory / CONFIG_NAME
        raw, family = read_hf_config(directory, model_type)
        check_family(family, str(directory))
        found = open_files(files, directory)
        whole = whole_model(
            found.ranks, cuts(family), expert_ffn(path, raw, family), str(directory)
        )
        multiple = _vocab_multiple(found, is_distributed(files))
        vocab = size_field(path, raw, "vocab_size")
        source = _without_padding(whole, family, vocab, multiple, directory)
        config = parse_hf_config(path, raw, family, self.name, source)
        check_settings(found.settings, config, directory)
        layout = layout_of(family.name, self.name, config.dims)
        plan = plan_to_native(layout, source.metas, str(directory))
        return OpenModel(plan.over(source), config)

    def plan(self, native: TensorSource, base: OpenModel) -> TensorSource:
        if base.config is not None:
            check_family(FAMILIES[base.config.family], "the model")
        return plan_foreign(native, base, self.name)

    def check_ranks(self, parallel: Parallel, base: OpenModel) -> None:
        if base.config is not None:
            check_family(FAMILIES[base.config.family], "the model")
            check_parallel(parallel, base.config.dims)

    def file_names(
        self, foreign: TensorSource, base: OpenModel, options: WriteOptions
    ) -> list[str]:
        return [file_name(rank, options.parallel) for rank in ranks_of(options.parallel)]

    def write(
        self,
        writer: CheckpointWriter,
        foreign: TensorSource,
        base: OpenModel,
        options: WriteOptions,
    ) -> None:
        assert base.config is not None
        write_ranks(writer, foreign, base.config, options.parallel)


def check_family(family: Family, where: str) -> None:
    """Checks that Megatron's names of a family are known.

    Raises:
        ConfigError: if not.
    """
    if MegatronFormat.name not in family.formats:
        known = [name for name, each in FAMILIES.items() if MegatronFormat.name in each.formats]
        raise ConfigError(
            f"{where}: Megatron's layout of {family.name} is not known here, only that of "
            f"{', '.join(known)}; convert it to hf, and with Megatron-Bridge from there"
        )


def expert_ffn(path: Path, raw: Mapping[str, Any], family: Family) -> int:
    """Width of an expert by ``config.json``; 0 for a model without experts."""
    keys = family.hf_fields.get("expert_ffn", ())
    key = next((key for key in keys if raw.get(key) is not None), "")
    return size_field(path, raw, key) if key else 0


def _vocab_multiple(found: MegatronFiles, is_distributed: bool) -> int:
    """What the rows of the vocabulary are filled up to a multiple of."""
    own = found.settings.get("make_vocab_size_divisible_by")
    said = found.settings.get("tensor_model_parallel_size")
    ranks = _MOST_RANKS if is_distributed else 1 + max(rank.tensor for rank in found.ranks)
    return (own if type(own) is int else VOCAB_MULTIPLE) * (said if type(said) is int else ranks)


def _without_padding(
    source: LazyTensors, family: Family, vocab: int, multiple: int, where: Path
) -> LazyTensors:
    names = [name for name in vocabulary_tensors(family, "megatron") if name in source.metas]
    problems = [
        f"{name}: {rows} rows, for the {vocab} tokens of {CONFIG_NAME} filled up to a multiple of "
        f"at most {multiple}"
        for name in names
        for rows in [(*source.metas[name].shape, 0)[0]]
        if not 0 <= rows - vocab < multiple
    ]
    if problems:
        raise TensorMismatchError(
            str(where),
            problems,
            f"Rows behind the vocabulary are cut off only where Megatron fills it up: correct "
            f"vocab_size in {CONFIG_NAME}.",
        )
    return unpadded(source, names, vocab)


def check_settings(settings: Mapping[str, Any], config: ModelConfig, where: Path) -> None:
    """Checks that Megatron's settings and the config file are of the same model.

    The tensors do not tell all of them: how many heads share a key, for example.

    Raises:
        ConfigError: lists what contradicts.
    """
    dims = config.dims
    expected = {
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "num_query_groups": dims.kv_heads,
        "kv_channels": dims.head_dim,
        "num_experts": dims.experts,
        "num_moe_experts": dims.experts,
        "rotary_base": config.rope_theta,
        "norm_epsilon": config.norm_eps,
        "layernorm_epsilon": config.norm_eps,
        "rotary_interleaved": False,
    }
    if settings.get("group_query_attention") is False:
        # Then Megatron gives every head its own, whatever the number says.
        settings = {**settings, "num_query_groups": settings.get("num_attention_heads")}
    wrong = [
        f"{name} is {settings[name]!r}, not {value!r}"
        for name, value in expected.items()
        if isinstance(settings.get(name), bool | int | float) and settings[name] != value
    ]
    if wrong:
        raise ConfigError(
            f"{where}: by {CONFIG_NAME}, Megatron's settings are of another model: "
            f"{'; '.join(wrong)}; put the {CONFIG_NAME} of this model there"
        )
