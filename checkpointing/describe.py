"""What a directory holds: a model, an adapter, or both."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.adapter_checkpoint import AdapterCheckpoint, has_adapter, open_adapter
from checkpointing.adapters.lora import adapter_modules, weight_updates
from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.formats.detect import FoundModel, find_model
from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.merge import MeasuredMerge
from checkpointing.progress import bytes_progress
from checkpointing.storage.manifest import read_manifest
from checkpointing.storage.mirror import local


def describe(
    directory: str | Path, model_type: str | None = None, base: str | Path | None = None
) -> dict[str, Any]:
    """All that headers, configs and the manifest of a checkpoint tell.

    Args:
        directory: a model in any format, or a checkpoint with an adapter; or its URL.
        model_type: needed where no config file names the family.
        base: the adapter's base; by default where the manifest says that it was.

    Returns:
        ``path``; ``model``, ``adapter`` and ``checkpoint``, each a dictionary or ``None``. The
        values are those of JSON.

    Raises:
        CheckpointNotFoundError: if there is neither a model nor an adapter.
        CheckpointingError: if a file is damaged or does not fit the others.
    """
    path, directory = str(directory), local(directory)
    base = None if base is None else local(base)
    adapted = has_adapter(directory)
    try:
        model = _describe_model(find_model(directory), model_type)
    except CheckpointNotFoundError:
        if not adapted:
            raise
        model = None
    return {
        "path": path,
        "model": model,
        "adapter": _describe_adapter(directory, model_type, base) if adapted else None,
        "checkpoint": _describe_checkpoint(read_manifest(directory)),
    }


def _describe_model(found: FoundModel, model_type: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"format": found.format.name, "family": None, "problem": None}
    try:
        config = found.open(model_type).config
    except ConfigError as error:
        # A model that is not supported still has tensors to be counted.
        config = None
        facts["problem"] = str(error)
    if config is not None:
        values = dataclasses.asdict(config)
        facts["family"] = values.pop("family")
        facts["dims"] = values.pop("dims")
        facts["config"] = values
    # By rank, a norm of a Meta model is counted as often as it is stored.
    metas = found.format.stored(found.files)
    return {
        **facts,
        **_count(metas),
        "files": {
            path.relative_to(found.directory).as_posix(): path.stat().st_size
            for path in found.files
        },
    }


def _count(metas: list[TensorMeta]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for meta in metas:
        dtypes[str(meta.dtype).removeprefix("torch.")] += meta.nbytes
    return {
        "tensors": len(metas),
        "parameters": sum(meta.nbytes // meta.dtype.itemsize for meta in metas),
        "bytes": sum(meta.nbytes for meta in metas),
        "bytes_by_dtype": dict(dtypes.most_common()),
    }


def _describe_checkpoint(manifest: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if manifest is None:
        return None
    keys = ("step", "epoch", "converted_from", "merged_adapter", "base")
    return {key: manifest[key] for key in keys if manifest.get(key) is not None}


def _describe_adapter(directory: Path, model_type: str | None, base: Path | None) -> dict[str, Any]:
    adapter = open_adapter(directory)
    place = base or adapter.base_directory
    updates = None
    if place is not None and (base is not None or place.is_dir()):
        model = find_model(place).open(model_type)
        adapter = open_adapter(directory, model)
        updates = relative_updates(adapter, model.native, place)
    config = adapter.config
    return {
        "kind": ("rs" if config.use_rslora else "") + ("DoRA" if config.use_dora else "LoRA"),
        "rank": config.r,
        "alpha": config.alpha,
        "scale": config.scale(""),  # of modules that no pattern names
        "targets": list(config.target_modules),
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "lora_bias": config.lora_bias,
        "modules_to_save": list(config.modules_to_save),
        "dropout": config.dropout,
        **_count(list(adapter.tensors.metas.values())),
        "base": None if place is None else str(place),
        "relative_updates": updates,
    }


def relative_updates(
    adapter: AdapterCheckpoint, base: TensorSource, where: Path
) -> dict[str, float]:
    """``‖U‖ / ‖W‖`` (Frobenius) of every module: U the adapter's update, W the base's weight.

    Args:
        adapter: the adapter.
        base: native weights of the model that it was trained on.
        where: the base's directory, for errors.

    Raises:
        ConfigError: if it was trained on another base.
        TensorMismatchError: lists every tensor of the adapter that does not fit.
    """
    adapter.check_base(base, where)
    updates, config = weight_updates(adapter.tensors, adapter.config)
    merged = MeasuredMerge(base, updates, config)
    modules = adapter_modules(updates.metas)
    names = [kind.weight.native_name(module) for module, kind in modules.items()]
    with bytes_progress("measuring", sum(merged.metas[n].nbytes for n in names)) as progress:
        for name in names:
            merged.read(name)
            progress(merged.metas[name].nbytes)
    survival = merged.survival
    return {module: survival[module].relative_update for module in modules}
