"""The checkpointers: torchtune's ``FullModel*Checkpointer`` classes, for three formats.

A checkpointer reads a model from ``checkpoint_dir`` and writes checkpoints into ``output_dir``, in
the format it read. State dicts use torchtune's keys: ``model`` (native weights), ``adapter``
(native adapter tensors), ``adapter_config``, and any others, which are the recipe state.
"""

import json
import logging
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import check_adapter, config_of_tensors, linear_shapes
from checkpointing.adapters.peft import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PEFT_WEIGHTS_TORCH,
    PeftAdapter,
    to_peft,
)
from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.formats import Format, HFFormat, MetaFormat, OpenModel, TuneFormat, WriteOptions
from checkpointing.formats.base import CheckpointFiles, native_layout
from checkpointing.formats.hf import config_for_weights
from checkpointing.formats.hf_config import CONFIG_NAME
from checkpointing.formats.tune import missing_config
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.tensors import TensorSource, as_source
from checkpointing.progress import bytes_progress
from checkpointing.resume import (
    RECIPE_STATE_NAME,
    SavedCheckpoint,
    check_recipe_state,
    checkpoint_to_resume,
    load_recipe_state,
    remove_old_checkpoints,
)
from checkpointing.storage.commit import check_room, recover, staged_directory
from checkpointing.storage.fingerprint import fingerprint
from checkpointing.storage.manifest import read_manifest, write_manifest
from checkpointing.storage.paths import is_within
from checkpointing.storage.read import open_tensor_file, read_json
from checkpointing.storage.side_files import side_files
from checkpointing.storage.write import Progress, parse_size, write_safetensors, write_torch_file

logger = logging.getLogger(__name__)

ADAPTER_NAME = "adapter_model.pt"
MERGED_DIR = "merged"
REPO_ID_NAME = "original_repo_id.json"

MODEL_KEY = "model"
ADAPTER_KEY = "adapter"
ADAPTER_CONFIG_KEY = "adapter_config"


@dataclass(frozen=True)
class _SavePlan:
    """All that a save will write, checked."""

    model: TensorSource | None
    adapter: TensorSource | None
    adapter_config: AdapterConfig | None
    peft: PeftAdapter | None
    recipe_state: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        peft = None if self.peft is None else self.peft.tensors
        sources = [source for source in (self.model, self.adapter, peft) if source is not None]
        in_sources = sum(meta.nbytes for source in sources for meta in source.metas.values())
        return in_sources + _tensor_bytes(self.recipe_state)


class _FullModelCheckpointer:
    """What the checkpointers of all formats have in common."""

    _format: ClassVar[Format]

    def __init__(
        self,
        checkpoint_dir: str | Path,
        checkpoint_files: CheckpointFiles,
        model_type: str | None,
        output_dir: str | Path | None,
        adapter_checkpoint: str | Path | None,
        recipe_checkpoint: str | Path | None,
        resume: bool | str | Path,
        keep_last_n_checkpoints: int | None,
        enable_dcp: bool,
        safe_serialization: bool,
        max_shard_size: str | int | None,
    ) -> None:
        self._checkpoint_dir = Path(checkpoint_dir)
        self._output_dir = None if output_dir is None else Path(output_dir)
        self._model_type = getattr(model_type, "name", model_type)
        self._safe_serialization = safe_serialization
        self._max_shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
        self._keep_last_n = keep_last_n_checkpoints
        if enable_dcp:
            raise ConfigError("enable_dcp: distributed checkpoints are not supported yet; leave it")
        if keep_last_n_checkpoints is not None and keep_last_n_checkpoints < 1:
            raise ConfigError(
                f"keep_last_n_checkpoints: {keep_last_n_checkpoints} would keep nothing; "
                "give 1 or more, or leave it out to keep all"
            )
        self._check_directories()
        self._files = self._format.find_files(self._checkpoint_dir, checkpoint_files)
        self._resumed: SavedCheckpoint | None = None
        if self._output_dir is not None:
            recover(self._output_dir)
        if resume:
            directory = self._output_dir or self._checkpoint_dir
            self._locate_resumed(directory, resume, recipe_checkpoint)
        self._adapter_file = self._locate(adapter_checkpoint, ADAPTER_NAME)
        self._recipe_file = self._locate(recipe_checkpoint, RECIPE_STATE_NAME) if resume else None
        self._run_id = (
            self._resumed.manifest["run_id"] if self._resumed is not None else uuid.uuid4().hex
        )

    def _check_directories(self) -> None:
        if not self._checkpoint_dir.is_dir():
            raise CheckpointNotFoundError(
                f"checkpoint_dir: {self._checkpoint_dir} is no directory; "
                "download the model first, or correct the path"
            )
        output = self._output_dir
        if output is None:
            return
        if is_within(output, self._checkpoint_dir) or is_within(self._checkpoint_dir, output):
            raise ConfigError(
                f"output_dir {output} and checkpoint_dir {self._checkpoint_dir} lie in each other; "
                "choose an output_dir elsewhere, so that no save can overwrite what was loaded"
            )

    def _locate_resumed(
        self, directory: Path, resume: bool | str | Path, recipe_checkpoint: str | Path | None
    ) -> None:
        try:
            self._resumed = checkpoint_to_resume(directory, resume)
        except CheckpointNotFoundError:
            # torchtune's own checkpoints have no manifest; its users name the files.
            if recipe_checkpoint is None or str(recipe_checkpoint) == RECIPE_STATE_NAME:
                raise
        else:
            logger.info("resuming from %s", self._resumed.directory)

    def _locate(self, named: str | Path | None, default: str) -> Path | None:
        """A file that the user names, or the resumed checkpoint's own."""
        if named is None or str(named) == default:
            if self._resumed is None:
                return None
            path = self._resumed.directory / default
            return path if path.is_file() else None
        candidates = [Path(named)]
        if self._output_dir is not None:
            candidates.insert(0, self._output_dir / named)
        for path in candidates:
            if path.is_file():
                return path
        raise CheckpointNotFoundError(
            f"{named}: no such file, neither by itself nor in output_dir {self._output_dir}"
        )

    @property
    def model_config(self) -> ModelConfig:
        """What the model's own config file says, which is all that is needed to build it.

        Raises:
            ConfigError: if there is no config file, or one that is wrong.
            TensorMismatchError: if the weights are not those of such a model.
        """
        config = self._base.config
        if config is None:
            raise missing_config(self._checkpoint_dir)
        return config

    @cached_property
    def _base(self) -> OpenModel:
        return self._format.open(self._checkpoint_dir, self._files, self._model_type)

    @cached_property
    def _base_fingerprint(self) -> str:
        return fingerprint(self._base.native)

    def load_checkpoint(self) -> dict[str, Any]:
        """Loads the model, and when resuming all that the newest complete checkpoint holds.

        An adapter run resumes from its base and its adapter, never from merged weights.

        Returns:
            ``model``: the native weights, of the dtypes in the files; they may be views of a
            memory map of these. ``adapter`` and ``adapter_config``: if there is an adapter.
            When resuming also the recipe state's keys.

        Raises:
            CheckpointNotFoundError: if a file is missing.
            CorruptCheckpointError: if a file is damaged.
            TensorMismatchError: lists all tensors that do not fit the model or the adapter.
            ConfigError: if a config file is wrong, or the adapter was trained on another base.
        """
        state: dict[str, Any] = {}
        model = self._base
        if self._resumed is not None and self._adapter_file is None:
            directory = self._resumed.directory
            files = self._format.find_files(directory, None)
            model = self._format.open(directory, files, self._model_type)
        total = sum(meta.nbytes for meta in model.native.metas.values())
        weights: dict[str, Tensor] = {}
        with bytes_progress("loading", total) as progress:
            for name, meta in model.native.metas.items():
                weights[name] = model.native.read(name)
                progress(meta.nbytes)
        state[MODEL_KEY] = weights
        if self._adapter_file is not None:
            state.update(self._load_adapter(self._adapter_file))
        if self._recipe_file is not None:
            state.update(load_recipe_state(self._recipe_file))
        return state

    def _load_adapter(self, path: Path) -> dict[str, Any]:
        adapter = open_tensor_file(path)
        manifest = read_manifest(path.parent) or {}
        saved_config = manifest.get(ADAPTER_CONFIG_KEY)
        config = (
            config_of_tensors(adapter.metas)
            if saved_config is None
            else AdapterConfig.from_state(saved_config)
        )
        check_adapter(adapter.metas, config, linear_shapes(self._base.native.metas), str(path))
        trained_on = manifest.get("base", {})
        if trained_on.get("fingerprint", self._base_fingerprint) != self._base_fingerprint:
            raise ConfigError(
                f"{path}: was trained on another base, {trained_on.get('directory')}, whose "
                f"weights differ from those in {self._checkpoint_dir}; set checkpoint_dir to it"
            )
        state: dict[str, Any] = {ADAPTER_KEY: {name: adapter.read(name) for name in adapter.metas}}
        if saved_config is not None:
            state[ADAPTER_CONFIG_KEY] = saved_config
        return state

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        max_shard_size: str | int | None = None,
        dir_prefix: str = "epoch",
    ) -> Path:
        """Saves a checkpoint, which exists with all its files or not at all.

        Everything that can be wrong is found before anything is written. Neither the state dict
        nor its tensors are changed.

        Args:
            state_dict: ``model``, the full native weights, merged if there is an adapter (a
                :class:`~checkpointing.adapters.MergedStateDict` merges while it is written);
                ``adapter`` and ``adapter_config``; all other keys are the recipe state.
            epoch: number of the epoch, counted from 0.
            intermediate_checkpoint: training goes on after this checkpoint. The recipe state is
                saved in either case, so that epochs can be added.
            adapter_only: write no model weights.
            step: number of optimizer steps so far; decides which checkpoint is the newest.
            max_shard_size: largest weight file, such as ``"5GB"``; the constructor's if not given.
            dir_prefix: ``"epoch"`` saves to ``epoch_{epoch}``, ``"step"`` to ``step_{step}``.

        Returns:
            The checkpoint's directory.

        Raises:
            ConfigError: if a key is missing or wrong.
            TensorMismatchError: lists all tensors that do not belong to the model or adapter.
            OutOfSpaceError: if the disk has no room.
        """
        if self._output_dir is None:
            raise ConfigError("output_dir: not given, so there is nowhere to save to")
        final = self._output_dir / _directory_name(dir_prefix, epoch, step)
        plan = self._plan_save(state_dict, adapter_only)
        check_room(self._output_dir, plan.nbytes)
        max_bytes = self._max_shard_bytes if max_shard_size is None else parse_size(max_shard_size)
        with (
            bytes_progress(f"saving {final.name}", plan.nbytes) as progress,
            staged_directory(final) as staging,
        ):
            self._write(staging, plan, max_bytes, progress)
            write_manifest(staging, self._manifest(plan, epoch, step, state_dict))
        logger.info("saved %s", final)
        if self._keep_last_n is not None:
            remove_old_checkpoints(self._output_dir, self._keep_last_n, self._run_id, final)
        return final

    def _plan_save(self, state_dict: Mapping[str, Any], adapter_only: bool) -> _SavePlan:
        for key, needed in ((ADAPTER_KEY, adapter_only), (MODEL_KEY, not adapter_only)):
            if needed and key not in state_dict:
                raise ConfigError(
                    f"state_dict: has no {key!r}, which adapter_only={adapter_only} needs; "
                    f"it has {', '.join(map(repr, state_dict))}"
                )
        model = None
        if not adapter_only:
            model = self._format.plan(as_source(state_dict[MODEL_KEY]), self._base)
        adapter = adapter_config = None
        if ADAPTER_KEY in state_dict:
            adapter = as_source(state_dict[ADAPTER_KEY])
            adapter_config = _adapter_config(state_dict, adapter)
            check_adapter(
                adapter.metas,
                adapter_config or config_of_tensors(adapter.metas),
                linear_shapes(self._base.native.metas),
                "saving an adapter",
            )
        recipe_state = {
            key: value
            for key, value in state_dict.items()
            if key not in (MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG_KEY)
        }
        check_recipe_state(recipe_state)
        peft = self._plan_peft(adapter, adapter_config)
        return _SavePlan(model, adapter, adapter_config, peft, recipe_state)

    def _plan_peft(
        self, adapter: TensorSource | None, config: AdapterConfig | None
    ) -> PeftAdapter | None:
        """The adapter in PEFT's form, for formats that store it so."""
        return None

    def _write(
        self, directory: Path, plan: _SavePlan, max_bytes: int | None, progress: Progress
    ) -> None:
        if plan.model is not None:
            self._write_model(directory, plan.model, max_bytes, progress)
        if plan.adapter is not None:
            names = list(plan.adapter.metas)
            write_torch_file(directory / ADAPTER_NAME, plan.adapter, names, progress)
        if plan.recipe_state:
            torch.save(dict(plan.recipe_state), directory / RECIPE_STATE_NAME)
        for path in side_files(self._checkpoint_dir):
            shutil.copyfile(path, directory / path.name)

    def _write_model(
        self, directory: Path, model: TensorSource, max_bytes: int | None, progress: Progress
    ) -> None:
        options = WriteOptions(self._safe_serialization, max_bytes, progress)
        self._format.write(directory, model, self._base, options)

    def _manifest(
        self, plan: _SavePlan, epoch: int, step: int | None, state_dict: Mapping[str, Any]
    ) -> dict[str, Any]:
        config = self._base.config
        facts: dict[str, Any] = {
            "format": self._format.name,
            "family": None if config is None else config.family,
            "epoch": epoch,
            "step": state_dict.get("steps_run") if step is None else step,
            "run_id": self._run_id,
            "saved_at_ns": time.time_ns(),
        }
        if plan.adapter is not None:
            facts["base"] = {
                "directory": str(self._checkpoint_dir.resolve()),
                "fingerprint": self._base_fingerprint,
            }
        if plan.adapter_config is not None:
            facts[ADAPTER_CONFIG_KEY] = plan.adapter_config.to_state()
        return facts


class FullModelHFCheckpointer(_FullModelCheckpointer):
    """Reads and writes the format of transformers, and adapters as PEFT reads them.

    A checkpoint without an adapter is a directory that ``from_pretrained`` loads. A checkpoint
    with one is a PEFT adapter directory, and the merged model is its subdirectory ``merged``:
    transformers, where PEFT is installed, adds an adapter that it finds beside ``config.json`` to
    the weights beside it, so merged weights there would get their adapter twice.

    Args:
        checkpoint_dir: directory of the base, with ``config.json``.
        checkpoint_files: names of the weight files in any order, or ``{"filename_format",
            "max_filename"}``; by default those of the index, or the single file that there is.
        model_type: torchtune's ModelType name; only needed if ``config.json`` names none.
        output_dir: where checkpoints are saved.
        adapter_checkpoint: native adapter file to start from; by default the resumed one.
        recipe_checkpoint: recipe state file; by default the resumed one.
        resume_from_checkpoint: older name of ``should_load_recipe_state``.
        safe_serialization: write safetensors rather than ``.bin`` files.
        should_load_recipe_state: resume from the newest complete checkpoint in ``output_dir``, or
            from the directory that is given instead of ``True``.
        keep_last_n_checkpoints: remove this run's older checkpoints after a save.
        enable_dcp: not supported.
        max_shard_size: largest weight file, such as ``"5GB"`` or a number of bytes.

    Raises:
        CheckpointNotFoundError: if a directory or file is missing.
        ConfigError: if an argument is wrong.
    """

    _format = HFFormat()

    def __init__(
        self,
        checkpoint_dir: str | Path,
        checkpoint_files: CheckpointFiles = None,
        model_type: str | None = None,
        output_dir: str | Path | None = None,
        adapter_checkpoint: str | Path | None = None,
        recipe_checkpoint: str | Path | None = None,
        resume_from_checkpoint: bool | str = False,
        safe_serialization: bool = True,
        should_load_recipe_state: bool | str = False,
        keep_last_n_checkpoints: int | None = None,
        enable_dcp: bool = False,
        *,
        max_shard_size: str | int = "5GB",
    ) -> None:
        super().__init__(
            checkpoint_dir,
            checkpoint_files,
            model_type,
            output_dir,
            adapter_checkpoint,
            recipe_checkpoint,
            should_load_recipe_state or resume_from_checkpoint,
            keep_last_n_checkpoints,
            enable_dcp,
            safe_serialization,
            max_shard_size,
        )

    @property
    def repo_id(self) -> str | None:
        """The Hub repository that the base was downloaded from, if the download noted it."""
        path = self._checkpoint_dir / REPO_ID_NAME
        return read_json(path).get("repo_id") if path.is_file() else None

    def _plan_peft(
        self, adapter: TensorSource | None, config: AdapterConfig | None
    ) -> PeftAdapter | None:
        if adapter is None:
            return None
        if config is None:
            logger.warning(
                "state_dict has an 'adapter' but no 'adapter_config': only %s is written, since "
                "PEFT needs the rank and alpha",
                ADAPTER_NAME,
            )
            return None
        layout = native_layout(self._base.native, self._base, self._format.name)
        base_model = self.repo_id or str(self._checkpoint_dir.resolve())
        return to_peft(adapter, config, layout, base_model)

    def _write(
        self, directory: Path, plan: _SavePlan, max_bytes: int | None, progress: Progress
    ) -> None:
        super()._write(directory, replace(plan, model=None), max_bytes, progress)
        model_dir = directory
        if plan.adapter is not None:
            for name in _MODEL_CONFIGS:
                (directory / name).unlink(missing_ok=True)
            model_dir = directory / MERGED_DIR
        if plan.model is not None:
            model_dir.mkdir(exist_ok=True)
            for path in side_files(self._checkpoint_dir):
                shutil.copyfile(path, model_dir / path.name)
            config = config_for_weights(self._checkpoint_dir / CONFIG_NAME, plan.model)
            (model_dir / CONFIG_NAME).write_text(config, encoding="utf-8")
            self._write_model(model_dir, plan.model, max_bytes, progress)
        if plan.peft is not None:
            self._write_peft(directory, plan.peft, progress)

    def _write_peft(self, directory: Path, peft: PeftAdapter, progress: Progress) -> None:
        names = list(peft.tensors.metas)
        if self._safe_serialization:
            write_safetensors(directory / PEFT_WEIGHTS, peft.tensors, names, progress)
        else:
            write_torch_file(directory / PEFT_WEIGHTS_TORCH, peft.tensors, names, progress)
        text = json.dumps(peft.config, indent=2) + "\n"
        (directory / PEFT_CONFIG).write_text(text, encoding="utf-8")


_MODEL_CONFIGS = (CONFIG_NAME, "generation_config.json")


class _OneLayoutCheckpointer(_FullModelCheckpointer):
    """The signature that torchtune's Meta and TorchTune checkpointers share."""

    def __init__(
        self,
        checkpoint_dir: str | Path,
        checkpoint_files: CheckpointFiles = None,
        model_type: str | None = None,
        output_dir: str | Path | None = None,
        adapter_checkpoint: str | Path | None = None,
        recipe_checkpoint: str | Path | None = None,
        resume_from_checkpoint: bool | str = False,
        should_load_recipe_state: bool | str = False,
        keep_last_n_checkpoints: int | None = None,
        enable_dcp: bool = False,
    ) -> None:
        super().__init__(
            checkpoint_dir,
            checkpoint_files,
            model_type,
            output_dir,
            adapter_checkpoint,
            recipe_checkpoint,
            should_load_recipe_state or resume_from_checkpoint,
            keep_last_n_checkpoints,
            enable_dcp,
            safe_serialization=False,
            max_shard_size=None,
        )


class FullModelMetaCheckpointer(_OneLayoutCheckpointer):
    """Reads and writes Meta's format: ``params.json`` and ``consolidated.NN.pth``.

    A model that came as several model-parallel shards is saved as the same number of them.

    Args:
        checkpoint_dir: directory of the base, with ``params.json``.
        checkpoint_files: names of the weight files; by default every ``consolidated.NN.pth``.
        model_type: torchtune's ModelType name. ``LLAMA3_2`` tells the RoPE scaling of Llama 3.2,
            which ``params.json`` leaves out.
        output_dir: where checkpoints are saved.
        adapter_checkpoint: native adapter file to start from; by default the resumed one.
        recipe_checkpoint: recipe state file; by default the resumed one.
        resume_from_checkpoint: older name of ``should_load_recipe_state``.
        should_load_recipe_state: resume from the newest complete checkpoint in ``output_dir``, or
            from the directory that is given instead of ``True``.
        keep_last_n_checkpoints: remove this run's older checkpoints after a save.
        enable_dcp: not supported.

    Raises:
        CheckpointNotFoundError: if a directory or file is missing.
        ConfigError: if an argument is wrong.
    """

    _format = MetaFormat()


class FullModelTorchTuneCheckpointer(_OneLayoutCheckpointer):
    """Reads and writes native weights as they are, in ``.bin``, ``.pt`` or safetensors files.

    If ``config.json`` or ``params.json`` lies beside them, the weights are checked against it; it
    is needed to build the model from.

    Args:
        checkpoint_dir: directory of the base.
        checkpoint_files: names of the weight files; by default all that there are.
        model_type: torchtune's ModelType name; only needed if ``config.json`` names none.
        output_dir: where checkpoints are saved.
        adapter_checkpoint: native adapter file to start from; by default the resumed one.
        recipe_checkpoint: recipe state file; by default the resumed one.
        resume_from_checkpoint: older name of ``should_load_recipe_state``.
        should_load_recipe_state: resume from the newest complete checkpoint in ``output_dir``, or
            from the directory that is given instead of ``True``.
        keep_last_n_checkpoints: remove this run's older checkpoints after a save.
        enable_dcp: not supported.

    Raises:
        CheckpointNotFoundError: if a directory or file is missing.
        ConfigError: if an argument is wrong.
    """

    _format = TuneFormat()

    def load_checkpoint(self, weights_only: bool = True) -> dict[str, Any]:
        """As the other checkpointers' method.

        Args:
            weights_only: must be true; files that need to run code are not loaded.
        """
        if not weights_only:
            raise ConfigError("weights_only: must be True, no code in a checkpoint is ever run")
        return super().load_checkpoint()


def _directory_name(prefix: str, epoch: int, step: int | None) -> str:
    numbers = {"epoch": epoch, "step": step}
    number = numbers.get(prefix)
    if number is None:
        raise ConfigError(
            f"dir_prefix {prefix!r} with step={step}: give 'epoch', or 'step' and the step's number"
        )
    return f"{prefix}_{number}"


def _adapter_config(state_dict: Mapping[str, Any], adapter: TensorSource) -> AdapterConfig | None:
    state = state_dict.get(ADAPTER_CONFIG_KEY)
    if state is None:
        return None
    config = AdapterConfig.from_state(state)
    if "use_dora" not in state:
        # torchtune's config does not say it; its tensors do.
        config = replace(config, use_dora=config_of_tensors(adapter.metas).use_dora)
    return config


def _tensor_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0
