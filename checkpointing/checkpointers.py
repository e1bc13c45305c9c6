"""The checkpointers: torchtune's ``FullModel*Checkpointer`` classes, for three formats.

A checkpointer reads a model from ``checkpoint_dir`` and writes checkpoints into ``output_dir``, in
the format it read. State dicts use torchtune's keys: ``model`` (native weights), ``adapter``
(native adapter tensors), ``adapter_config``, and any others, which are the recipe state.
"""

import logging
from pathlib import Path
from typing import Any

from checkpointing.adapter_checkpoint import ADAPTER_NAME, repo_id_of, write_peft
from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.peft import PeftAdapter, check_form, to_peft
from checkpointing.errors import ConfigError
from checkpointing.families import FAMILIES
from checkpointing.formats import HFFormat, MetaFormat, TuneFormat
from checkpointing.formats.base import CheckpointFiles, native_layout
from checkpointing.formats.hf import config_for_weights
from checkpointing.formats.hf_config import CONFIG_NAME
from checkpointing.full_model import FullModelCheckpointer
from checkpointing.mapping.tensors import TensorSource
from checkpointing.retention import Retention
from checkpointing.save_plan import SavePlan
from checkpointing.storage.writer import CheckpointWriter

logger = logging.getLogger(__name__)

MERGED_DIR = "merged"
_MODEL_CONFIGS = (CONFIG_NAME, "generation_config.json")


class FullModelHFCheckpointer(FullModelCheckpointer):
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
        adapter_checkpoint: PEFT adapter directory or native adapter file to start from; by
            default the resumed one.
        recipe_checkpoint: recipe state file; by default the resumed one.
        resume_from_checkpoint: older name of ``should_load_recipe_state``.
        safe_serialization: write safetensors rather than ``.bin`` files.
        should_load_recipe_state: resume from the newest complete checkpoint in ``output_dir``, or
            from the directory that is given instead of ``True``.
        keep_last_n_checkpoints: remove this run's older checkpoints after a save.
        enable_dcp: must be false; a model in shards needs nothing of the kind.
        max_shard_size: largest weight file, such as ``"5GB"`` or a number of bytes.
        adapter_form: ``"portable"`` writes adapters as inference engines read them, with one rank
            and scale for all modules; ``"exact"`` with the ranks and scales that they have.
        retention: which checkpoints to keep, where it is not the last n.

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
        adapter_form: str = "portable",
        retention: Retention | None = None,
    ) -> None:
        check_form(adapter_form)
        self._adapter_form = adapter_form
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
            retention,
        )

    @property
    def repo_id(self) -> str | None:
        """The Hub repository that the base was downloaded from, if the download noted it."""
        return repo_id_of(self._checkpoint_dir)

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
        if not layout.family.in_peft:
            logger.warning(
                "adapters of %s models are not written for PEFT, only as %s; the merged model has "
                "the adapter in it",
                layout.family.name,
                ADAPTER_NAME,
            )
            return None
        base_model = self.repo_id or str(self._checkpoint_dir.resolve())
        return to_peft(adapter, config, layout, base_model, self._adapter_form, self._base.native)

    def _write(self, writer: CheckpointWriter, plan: SavePlan, max_bytes: int | None) -> None:
        is_adapter = plan.adapter is not None
        if plan.model is not None:
            into = writer.within(MERGED_DIR) if is_adapter else writer
            self._write_model(into, plan.model, max_bytes)
            config = config_for_weights(
                self._checkpoint_dir / CONFIG_NAME,
                plan.model,
                FAMILIES[self.model_config.family],
                self._format.name,
            )
            into.text(CONFIG_NAME, config)
            self._copy_side_files(into, leaving_out=[CONFIG_NAME])
        self._write_state(writer, plan)
        if is_adapter:
            self._copy_side_files(writer, leaving_out=_MODEL_CONFIGS)
        if plan.peft is not None:
            for note in plan.peft.notes:
                logger.warning("%s", note)
            write_peft(writer, plan.peft, self._safe_serialization)


class _OneLayoutCheckpointer(FullModelCheckpointer):
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
        *,
        retention: Retention | None = None,
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
            retention=retention,
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
        adapter_checkpoint: PEFT adapter directory or native adapter file to start from; by
            default the resumed one.
        recipe_checkpoint: recipe state file; by default the resumed one.
        resume_from_checkpoint: older name of ``should_load_recipe_state``.
        should_load_recipe_state: resume from the newest complete checkpoint in ``output_dir``, or
            from the directory that is given instead of ``True``.
        keep_last_n_checkpoints: remove this run's older checkpoints after a save.
        enable_dcp: must be false; a model in shards needs nothing of the kind.
        retention: which checkpoints to keep, where it is not the last n.

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
        adapter_checkpoint: PEFT adapter directory or native adapter file to start from; by
            default the resumed one.
        recipe_checkpoint: recipe state file; by default the resumed one.
        resume_from_checkpoint: older name of ``should_load_recipe_state``.
        should_load_recipe_state: resume from the newest complete checkpoint in ``output_dir``, or
            from the directory that is given instead of ``True``.
        keep_last_n_checkpoints: remove this run's older checkpoints after a save.
        enable_dcp: must be false; a model in shards needs nothing of the kind.
        retention: which checkpoints to keep, where it is not the last n.

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
