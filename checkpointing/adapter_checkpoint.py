"""The adapter of a directory: of a checkpoint as `tune run` writes it, PEFT's or Megatron's."""

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
from checkpointing.formats.megatron_adapter import (
    adapter_files,
    is_megatron_adapter,
    read_megatron_adapter,
    stored_adapter,
)
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
        path: its native file, or PEFT's or Megatron's directory.
        tensors: its native tensors.
        told_config: its hyper-parameters, or ``None`` if nothing tells them.
        manifest: what the checkpoint says of itself.
        format: ``"tune"``, ``"peft"`` or ``"megatron"``.
    """

    path: Path
    tensors: TensorSource
    told_config: AdapterConfig | None
    manifest: Mapping[str, Any]
    format: str = "tune"

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
    def directory(self) -> Path:
        """Where it lies."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def files(self) -> list[Path]:
        """What it is read from."""
        if self.format == "megatron":
            return adapter_files(self.path)
        if self.format == "peft":
            return [self.path / PEFT_CONFIG, peft_weights(self.path)]
        manifest = self.directory / MANIFEST_NAME
        return [self.path, *([manifest] if manifest.is_file() else [])]

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
    """Whether a directory holds an adapter, native, PEFT's or Megatron's."""
    names = (ADAPTER_NAME, PEFT_CONFIG)
    return any((directory / name).is_file() for name in names) or is_megatron_adapter(directory)


def find_adapter(path: Path) -> Path:
    """The native adapter file, or PEFT's or Megatron's directory, that a path leads to.

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
    if is_peft or is_megatron_adapter(path):
        return path
    raise CheckpointNotFoundError(
        f"{path}: holds neither {ADAPTER_NAME} nor {PEFT_CONFIG}; give the directory of an "
        "adapter run's checkpoint, such as epoch_0, a PEFT adapter, or a native adapter file"
    )


def open_adapter(path: Path, base: OpenModel | None = None) -> AdapterCheckpoint:
    """Reads the headers of an adapter.

    Args:
        path: a native adapter file, a checkpoint that holds one, or a directory of PEFT's or
            Megatron's.
        base: the adapter's base. Without it the tensors and targets of an adapter that is not
            native keep their names, and of Megatron's there are those of the first rank.

    Raises:
        CheckpointNotFoundError: if there is none.
        ConfigError: if it is of a kind that is not supported.
        TensorMismatchError: lists every tensor of a PEFT adapter that does not fit the base.
        CorruptCheckpointError: if a file is damaged.
    """
    path = find_adapter(path)
    if not path.is_dir():
        return _open_native(path)
    is_peft = (path / PEFT_CONFIG).is_file()
    return _open_peft(path, base) if is_peft else _open_megatron(path, base)


def _open_native(path: Path) -> AdapterCheckpoint:
    manifest = _manifest_in(path.parent)
    said_by = path.parent / MANIFEST_NAME
    state = manifest.get(ADAPTER_CONFIG_KEY)
    try:
        config = None if state is None else AdapterConfig.from_state(state)
    except ConfigError as error:
        raise ConfigError(f"{said_by}: {error}") from error
    return AdapterCheckpoint(path, open_tensor_file(path), config, manifest)


def _manifest_in(directory: Path) -> Mapping[str, Any]:
    manifest = read_manifest(directory) or {}
    if not isinstance(manifest.get("base", {}), dict):
        raise CorruptCheckpointError(
            f"{directory / MANIFEST_NAME}: says nothing of the base; the file is damaged"
        )
    return manifest


def _open_peft(directory: Path, base: OpenModel | None) -> AdapterCheckpoint:
    raw = read_json(directory / PEFT_CONFIG)
    facts = {"base": {"directory": raw.get("base_model_name_or_path")}}
    if base is not None:
        layout = native_layout(base.native, base, "hf")
        tensors, config = read_peft(directory, layout, base.native)
        return AdapterCheckpoint(directory, tensors, config, facts, "peft")
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
    stored = open_tensor_file(peft_weights(directory))
    return AdapterCheckpoint(directory, stored, config, facts, "peft")


def _open_megatron(directory: Path, base: OpenModel | None) -> AdapterCheckpoint:
    manifest = _manifest_in(directory)
    if base is not None:
        tensors, config = read_megatron_adapter(directory, base)
    else:
        tensors, settings = stored_adapter(directory)
        targets = settings.get("target_modules") or ()
        config = AdapterConfig(settings["dim"], settings["alpha"], tuple(map(str, targets)))
    return AdapterCheckpoint(directory, tensors, config, manifest, "megatron")
