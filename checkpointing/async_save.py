"""Saving while training goes on: the trainer waits for a copy of what changes, not for the disk."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.lora import MergedStateDict
from checkpointing.errors import ConfigError
from checkpointing.full_model import FullModelCheckpointer
from checkpointing.mapping.tensors import as_source, is_sharded
from checkpointing.save_plan import ADAPTER_KEY, MODEL_KEY, SaveTimes, directory_name
from checkpointing.storage.threads import yield_to_training

logger = logging.getLogger(__name__)


class AsyncCheckpointer:
    """A checkpointer that writes in the background; otherwise the one that it is made of.

    ``save_checkpoint`` returns as soon as all that training changes is copied: to buffers that are
    made once and used again. What an adapter run never changes, its frozen base, is not copied.
    One save is written at a time; the next one waits for it.

    Args:
        checkpointer: writes the checkpoints.
    """

    def __init__(self, checkpointer: FullModelCheckpointer) -> None:
        self._checkpointer = checkpointer
        self._buffers: dict[str, Tensor] = {}
        self._worker = ThreadPoolExecutor(1, "save", yield_to_training)
        self._running: Future[float] | None = None
        self._blocked = 0.0
        self._is_checked = False
        self.times: SaveTimes | None = None

    @contextmanager
    def claim_output_dir(self) -> Iterator[None]:
        """As the checkpointer's method; leaving waits for the last save, whatever happened."""
        with self._checkpointer.claim_output_dir():
            try:
                yield
            except BaseException:
                if self._running is not None:
                    self._running.exception()
                raise
            self.wait()

    def check_save(self, state_dict: Mapping[str, Any], adapter_only: bool = False) -> None:
        """As the checkpointer's method; also makes the buffers, so that no save has to.

        Raises:
            ConfigError: also if the model is sharded, of which no copy is saved in the background.
        """
        if is_sharded(as_source(state_dict.get(MODEL_KEY, {}))):
            raise ConfigError(
                "a model in shards cannot be saved in the background yet; save it without "
                "AsyncCheckpointer (enable_async_checkpointing: false)"
            )
        self._checkpointer.check_save(state_dict, adapter_only)
        self._snapshot(state_dict, adapter_only)
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
        snapshot = self._snapshot(state_dict, adapter_only)
        self._running = self._worker.submit(
            self._write,
            snapshot,
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
                ended, as the trainer does after each step.

        Raises:
            CheckpointingError: as the checkpointer's ``save_checkpoint``.
        """
        running = self._running
        if running is None or not (block or running.done()):
            return
        self._running = None
        self.times = SaveTimes(self._blocked, running.result())

    def _write(self, state_dict: Mapping[str, Any], **arguments: Any) -> float:
        started = time.perf_counter()
        self._checkpointer.save_checkpoint(state_dict, **{**arguments, "show_progress": False})
        return time.perf_counter() - started

    def _snapshot(self, state_dict: Mapping[str, Any], adapter_only: bool) -> dict[str, Any]:
        """The state with copies of all tensors that training may change."""
        model = state_dict.get(MODEL_KEY)
        rest = {key: value for key, value in state_dict.items() if key != MODEL_KEY}
        copied = copy_tensors(rest, self._copy)
        if model is None or adapter_only:
            pass
        elif isinstance(model, MergedStateDict):
            copied[MODEL_KEY] = model.with_adapter(copied[ADAPTER_KEY])
        else:
            copied[MODEL_KEY] = copy_tensors({**model}, self._copy, MODEL_KEY)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _copy(self, path: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
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
        return {key: copy_tensors(value, copy, f"{path}.{key}") for key, value in content.items()}
    if isinstance(content, list | tuple):
        copied = [copy_tensors(each, copy, f"{path}.{n}") for n, each in enumerate(content)]
        return copied if isinstance(content, list) else tuple(copied)
    return content
