"""The adapter of a directory: of a checkpoint as `tune run` writes it, or of PEFT."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import check_adapter, config_of_tensors
from checkpointing.adapters.peft import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PEFT_WEIGHTS_TORCH,
    PeftAdapter,
)
from checkpointing.adapters.peft_config_in import parse_peft_config
from checkpointing.adapters.peft_in import peft_weights, read_peft
from checkpointing.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from checkpointing.formats.base import OpenModel, native_layout
from checkpointing.mapping.tensors import TensorSource, shapes_of
from checkpointing.nf4 import QUANTIZED_BASE_KEY, NF4Rounding
from checkpointing.save_plan import ADAPTER_CONFIG_KEY
from checkpointing.storage.fingerprint import fingerprint
from checkpointing.storage.manifest import MANIFEST_NAME, read_manifest
from checkpointing.storage.paths import path_named
from checkpointing.storage.read import open_tensor_file, read_json
from checkpointing.storage.writer import CheckpointWriter

ADAPTER_NAME = "adapter_model.pt"
REPO_ID_NAME = "original_repo_id.json"


@dataclass(frozen=True)
class AdapterCheckpoint:
    """An adapter on disk of which the headers have been read.

    Attributes:
        path: its native file, or PEFT's directory.
        tensors: its native tensors.
        told_config: its hyper-parameters, or ``None`` if nothing tells them.
        manifest: what the checkpoint says of itself.
    """

    path: Path
    tensors: TensorSource
    told_config: AdapterConfig | None
    manifest: Mapping[str, Any]

    @property
    def config(self) -> AdapterConfig:
        """Its hyper-parameters.

        Raises:
            ConfigError: if nothing tells them.
        """
        if self.told_config is None:
            raise ConfigError(
                f"{self.path}: has neither a {MANIFEST_NAME} nor an {PEFT_CONFIG} beside it that "
                "tells the adapter's rank and alpha, which the tensors do not show"
            )
        return self.told_config

    @property
    def is_peft(self) -> bool:
        """It is a directory of PEFT's."""
        return self.path.is_dir()

    @property
    def base_directory(self) -> Path | None:
        """Where the base lay when the adapter was trained; for PEFT's perhaps a repository."""
        return path_named(self.manifest.get("base", {}).get("directory"))

    @property
    def base_rounding(self) -> NF4Rounding | None:
        """How the base was rounded when the adapter was trained, as far as its manifest says."""
        state = self.manifest.get("base", {}).get(QUANTIZED_BASE_KEY)
        return None if state is None else NF4Rounding.from_state(state)

    def check_base(self, base: TensorSource, where: Path) -> None:
        """Checks that a model is the one that the adapter was trained on.

        Args:
            base: the model's native tensors.
            where: its directory, for errors.

        Raises:
            TensorMismatchError: lists every tensor of the adapter that does not fit.
            ConfigError: if it is another model of the same shape.
        """
        config = self.told_config or config_of_tensors(self.tensors.metas)
        check_adapter(self.tensors.metas, config, shapes_of(base), str(self.path))
        expected = self.manifest.get("base", {}).get("fingerprint")
        if expected is not None and expected != fingerprint(base):
            raise ConfigError(
                f"{self.path}: was trained on another base, {self.base_directory}, whose weights "
                f"differ from those in {where}; give that base as checkpoint_dir"
            )


def repo_id_of(directory: Path) -> str | None:
    """The Hub repository that a model was downloaded from, if the download noted it."""
    path = directory / REPO_ID_NAME
    return read_json(path).get("repo_id") if path.is_file() else None


def write_peft(
    writer: CheckpointWriter, peft: PeftAdapter, safe_serialization: bool = True
) -> None:
    """Writes a PEFT adapter.

    Args:
        writer: where to.
        peft: from :func:`checkpointing.adapters.peft.to_peft`.
        safe_serialization: safetensors rather than a ``.bin`` file.
    """
    writer.tensors(PEFT_WEIGHTS if safe_serialization else PEFT_WEIGHTS_TORCH, peft.tensors)
    writer.text(PEFT_CONFIG, json.dumps(peft.config, indent=2) + "\n")


def has_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, native or PEFT's."""
    return (directory / ADAPTER_NAME).is_file() or (directory / PEFT_CONFIG).is_file()


def find_adapter(path: Path) -> Path:
    """The native adapter file, or the PEFT directory, that a path leads to.

    Raises:
        CheckpointNotFoundError: if there is none.
    """
    if path.name in (PEFT_WEIGHTS, PEFT_WEIGHTS_TORCH) and (path.parent / PEFT_CONFIG).is_file():
        path = path.parent
    if path.is_file():
        return path
    native, is_peft = path / ADAPTER_NAME, (path / PEFT_CONFIG).is_file()
    # Without a manifest the alpha of a native adapter is not known; PEFT's config has it.
    if native.is_file() and ((path / MANIFEST_NAME).is_file() or not is_peft):
        return native
    if is_peft:
        return path
    raise CheckpointNotFoundError(
        f"{path}: holds neither {ADAPTER_NAME} nor {PEFT_CONFIG}; give the directory of an "
        "adapter run's checkpoint, such as epoch_0, a PEFT adapter, or a native adapter file"
    )


def open_adapter(path: Path, base: OpenModel | None = None) -> AdapterCheckpoint:
    """Reads the headers of an adapter.

    Args:
        path: a native adapter file, a checkpoint that holds one, or a PEFT adapter directory.
        base: the adapter's base. Without it the tensors and targets of a PEFT adapter keep
            PEFT's names.

    Raises:
        CheckpointNotFoundError: if there is none.
        ConfigError: if it is of a kind that is not supported.
        TensorMismatchError: lists every tensor of a PEFT adapter that does not fit the base.
        CorruptCheckpointError: if a file is damaged.
    """
    path = find_adapter(path)
    return _open_peft(path, base) if path.is_dir() else _open_native(path)


def _open_native(path: Path) -> AdapterCheckpoint:
    manifest = read_manifest(path.parent) or {}
    said_by = path.parent / MANIFEST_NAME
    if not isinstance(manifest.get("base", {}), dict):
        raise CorruptCheckpointError(f"{said_by}: says nothing of the base; the file is damaged")
    state = manifest.get(ADAPTER_CONFIG_KEY)
    try:
        config = None if state is None else AdapterConfig.from_state(state)
    except ConfigError as error:
        raise ConfigError(f"{said_by}: {error}") from error
    return AdapterCheckpoint(path, open_tensor_file(path), config, manifest)


def _open_peft(directory: Path, base: OpenModel | None) -> AdapterCheckpoint:
    raw = read_json(directory / PEFT_CONFIG)
    facts = {"base": {"directory": raw.get("base_model_name_or_path")}}
    if base is not None:
        layout = native_layout(base.native, base, "hf")
        return AdapterCheckpoint(directory, *read_peft(directory, layout, base.native), facts)
    settings = parse_peft_config(raw, str(directory / PEFT_CONFIG))
    targets = raw.get("target_modules") or ()
    config = AdapterConfig(
        r=settings.r,
        alpha=settings.alpha,
        target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
        use_dora=bool(settings.use_dora),
        use_rslora=settings.use_rslora,
        modules_to_save=settings.modules_to_save,
        lora_bias=bool(settings.lora_bias),
    )
    return AdapterCheckpoint(directory, open_tensor_file(peft_weights(directory)), config, facts)
