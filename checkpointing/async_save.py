"""Saving while training goes on: the trainer waits for a copy of what changes, not for the disk."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.lora import MergedStateDict
from checkpointing.full_model import FullModelCheckpointer
from checkpointing.mapping.tensors import is_dtensor
from checkpointing.processes_apart import ProcessesApart
from checkpointing.save_plan import ADAPTER_KEY, MODEL_KEY, SaveTimes, directory_name
from checkpointing.sharded import ranks_that_save
from checkpointing.storage.before_exit import wait_before_exit
from checkpointing.storage.threads import yield_to_training

logger = logging.getLogger(__name__)


class AsyncCheckpointer:
    """A checkpointer that writes in the background; otherwise the one that it is made of.

    ``save_checkpoint`` returns as soon as all that training changes is copied: to buffers that are
    made once and used again. What an adapter run never changes, its frozen base, is not copied.
    One save is written at a time; the next one waits for it.

    Of tensors that lie in shards in the processes of a job each process copies what it has, and
    they are written by all processes in the background of each. These talk over process groups of
    their own, so that they never get mixed up with what training does. All processes must call
    each method at the same time. What goes wrong in one is raised in all, by their next save or by
    :meth:`wait`.

    Args:
        checkpointer: writes the checkpoints.
    """

    def __init__(self, checkpointer: FullModelCheckpointer) -> None:
        self._checkpointer = checkpointer
        self._apart: ProcessesApart | None = None
        self._is_of_many = False
        self._buffers: dict[str, Tensor] = {}
        self._worker = ThreadPoolExecutor(1, "save", yield_to_training)
        self.running: Future[float] | None = None
        self._blocked = 0.0
        self._is_checked = False
        self.times: SaveTimes | None = None
        wait_before_exit(self)

    @contextmanager
    def claim_output_dir(self) -> Iterator[None]:
        """As the checkpointer's method; leaving waits for the last save, whatever happened."""
        with self._checkpointer.claim_output_dir():
            try:
                yield
            except BaseException:
                if self.running is not None:
                    self.running.exception()
                raise
            self.wait()

    def check_save(self, state_dict: Mapping[str, Any], adapter_only: bool = False) -> None:
        """As the checkpointer's method; also makes the buffers, so that no save has to."""
        self._checkpointer.check_save(state_dict, adapter_only)
        self._copied(state_dict, adapter_only)
        self._is_checked = True

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        dir_prefix: str = "epoch",
        **options: Any,
    ) -> Path:
        """Copies the state and starts to write it; arguments as the checkpointer's method.

        Returns:
            The directory that the checkpoint will have.

        Raises:
            CheckpointingError: if the save before this one failed. What is wrong with this one is
                raised by the next save, or by :meth:`wait`.
        """
        started = time.perf_counter()
        name = directory_name(dir_prefix, epoch, step)
        self.wait()
        if not self._is_checked:
            self.check_save(state_dict, adapter_only)
        snapshot, together = self._copied(state_dict, adapter_only)
        self._is_of_many = together is not None
        self.running = self._worker.submit(
            self._write,
            snapshot,
            together,
            epoch=epoch,
            intermediate_checkpoint=intermediate_checkpoint,
            adapter_only=adapter_only,
            step=step,
            dir_prefix=dir_prefix,
            **options,
        )
        self._blocked = time.perf_counter() - started
        assert self._checkpointer.output_dir is not None  # or check_save had raised
        return self._checkpointer.output_dir / name

    def wait(self, *, block: bool = True) -> None:
        """Raises what went wrong in a save.

        Args:
            block: wait for a save that is being written. ``False``: look only at one that has
                ended, as the trainer does after each step; not at one of several processes, for
                some of which it may have ended, and not for others.

        Raises:
            CheckpointingError: as the checkpointer's ``save_checkpoint``.
        """
        running = self.running
        if running is None or not (block or (running.done() and not self._is_of_many)):
            return
        self.running = None
        self.times = SaveTimes(self._blocked, running.result())

    def _write(
        self, state_dict: dict[str, Any], together: ProcessesApart | None, **arguments: Any
    ) -> float:
        started = time.perf_counter()
        arguments |= {"show_progress": False}
        if together is not None:
            arguments |= {"ranks": together.ranks()}
        with nullcontext() if together is None else together.gathering():
            if isinstance(model := state_dict.get(MODEL_KEY), MergedStateDict):
                # Not before, since what lies in shards of the adapter is gathered for it.
                state_dict[MODEL_KEY] = model.with_adapter(state_dict[ADAPTER_KEY])
            self._checkpointer.save_checkpoint(state_dict, **arguments)
        return time.perf_counter() - started

    def _copied(
        self, state_dict: Mapping[str, Any], adapter_only: bool
    ) -> tuple[dict[str, Any], ProcessesApart | None]:
        """A snapshot of the state, and the processes that write it, if not this one alone."""
        ranks = ranks_that_save(state_dict)
        if ranks.count > 1:
            self._apart = self._apart or ProcessesApart()
            self._apart.add_meshes(state_dict)
        with ranks.agreed():
            snapshot = self._snapshot(state_dict, adapter_only)
        return snapshot, self._apart if ranks.count > 1 else None

    def _snapshot(self, state_dict: Mapping[str, Any], adapter_only: bool) -> dict[str, Any]:
        """The state with copies of all tensors that training may change; merged weights as are."""
        model = state_dict.get(MODEL_KEY)
        rest = {key: value for key, value in state_dict.items() if key != MODEL_KEY}
        copied = copy_tensors(rest, self._copy)
        if model is None or adapter_only:
            pass
        elif isinstance(model, MergedStateDict):
            copied[MODEL_KEY] = model
        else:
            copied[MODEL_KEY] = copy_tensors({**model}, self._copy, MODEL_KEY)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _copy(self, path: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if is_dtensor(tensor):
            if self._apart is not None:
                return self._apart.copy(tensor, partial(self._copy, path))
            tensor = tensor.to_local()  # in a job of one process, which has all of it
        if type(tensor) is not Tensor:
            return tensor.clone()  # a quantised state, whose parts have no name here
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def copy_tensors(content: Any, copy: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Nested dictionaries and lists with a copy of each tensor in them.

    Args:
        content: plain data and tensors.
        copy: makes the copy of a tensor, given the path to it.
        path: to the content.
    """
    if isinstance(content, Tensor):
        return copy(path, content)
    if isinstance(content, Mapping):
        kind: type = type(content) if type(content) in (OrderedDict, Counter) else dict
        return kind({k: copy_tensors(value, copy, f"{path}.{k}") for k, value in content.items()})
    if isinstance(content, list | tuple):
        copied = [copy_tensors(each, copy, f"{path}.{n}") for n, each in enumerate(content)]
        return copied if isinstance(content, list) else tuple(copied)
    return content
