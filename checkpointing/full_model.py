"""What the checkpointers of all formats have in common: saving."""

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from checkpointing.adapter_checkpoint import ADAPTER_NAME
from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import check_adapter, config_of_tensors
from checkpointing.adapters.peft import PeftAdapter
from checkpointing.errors import ConfigError
from checkpointing.formats import WriteOptions
from checkpointing.loading import CheckpointLoader
from checkpointing.mapping.tensors import TensorSource, as_source, shapes_of
from checkpointing.nf4 import QUANTIZED_BASE_KEY
from checkpointing.progress import bytes_progress
from checkpointing.remote_output import RemoteOutput
from checkpointing.resume import (
    RECIPE_STATE_NAME,
    check_recipe_state,
)
from checkpointing.retention import (
    METRICS_KEY,
    finite,
    remove_old_checkpoints,
)
from checkpointing.save_plan import (
    ADAPTER_CONFIG_KEY,
    ADAPTER_KEY,
    MODEL_KEY,
    RUN_KEY,
    SavePlan,
    SaveTimes,
    adapter_config_of,
    directory_name,
)
from checkpointing.sharded import check_alike, gathering, ranks_that_save
from checkpointing.storage.commit import check_room, make_directory
from checkpointing.storage.location import is_remote
from checkpointing.storage.mirror import origin_of
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.run_lock import claimed
from checkpointing.storage.shared_writer import SharedWriter, staged_together
from checkpointing.storage.side_files import side_files
from checkpointing.storage.write import parse_size
from checkpointing.storage.writer import CheckpointWriter

logger = logging.getLogger(__name__)


class FullModelCheckpointer(CheckpointLoader):
    """What the checkpointers of all formats have in common.

    Attributes:
        times: what the last save cost.
    """

    times: SaveTimes | None = None

    @property
    def output_dir(self) -> Path | None:
        """Where checkpoints are saved, on this machine."""
        return self._output_dir

    def wait(self, *, block: bool = True) -> None:
        """Does nothing: a save is finished when it returns.

        An :class:`~checkpointing.AsyncCheckpointer` has something to wait for.
        """

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
        show_progress: bool = True,
        metrics: Mapping[str, float] | None = None,
        ranks: Ranks | None = None,
    ) -> Path:
        """Saves a checkpoint, which exists with all its files or not at all.

        Everything that can be wrong is found before anything is written. Neither the state dict
        nor its tensors are changed.

        Tensors that lie in shards in the processes of a job (``DTensor``, as FSDP2 makes them),
        be they the model's, the adapter's or in the recipe state, become the same files as whole
        ones. All processes must call this at the same time and see one storage. Each writes the
        rows that it has, and none ever holds the model or the optimizer's state: only what is not
        cut into whole rows, or not where the format can be cut (between heads), is gathered, a
        tensor or a range of its rows at a time. What all processes have whole is written by one of
        them, of the recipe state by the first. An error in one process is raised in all, and
        nothing is saved.

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
            show_progress: show a bar, if it takes long.
            metrics: numbers that tell how good it is, such as the loss, for retention.
            dir_prefix: ``"epoch"`` saves to ``epoch_{epoch}``, ``"step"`` to ``step_{step}``.
            ranks: the processes that save together, if not over the job's own groups; as an
                :class:`~checkpointing.AsyncCheckpointer` does, in the background.

        Returns:
            The checkpoint's directory; of one that was uploaded, the copy that stays here.

        Raises:
            ConfigError: if a key is missing or wrong.
            TensorMismatchError: lists all tensors that do not belong to the model or adapter.
            OutOfSpaceError: if the disk has no room.
            WriteError: if the system refuses to write, or the checkpoint cannot be uploaded.
        """
        started = time.perf_counter()
        ranks = ranks_that_save(state_dict) if ranks is None else ranks
        with ranks.agreed(), gathering(ranks):
            name = directory_name(dir_prefix, epoch, step)
            if max_shard_size is None:
                max_bytes = self._max_shard_bytes
            else:
                max_bytes = parse_size(max_shard_size)
            alike = {"the checkpoint's name": name, "max_shard_size": max_bytes}
            plan, output_dir = self._plan_save(ranks, state_dict, adapter_only, alike)
            final = output_dir / name
            shows = show_progress and ranks.is_first
            total = plan.nbytes // ranks.count
            with (
                self.claim_output_dir() if ranks.is_first else nullcontext(),
                bytes_progress(f"saving {final.name}", total, shows) as progress,
                staged_together(final, ranks) as staging,
            ):
                writer = SharedWriter(staging, progress, ranks)
                self._write(writer, plan, max_bytes)
                if ranks.is_first:
                    facts = self._manifest(plan, epoch, step, state_dict)
                    if metrics:
                        facts[METRICS_KEY] = finite(metrics)
                    writer.manifest(facts)
            if ranks.is_first:
                self._follow_up(final, show_progress)
        seconds = time.perf_counter() - started
        self.times = SaveTimes(blocked=seconds, written=seconds)
        return final

    def _follow_up(self, saved: Path, show_progress: bool) -> None:
        """What is done once a checkpoint exists."""
        logger.info("saved %s", saved)
        if self._remote is not None:
            self._upload(self._remote, saved, show_progress)
        elif self._retention is not None:
            needed = {saved}
            if self._resumed is not None and not self._is_loaded:
                needed.add(self._resumed.directory)
            remove_old_checkpoints(saved.parent, self._retention, self._run_id, needed)

    def _upload(self, remote: RemoteOutput, saved: Path, show_progress: bool) -> None:
        with self.claim_output_dir():
            remote.upload(saved, show_progress=show_progress)
            logger.info("uploaded %s/%s", remote.url, saved.name)
            if self._retention is not None:
                remote.remove_old(self._retention, self._run_id, saved)

    @contextmanager
    def claim_output_dir(self) -> Iterator[None]:
        """Keeps other processes from saving into the output directory while the block runs.

        Raises:
            ConfigError: if another process has claimed it.
        """
        if self._output_dir is None:
            yield
            return
        make_directory(self._output_dir)
        with claimed(self._output_dir):
            yield

    def check_save(self, state_dict: Mapping[str, Any], adapter_only: bool = False) -> None:
        """Finds what would keep a state from being saved, such as before a run; writes nothing.

        All processes must call it at the same time if the state lies in shards.

        Args:
            state_dict: as for :meth:`save_checkpoint`.
            adapter_only: as for :meth:`save_checkpoint`.

        Raises:
            ConfigError: as :meth:`save_checkpoint`.
            TensorMismatchError: as :meth:`save_checkpoint`.
            OutOfSpaceError: as :meth:`save_checkpoint`.
        """
        ranks = ranks_that_save(state_dict)
        with ranks.agreed(), gathering(ranks):
            self._plan_save(ranks, state_dict, adapter_only, {})

    def _plan_save(
        self,
        ranks: Ranks,
        state_dict: Mapping[str, Any],
        adapter_only: bool,
        alike: Mapping[str, Any],
    ) -> tuple[SavePlan, Path]:
        """What will be written, and into which output directory.

        Args:
            ranks: the processes that write it together.
            state_dict: as for :meth:`save_checkpoint`.
            adapter_only: as for :meth:`save_checkpoint`.
            alike: what else must be the same in all processes, so that they write the same files.
        """
        alike = {
            "output_dir": str(self._output_dir),
            **alike,
            "safe_serialization": self._safe_serialization,
            "adapter_only": adapter_only,
            "that there is an adapter": ADAPTER_KEY in state_dict,
        }
        check_alike(ranks, state_dict, alike)
        if self._output_dir is None:
            raise ConfigError("output_dir: not given, so there is nowhere to save to")
        for key, needed in ((ADAPTER_KEY, adapter_only), (MODEL_KEY, not adapter_only)):
            if needed and key not in state_dict:
                raise ConfigError(
                    f"state_dict: has no {key!r}, which adapter_only={adapter_only} needs; "
                    f"it has {', '.join(map(repr, state_dict))}"
                )
        adapter = adapter_config = None
        if ADAPTER_KEY in state_dict:
            adapter = as_source(state_dict[ADAPTER_KEY])
            adapter_config = adapter_config_of(state_dict, adapter)
            check_adapter(
                adapter.metas,
                adapter_config or config_of_tensors(adapter.metas),
                shapes_of(self._base.native),
                "saving an adapter",
            )
        recipe_state = {
            key: value
            for key, value in state_dict.items()
            if key not in (MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG_KEY)
        }
        check_recipe_state(recipe_state)
        # What follows may gather tensors to compare them, in which all must take part.
        ranks.exchange()
        model = None
        if not adapter_only:
            model = self._format.plan(as_source(state_dict[MODEL_KEY]), self._base)
        peft = self._plan_peft(adapter, adapter_config)
        plan = SavePlan(model, adapter, adapter_config, peft, recipe_state)
        check_room(self._output_dir, plan.nbytes)
        return plan, self._output_dir

    def _plan_peft(
        self, adapter: TensorSource | None, config: AdapterConfig | None
    ) -> PeftAdapter | None:
        """The adapter in PEFT's form, for formats that store it so."""
        return None

    def _write(self, writer: CheckpointWriter, plan: SavePlan, max_bytes: int | None) -> None:
        if plan.model is not None:
            self._write_model(writer, plan.model, max_bytes)
        self._write_state(writer, plan)
        self._copy_side_files(writer)

    def _write_model(
        self, writer: CheckpointWriter, model: TensorSource, max_bytes: int | None
    ) -> None:
        options = WriteOptions(self._safe_serialization, max_bytes)
        self._format.write(writer, model, self._base, options)

    def _write_state(self, writer: CheckpointWriter, plan: SavePlan) -> None:
        if plan.adapter is not None:
            writer.tensors(ADAPTER_NAME, plan.adapter)
        if plan.recipe_state:
            writer.torch_object(RECIPE_STATE_NAME, dict(plan.recipe_state))

    def _copy_side_files(self, writer: CheckpointWriter, leaving_out: Collection[str] = ()) -> None:
        for path in side_files(self._checkpoint_dir):
            if path.name not in leaving_out:
                writer.copy(path)

    def _manifest(
        self, plan: SavePlan, epoch: int, step: int | None, state_dict: Mapping[str, Any]
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
            if is_remote(origin_of(self._checkpoint_dir)):
                facts["base"]["url"] = origin_of(self._checkpoint_dir)
            if state_dict.get(QUANTIZED_BASE_KEY) is not None:
                facts["base"][QUANTIZED_BASE_KEY] = state_dict[QUANTIZED_BASE_KEY]
        if plan.adapter_config is not None:
            facts[ADAPTER_CONFIG_KEY] = plan.adapter_config.to_state()
        run = state_dict.get(RUN_KEY)
        if isinstance(run, Mapping):
            facts |= {key: run[key] for key in ("recipe", "config") if key in run}
        return facts
