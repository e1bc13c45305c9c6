"""Checkpoints of ``torch.distributed.checkpoint``: every process of a job writes what it has."""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.dcp_keep import keep_files
from checkpointing.dcp_metadata import METADATA_NAME, places, read_metadata
from checkpointing.dcp_read import CheckedReader, StateLoader, check_fits, check_values
from checkpointing.dcp_write import DigestingWriter, StatePlanner
from checkpointing.errors import (
    CheckpointingError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    WriteError,
)
from checkpointing.resume import DCP_FORMAT, saved_checkpoints
from checkpointing.save_plan import SaveTimes, directory_name
from checkpointing.sharded import check_alike
from checkpointing.storage.before_exit import wait_before_exit
from checkpointing.storage.commit import check_room, make_directory, recover
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.integrity import check_intact
from checkpointing.storage.location import path_on_this_machine
from checkpointing.storage.manifest import (
    MANIFEST_NAME,
    file_digests,
    load_manifest,
    size_problem,
    write_manifest,
)
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.run_lock import claimed
from checkpointing.storage.shared_writer import staged_together
from checkpointing.storage.threads import yield_to_training

logger = logging.getLogger(__name__)

ADAPTER_DIR = "adapter_model"
# Of a manifest: the run that has saved the adapter, which need not be the one of the rest.
_ADAPTER_RUN = "adapter_run_id"


class DistributedCheckpointer:
    """Saves and loads the state of a job in which each process has a part of the tensors.

    Nothing is gathered: each process writes its own part (``DTensor``, as FSDP2 and tensor
    parallelism make them) into a file of its own, by ``torch.distributed.checkpoint``. A checkpoint
    can be loaded by any number of processes, with tensors cut in any way. Tensors that are not in
    shards, and numbers, strings and the like, are saved as the first process has them; what each
    process has for itself, such as the state of its random numbers, needs a key for each.

    A checkpoint exists with all its files or not at all, and has a manifest with their checksums.
    All processes must call each method at the same time, and see one storage. An error in one is
    raised in all. What they tell each other goes over a process group that nothing else uses, so
    that a save in the background never gets mixed up with what training does.

    Args:
        checkpoint_dir: directory of the model that training started from; nothing is read from it.
        output_dir: where checkpoints are saved.
        process_group: of the processes that save together, with the backend gloo and for nothing
            else; one of all processes of the job is made, if not given. Without
            ``torch.distributed`` being initialised this process is the only one.

    Attributes:
        output_dir: where checkpoints are saved.
        times: what the last save cost.

    Raises:
        ConfigError: if a directory is a URL, or the process group is for GPUs alone.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        output_dir: str | Path,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self._checkpoint_dir = path_on_this_machine(checkpoint_dir)
        self._output_dir = path_on_this_machine(output_dir)
        if process_group is not None and "gloo" not in dist.get_backend_config(process_group):
            raise ConfigError(
                f"process_group: is of {dist.get_backend_config(process_group)}, and checkpoints "
                "need one for data on the CPU: make it with new_group(backend='gloo')"
            )
        self._group = process_group
        self._buffers: dict[str, Tensor] = {}
        self._worker = ThreadPoolExecutor(1, "save", yield_to_training)
        self.running: Future[float] | None = None
        self._blocked = 0.0
        self._run_id = uuid.uuid4().hex
        self.times: SaveTimes | None = None
        wait_before_exit(self)
        if not _is_distributed() or dist.get_rank(process_group) == 0:
            recover(self._output_dir)

    @property
    def output_dir(self) -> Path:
        """Where checkpoints are saved."""
        return self._output_dir

    def get_output_path(
        self, epoch: int, step: int | None = None, dir_prefix: str = "epoch"
    ) -> Path:
        """Directory of a checkpoint, whether it is there or not.

        Raises:
            ConfigError: if the prefix is unknown, or its number is not given.
        """
        return self._output_dir / directory_name(dir_prefix, epoch, step)

    def get_latest_checkpoint(self, adapter_only: bool = False) -> Path | None:
        """Directory of the complete checkpoint with most training steps, if there is any.

        Args:
            adapter_only: look for one that holds an adapter, not for one that holds a whole state.
        """
        needed = f"{ADAPTER_DIR}/{METADATA_NAME}" if adapter_only else METADATA_NAME
        for checkpoint in reversed(saved_checkpoints(self._output_dir)):
            if needed in checkpoint.manifest["files"]:
                return checkpoint.directory
        return None

    get_latest_intermediate_checkpoint = get_latest_checkpoint

    @contextmanager
    def claim_output_dir(self) -> Iterator[None]:
        """Keeps other jobs from saving into the output directory while the block runs.

        Leaving it waits for the last save, whatever happened.

        Raises:
            CheckpointingError: what went wrong in the last save.
            ConfigError: if another process has claimed it.
        """
        self.wait()
        with self._claimed():
            try:
                yield
            except BaseException:
                if self.running is not None:
                    self.running.exception()
                raise
            self.wait()

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        if _is_distributed() and dist.get_rank(self._group) != 0:
            yield
            return
        make_directory(self._output_dir)
        with claimed(self._output_dir):
            yield

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        save_async: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        dir_prefix: str = "epoch",
    ) -> Path:
        """Saves a state, which may be nested.

        Everything that can be wrong with it is found before anything is written. Neither the state
        nor its tensors are changed.

        Args:
            state_dict: tensors, numbers, strings, and dictionaries and lists of these.
            epoch: number of the epoch, counted from 0.
            save_async: return as soon as all that this process has is copied, and write in the
                background. The next save, :meth:`wait` and the end of the program wait for it;
                ``destroy_process_group`` must not be called before.
            adapter_only: save into the subdirectory ``adapter_model``. What else the checkpoint of
                this name holds stays, and so does its adapter when the same run saves the rest.
            step: number of optimizer steps so far, which decides which checkpoint is the latest;
                ``steps_run`` of the state if not given.
            dir_prefix: ``"epoch"`` saves to ``epoch_{epoch}``, ``"step"`` to ``step_{step}``.

        Returns:
            The checkpoint's directory, that of an adapter too.

        Raises:
            ConfigError: if a value cannot be saved so that it loads without running code, or the
                processes were given different arguments.
            OutOfSpaceError: if the disk has no room.
            WriteError: if the system refuses to write.
            RankLostError: if another process has ended, or hangs.
            CheckpointingError: what went wrong in the background since the last call, or in
                another process.
        """
        started = time.perf_counter()
        self.wait()
        ranks = self._ranks()
        with ranks.agreed():
            final = self.get_output_path(epoch, step, dir_prefix)
            arguments = {
                "the checkpoint's name": final.name,
                "save_async": save_async,
                "adapter_only": adapter_only,
            }
            check_alike(ranks, {}, arguments)
            planner = StatePlanner(state_dict)
            if ranks.is_first:
                check_room(self._output_dir, planner.nbytes)
            if save_async:
                planner.copy_into(self._buffers)
            facts = {
                "format": DCP_FORMAT,
                "family": None,
                "epoch": epoch,
                "step": _steps_run(state_dict) if step is None else step,
                "run_id": self._run_id,
            }
        if save_async:
            self.running = self._worker.submit(
                self._write_in_background, final, planner, adapter_only, facts
            )
            self._blocked = time.perf_counter() - started
        else:
            self._write(final, planner, adapter_only, facts)
            seconds = time.perf_counter() - started
            self.times = SaveTimes(blocked=seconds, written=seconds)
        return final

    def wait(self, *, block: bool = True) -> None:
        """Raises what went wrong in a save.

        Args:
            block: wait for a save that is being written. ``False``: look only at one that has
                ended.

        Raises:
            CheckpointingError: as :meth:`save_checkpoint`.
        """
        running = self.running
        if running is None or not (block or running.done()):
            return
        self.running = None
        self.times = SaveTimes(self._blocked, running.result())

    def load_checkpoint(
        self,
        state_dict: dict[str, Any] | None = None,
        checkpoint_path: str | Path | None = None,
        adapter_only: bool = False,
    ) -> dict[str, Any]:
        """Loads a checkpoint into a state, whatever the number of processes that saved it.

        Tensors are written into those that the state has, as these are cut; other values are put in
        the place of those that it has. All that the state has must be in the checkpoint, with the
        same shapes and dtypes, and of each entry at its top level all that is in the checkpoint
        must have a place. Entries at the top level that it lacks are not loaded.

        Args:
            state_dict: to load into.
            checkpoint_path: directory of the checkpoint, also one that torch or torchtune wrote,
                which has no checksums; the latest in ``output_dir`` if not given.
            adapter_only: load what was saved with ``adapter_only``.

        Returns:
            The state.

        Raises:
            ConfigError: if no state is given.
            CheckpointNotFoundError: if there is no checkpoint.
            CorruptCheckpointError: if a file of it is damaged, or would need to run code. Nothing
                has changed then.
            TensorMismatchError: lists all that does not fit. Nothing has changed then.
            UnsafePathError: if it names a file elsewhere.
            CheckpointingError: if the disk fails on the way, or another process, such as
                :class:`~checkpointing.errors.RankLostError`; the state may be loaded in part then.
        """
        if state_dict is None:
            raise ConfigError(
                "load_checkpoint: needs a state_dict to load into, which tells how the tensors are "
                "cut; give that of the model and its optimizer"
            )
        self.wait()
        ranks = self._ranks("loading a checkpoint")
        with ranks.agreed():
            found = self._locate(checkpoint_path, adapter_only) if ranks.is_first else None
            root = ranks.exchange(found)[0]
            directory = root / ADAPTER_DIR if adapter_only else root
            metadata = read_metadata(directory)
            files = sorted({place.relative_path for place in places(metadata).values()})
            own = [METADATA_NAME, *files][ranks.rank :: ranks.count]
            manifest = load_manifest(root)
            if manifest is not None:
                prefix = f"{ADAPTER_DIR}/" if adapter_only else ""
                _check_intact(root, manifest, [f"{prefix}{name}" for name in own])
            check_values(directory, metadata, [name for name in own if name != METADATA_NAME])
            check_fits(state_dict, metadata, directory)
        try:
            ranks.wait_for(
                lambda: load(
                    state_dict,
                    storage_reader=CheckedReader(directory, metadata),
                    planner=StateLoader(),
                    process_group=self._group,
                )
            )
        except CheckpointException as error:
            _raise_in_all(ranks, error, None, f"{directory}: could not be loaded")
        if manifest is not None:
            self._run_id = manifest.get("run_id", self._run_id)
        if ranks.is_first:
            logger.info("loaded %s", directory)
        return state_dict

    def _locate(self, given: str | Path | None, adapter_only: bool) -> Path:
        if given is not None:
            return path_on_this_machine(given)
        latest = self.get_latest_checkpoint(adapter_only)
        if latest is None:
            what = (
                "adapter in a distributed checkpoint" if adapter_only else "distributed checkpoint"
            )
            raise CheckpointNotFoundError(
                f"{self._output_dir}: holds no complete {what}; check output_dir, or give "
                "load_checkpoint the checkpoint_path of one without a manifest"
            )
        return latest

    def _ranks(self, doing: str = "saving a checkpoint") -> Ranks:
        """The processes that save together, as they talk to each other about it."""
        if not _is_distributed():
            return Ranks()
        if self._group is None:
            # One of its own, so that a save in the background never meets what training does.
            self._group = dist.new_group(backend="gloo")
        return Ranks(self._group, doing)

    def _write_in_background(self, *arguments: Any) -> float:
        try:
            return self._write(*arguments)
        except BaseException as error:
            # The program may end without asking for it.
            logger.error("a checkpoint could not be saved in the background: %s", error)
            raise

    def _write(
        self, final: Path, planner: StatePlanner, adapter_only: bool, facts: Mapping[str, Any]
    ) -> float:
        """Writes a checkpoint; returns the seconds that it took."""
        started = time.perf_counter()
        ranks = self._ranks()
        with ranks.agreed(), self._claimed(), staged_together(final, ranks) as staging:
            kept: dict[str, FileDigest] = {}
            into = staging / ADAPTER_DIR if adapter_only else staging
            with ranks.agreed():
                if ranks.is_first:
                    facts = {**facts, "saved_at_ns": time.time_ns()}
                    kept, facts = self._keep(final, staging, adapter_only, facts)
                    into.mkdir(exist_ok=True)
            with ranks.agreed():
                if not into.is_dir():
                    raise WriteError(
                        f"{into}: made by rank 0, but rank {ranks.rank} does not see it; all ranks "
                        "must save into storage that they share"
                    )
            own = self._save(into, planner, ranks)
            written = {name: digest for one in ranks.exchange(own) for name, digest in one.items()}
            if ranks.is_first:
                prefix = f"{ADAPTER_DIR}/" if adapter_only else ""
                digests = {f"{prefix}{name}": digest for name, digest in written.items()}
                _check_there(staging, digests)
                write_manifest(staging, facts, {**kept, **digests})
        if ranks.is_first:
            logger.info("saved %s", final)
        return time.perf_counter() - started

    def _keep(
        self, final: Path, staging: Path, adapter_only: bool, facts: Mapping[str, Any]
    ) -> tuple[dict[str, FileDigest], Mapping[str, Any]]:
        """Keeps what the checkpoint of this name has that is not saved now."""
        if adapter_only:
            facts = {**facts, _ADAPTER_RUN: self._run_id}
        if not final.is_dir():
            return {}, facts
        if adapter_only:
            kept = keep_files(final, staging, lambda name: not name.startswith(f"{ADAPTER_DIR}/"))
            manifest = load_manifest(final) or {}
            new = ("files", "saved_at_ns", _ADAPTER_RUN)
            of_rest = {key: value for key, value in manifest.items() if key not in new}
            return kept, {**facts, **of_rest}
        try:
            manifest = load_manifest(final) or {}
        except CorruptCheckpointError:
            manifest = {}
        if manifest.get(_ADAPTER_RUN) != self._run_id:
            return {}, facts
        kept = keep_files(final, staging, lambda name: name.startswith(f"{ADAPTER_DIR}/"))
        return kept, {**facts, _ADAPTER_RUN: self._run_id}

    def _save(self, into: Path, planner: StatePlanner, ranks: Ranks) -> dict[str, FileDigest]:
        """Writes the part of this process; returns what its files must hold."""
        writer = DigestingWriter(into, ranks.count)
        try:
            ranks.wait_for(
                lambda: save({}, storage_writer=writer, planner=planner, process_group=self._group)
            )
        except CheckpointException as error:
            _raise_in_all(ranks, error, writer.error, f"{into}: could not be saved")
        return writer.digests()


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _steps_run(state_dict: Mapping[str, Any]) -> int | None:
    steps = state_dict.get("steps_run")
    return steps if type(steps) is int else None


def _check_intact(root: Path, manifest: Mapping[str, Any], names: list[str]) -> None:
    digests = file_digests(root, manifest)
    unknown = [name for name in names if name not in digests]
    if unknown:
        raise CorruptCheckpointError(
            f"{root / MANIFEST_NAME}: does not name {unknown[0]}, which the checkpoint needs; "
            "use another checkpoint, or a copy of this one from elsewhere"
        )
    check_intact(root, {name: digests[name] for name in names})


def _check_there(staging: Path, digests: Mapping[str, FileDigest]) -> None:
    for name, digest in digests.items():
        problem = size_problem(staging / name, digest)
        if problem is not None:
            raise WriteError(
                f"{problem}; all ranks must save into storage that they share, and the one that "
                "commits must see what the others wrote"
            )


def _raise_in_all(
    ranks: Ranks, error: CheckpointException, refused: OSError | None, what: str
) -> NoReturn:
    """Raises what went wrong in a process, as torch has told it to all.

    Args:
        ranks: the processes.
        error: what torch raises in all.
        refused: what the system has refused in this process.
        what: what went wrong, with the place.
    """
    with ranks.agreed():
        if ranks.rank in error.failures:
            cause = refused or error.failures[ranks.rank][0]
            if isinstance(cause, CheckpointingError | OSError) or not isinstance(cause, Exception):
                raise cause
            raise CheckpointingError(f"{what}: {type(cause).__name__}: {cause}") from cause
    raise CheckpointingError(what) from error
