"""What the checkpointers of all formats have in common: finding, loading and resuming."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from checkpointing.adapter_checkpoint import ADAPTER_NAME, find_adapter, open_adapter
from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.formats import Format, OpenModel
from checkpointing.formats.base import CheckpointFiles
from checkpointing.formats.tune import missing_config
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.tensors import TensorSource
from checkpointing.progress import bytes_progress
from checkpointing.remote_output import RemoteOutput
from checkpointing.resume import (
    RECIPE_STATE_NAME,
    SavedCheckpoint,
    checkpoint_to_resume,
    load_recipe_state,
)
from checkpointing.retention import (
    Retention,
    retention_of,
)
from checkpointing.save_plan import (
    ADAPTER_CONFIG_KEY,
    ADAPTER_KEY,
    MODEL_KEY,
)
from checkpointing.sharded import ranks_that_load
from checkpointing.storage.commit import recover
from checkpointing.storage.fingerprint import fingerprint
from checkpointing.storage.load import copy_into, load_all
from checkpointing.storage.location import is_remote, path_on_this_machine
from checkpointing.storage.manifest import MANIFEST_NAME
from checkpointing.storage.mirror import local
from checkpointing.storage.publish import lie_in_each_other
from checkpointing.storage.read_ahead import read_ahead
from checkpointing.storage.write import parse_size

logger = logging.getLogger(__name__)


class CheckpointLoader:
    """Finds what a run starts or goes on from, and loads it."""

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
        retention: Retention | None,
    ) -> None:
        if output_dir is not None and lie_in_each_other(checkpoint_dir, output_dir):
            raise ConfigError(
                f"output_dir {output_dir} and checkpoint_dir {checkpoint_dir} lie in each other; "
                "choose an output_dir elsewhere, so that no save can overwrite what was loaded"
            )
        self._remote = RemoteOutput(str(output_dir)) if is_remote(output_dir) else None
        self._output_dir = self._remote.directory if self._remote else _path(output_dir)
        self._checkpoint_dir = local(checkpoint_dir)
        self._model_type = getattr(model_type, "name", model_type)
        self._safe_serialization = safe_serialization
        self._max_shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
        self._retention = retention_of(keep_last_n_checkpoints, retention)
        if enable_dcp:
            raise ConfigError(
                "enable_dcp: leave it out: a model in shards is saved and loaded by all processes "
                "without it; files of torch.distributed.checkpoint are DistributedCheckpointer's"
            )
        self._check_checkpoint_dir()
        self._files = self._find_weights(checkpoint_files, bool(resume))
        self._resumed: SavedCheckpoint | None = None
        self._is_loaded = False
        if self._output_dir is not None:
            recover(self._output_dir)
        if resume:
            directory = self._output_dir or self._checkpoint_dir
            self._locate_resumed(directory, resume, recipe_checkpoint)
        self._adapter_path = self._locate_adapter(adapter_checkpoint)
        self._recipe_file = self._locate(recipe_checkpoint, RECIPE_STATE_NAME) if resume else None
        self._run_id = (
            self._resumed.manifest["run_id"] if self._resumed is not None else uuid.uuid4().hex
        )

    def _check_checkpoint_dir(self) -> None:
        if not self._checkpoint_dir.is_dir():
            raise CheckpointNotFoundError(
                f"checkpoint_dir: {self._checkpoint_dir} is no directory; "
                "download the model first, or correct the path"
            )

    def _find_weights(self, checkpoint_files: CheckpointFiles, resume: bool) -> list[Path]:
        try:
            return self._format.find_files(self._checkpoint_dir, checkpoint_files)
        except CheckpointNotFoundError:
            # Who resumes a full run of torchtune names its files in output_dir.
            if not resume or checkpoint_files is None or self._output_dir is None:
                raise
            return self._format.find_files(self._output_dir, checkpoint_files)

    def _locate_resumed(
        self, directory: Path, resume: bool | str | Path, recipe_checkpoint: str | Path | None
    ) -> None:
        if not isinstance(resume, bool):
            resume = local(resume)
        # Weights, adapter and recipe state must be of one checkpoint: a recipe state that is named
        # decides which. One without a manifest is torchtune's, whose users name the other files.
        named = self._locate(recipe_checkpoint, RECIPE_STATE_NAME)
        if named is not None and not (named.parent / MANIFEST_NAME).is_file():
            return
        wanted = resume if named is None else named.parent
        if self._remote is not None and isinstance(wanted, bool):
            self._resumed = self._remote.fetch_newest()
        else:
            self._resumed = checkpoint_to_resume(directory, wanted, ADAPTER_NAME)
        logger.info("resuming from %s", self._resumed.directory)

    def _locate_adapter(self, named: str | Path | None) -> Path | None:
        """A native adapter file, or a PEFT adapter directory.

        What is named is where a run starts; one that resumes has an adapter of its own by then.
        """
        path = self._locate(named, ADAPTER_NAME)
        resumed = self._locate(None, ADAPTER_NAME)
        if resumed is not None and path != resumed:
            logger.info("resuming with the adapter of %s, not %s", resumed.parent, path)
            return resumed
        return None if path is None else find_adapter(path)

    def _locate(self, named: str | Path | None, default: str) -> Path | None:
        """A file or directory that the user names, or the resumed checkpoint's own file."""
        if named is None or str(named) == default:
            if self._resumed is None:
                return None
            path = self._resumed.directory / default
            return path if path.is_file() else None
        candidates = [local(named)]
        if self._output_dir is not None and not is_remote(named):
            candidates.insert(0, self._output_dir / named)
        for path in candidates:
            if path.is_file() or (path.is_dir() and default == ADAPTER_NAME):
                return path
        if self._remote is not None and not is_remote(named) and not Path(named).is_absolute():
            return local(f"{self._remote.url}/{Path(named).as_posix()}")
        raise CheckpointNotFoundError(
            f"{named}: not there, neither by itself nor in output_dir {self._output_dir}"
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
            private memory map of these, so that what is written into them changes no file.
            ``adapter`` and ``adapter_config``: if there is an adapter.
            When resuming also the recipe state's keys.

        Raises:
            CheckpointNotFoundError: if a file is missing.
            CorruptCheckpointError: if a file is damaged.
            TensorMismatchError: lists all tensors that do not fit the model or the adapter.
            ConfigError: if a config file is wrong, or the adapter was trained on another base.
        """
        native, files = self._model_to_load()
        beside = self.load_beside_model()
        _read_ahead(files)
        with bytes_progress("loading", _nbytes(native)) as progress:
            weights = load_all(native, progress)
        self._is_loaded = True
        return {MODEL_KEY: weights, **beside}

    def load_into(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """As :meth:`load_checkpoint`, but copies the weights into tensors that are there.

        So no memory is taken beside theirs, whatever must be converted. Of parameters in shards
        (``DTensor``) each process reads its part; all must call this at the same time, and what
        one of them raises all raise.

        Args:
            parameters: by native name, of any floating point dtype and on any device, such as
                ``model.state_dict()``.

        Returns:
            What :meth:`load_checkpoint` returns without ``model``.

        Raises:
            CheckpointNotFoundError: as :meth:`load_checkpoint`.
            CorruptCheckpointError: as :meth:`load_checkpoint`.
            TensorMismatchError: lists also all that does not fit the parameters, none of which
                has changed then.
            ConfigError: as :meth:`load_checkpoint`.
        """
        ranks = ranks_that_load(parameters)
        with ranks.agreed():
            native, files = self._model_to_load()
            beside = self.load_beside_model()
            if ranks.count == 1:
                # Else each process reads its part alone.
                _read_ahead(files)
            with bytes_progress("loading", _nbytes(native), ranks.is_first) as progress:
                copy_into(parameters, native, f"loading {self._checkpoint_dir}", progress)
        self._is_loaded = True
        return beside

    def load_beside_model(self) -> dict[str, Any]:
        """What :meth:`load_checkpoint` returns without ``model``, if that is to be made first.

        Raises:
            CheckpointNotFoundError: as :meth:`load_checkpoint`.
            CorruptCheckpointError: as :meth:`load_checkpoint`.
            TensorMismatchError: lists all tensors that do not fit the adapter.
            ConfigError: as :meth:`load_checkpoint`.
        """
        state: dict[str, Any] = {}
        if self._adapter_path is not None:
            adapter = open_adapter(self._adapter_path, self._base)
            adapter.check_base(self._base.native, self._checkpoint_dir)
            state[ADAPTER_KEY] = {n: adapter.tensors.read(n) for n in adapter.tensors.metas}
            if adapter.told_config is not None:
                state[ADAPTER_CONFIG_KEY] = adapter.told_config.to_state()
        if self._recipe_file is not None:
            state.update(load_recipe_state(self._recipe_file))
        return state

    def _model_to_load(self) -> tuple[TensorSource, list[Path]]:
        """The native weights, and the files that they are in."""
        if self._resumed is None or self._adapter_path is not None:
            return self._base.native, self._files
        directory = self._resumed.directory
        files = self._format.find_files(directory, None)
        return self._format.open(directory, files, self._model_type).native, files


def _path(location: str | Path | None) -> Path | None:
    return None if location is None else path_on_this_machine(location)


def _read_ahead(files: Sequence[Path]) -> None:
    # What is gone meanwhile is told by who needs it; a file that is mapped is not lost.
    total = sum(file.stat().st_size for file in files if file.is_file())
    with bytes_progress("reading", total) as progress:
        read_ahead(files, progress)


def _nbytes(source: TensorSource) -> int:
    return sum(meta.nbytes for meta in source.metas.values())
