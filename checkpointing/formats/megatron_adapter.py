"""An adapter of Megatron-Bridge on disk: the files of a model, with the adapter's tensors alone.

Its rank and alpha are in ``run_config.yaml``, as Megatron-Bridge writes it.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.megatron import MegatronAdapter, from_megatron
from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.families import FAMILIES
from checkpointing.formats.base import OpenModel, native_layout
from checkpointing.formats.megatron import check_family, check_settings
from checkpointing.formats.megatron_files import (
    iteration_directory,
    open_files,
    rank_files,
    tensor_names,
)
from checkpointing.formats.megatron_names import have_adapter, have_base
from checkpointing.formats.megatron_settings import SETTINGS_NAME, run_settings
from checkpointing.formats.megatron_shards import check_parallel, cuts, whole_model
from checkpointing.formats.megatron_write import write_ranks
from checkpointing.formats.tune import missing_config
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.tensors import LazyTensors, TensorMeta
from checkpointing.storage.writer import CheckpointWriter

_CLASSES = {False: "megatron.bridge.peft.lora.LoRA", True: "megatron.bridge.peft.dora.DoRA"}
# One adapter for all experts of a rank, where they are one module.
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12]\.adapter\..+)")


def is_megatron_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter of Megatron-Bridge and no model with it.

    Raises:
        CorruptCheckpointError: if its files cannot be read.
    """
    try:
        names = tensor_names(rank_files(directory))
    except CheckpointNotFoundError:
        return False
    return have_adapter(names) and not have_base(names)


def stored_adapter(directory: Path) -> tuple[LazyTensors, Mapping[str, Any]]:
    """The tensors of the first rank's file, by Megatron's names, and what the settings say.

    Raises:
        ConfigError: if nothing tells rank and alpha.
        CheckpointingError: if a file is damaged.
    """
    found = open_files(rank_files(directory), directory)
    return found.ranks[min(found.ranks)][0], _settings(directory)


def adapter_files(directory: Path) -> list[Path]:
    """All files of an adapter."""
    settings = (each / SETTINGS_NAME for each in _settings_directories(directory))
    return [*rank_files(directory), *(path for path in settings if path.is_file())]


def read_megatron_adapter(directory: Path, base: OpenModel) -> tuple[LazyTensors, AdapterConfig]:
    """The adapter in a directory, in native form.

    Args:
        directory: that of an iteration, or the one that names the latest.
        base: the adapter's base, in any format.

    Raises:
        CheckpointNotFoundError: if there is none.
        ConfigError: if nothing tells rank and alpha, or the base cannot be one of Megatron's.
        TensorMismatchError: lists every tensor that does not fit the base.
        CheckpointingError: if a file is damaged.
    """
    if base.config is None:
        raise missing_config(directory)
    family, dims = FAMILIES[base.config.family], base.config.dims
    check_family(family, str(directory))
    found = open_files(rank_files(directory), directory)
    check_settings(found.settings, base.config, directory)
    experts = dims.experts // len({rank.expert for rank in found.ranks})
    ranks = {
        rank: [_of_single_experts(chunk, experts) for chunk in chunks]
        for rank, chunks in found.ranks.items()
    }
    stages = len({rank.pipeline for rank in ranks}) * max(map(len, ranks.values()))
    layers = _layers(dims, stages, directory)
    whole = whole_model(ranks, cuts(family), dims.expert_ffn, str(directory), layers)
    layout = native_layout(base.native, base, "megatron")
    return from_megatron(whole, _settings(directory), layout, str(directory))


def _layers(dims: Dims, stages: int, where: Path) -> int:
    if dims.layers % stages:
        raise ConfigError(
            f"{where}: {stages} stages and chunks do not share {dims.layers} layers evenly, and an "
            "adapter does not tell which it has; save it with fewer stages"
        )
    return dims.layers // stages


def _of_single_experts(source: LazyTensors, experts: int) -> LazyTensors:
    metas: dict[str, TensorMeta] = {}
    rows = {}
    for name, meta in source.metas.items():
        grouped = _GROUPED.fullmatch(name)
        names = (
            [name]
            if grouped is None
            else [f"{grouped[1]}.local_experts.{n}.{grouped[2]}" for n in range(experts)]
        )
        for new in names:
            metas[new], rows[new] = meta, partial(source.rows, name)
    return LazyTensors(metas, rows)


def _settings_directories(directory: Path) -> list[Path]:
    return list(dict.fromkeys((iteration_directory(directory), directory)))


def _settings(directory: Path) -> Mapping[str, Any]:
    settings = run_settings("peft", *_settings_directories(directory))
    rank, alpha = settings.get("dim", 0), settings.get("alpha", 0)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise ConfigError(
            f"{directory}: the adapter's rank and alpha are not known, which its tensors do not "
            f"show; put Megatron-Bridge's {SETTINGS_NAME} there, or one with peft: {{dim: ..., "
            "alpha: ...}"
        )
    return settings


def check_ranks(parallel: Parallel, dims: Dims, adapter: MegatronAdapter) -> None:
    """Checks that an adapter can be cut into so many parts.

    Raises:
        ConfigError: if not.
    """
    check_parallel(parallel, dims)
    if adapter.settings["dim"] % parallel.tensor:
        raise ConfigError(
            f"Megatron's shards: tensor-parallel {parallel.tensor} does not divide the adapter's "
            f"rank ({adapter.settings['dim']}), along which its A is cut; give a number that does"
        )


def write_megatron_adapter(
    writer: CheckpointWriter, adapter: MegatronAdapter, config: ModelConfig, parallel: Parallel
) -> None:
    """Writes an adapter.

    Args:
        writer: of the directory.
        adapter: from :func:`checkpointing.adapters.megatron.to_megatron`.
        config: the base's.
        parallel: into how many parts it is cut.
    """
    write_ranks(writer, adapter.tensors, config, parallel)
    is_dora = any(name.endswith("weight_magnitude") for name in adapter.tensors.metas)
    # JSON is YAML too.
    peft = {"_target_": _CLASSES[is_dora], **adapter.settings}
    writer.text(SETTINGS_NAME, json.dumps({"peft": peft}, indent=2) + "\n")
