"""Reading with ``torch.distributed.checkpoint``, after everything that can be wrong was found."""

from collections.abc import Mapping, Sequence
from io import SEEK_CUR, SEEK_SET, BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from checkpointing.dcp_metadata import places
from checkpointing.dcp_state import flattened, has_summands
from checkpointing.errors import CorruptCheckpointError, TensorMismatchError
from checkpointing.storage.torch_file import check_torch_stream

Steps = tuple[str | int, ...]


class CheckedReader(FileSystemReader):
    """Reads a checkpoint of which the metadata was checked.

    Args:
        directory: the one that its files lie in.
        metadata: what they hold.
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class StateLoader(DefaultLoadPlanner):
    """Loads into a state: tensors into those that are there, other values in the place of theirs.

    A value that is no tensor and that the state has a place for, but not yet, is put there: such as
    the first learning rate, which an optimizer has once there is a schedule.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None  # or there were nothing to load
        for name, steps in _not_asked_for(state_dict, self.state_dict, metadata).items():
            self.state_dict[name] = None
            self.mappings[name] = steps

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        *way, last = self.mappings[read_item.dest_index.fqn]
        container = _container(self.original_state_dict, way)
        container[_key(container, last)] = loaded


def check_fits(state_dict: dict[str, Any], metadata: Metadata, directory: Path) -> None:
    """Checks that a state is one that a checkpoint can be loaded into, all of it.

    Whole entries of the state's top level may be missing in it, which are not loaded then.

    Args:
        state_dict: to load into; stays as it is.
        metadata: of the checkpoint.
        directory: of the checkpoint, for errors.

    Raises:
        TensorMismatchError: lists everything that does not fit.
    """
    flat = flattened(state_dict)
    stored = metadata.state_dict_metadata
    problems = []
    for name, value in flat.items():
        problem = _problem(value, stored.get(name))
        if problem is not None:
            problems.append(f"{name}: {problem}")
    for name, steps in _not_asked_for(state_dict, flat, metadata).items():
        is_tensor = isinstance(stored[name], TensorStorageMetadata)
        if is_tensor or not isinstance(_container(state_dict, steps[:-1]), dict):
            problems.append(f"{name}: in the checkpoint, but the state has no place for it")
    if problems:
        raise TensorMismatchError(
            f"loading {directory}",
            problems,
            "Give load_checkpoint the state of the same model and optimizer, with the same dtypes; "
            "an optimizer has its state once it was made with get_optimizer_state_dict "
            "(torch.distributed.checkpoint.state_dict) or has taken a step.",
        )


def _problem(value: Any, stored: TensorStorageMetadata | BytesStorageMetadata | None) -> str | None:
    """Why a value cannot be loaded into, if it cannot."""
    if stored is None:
        return "not in the checkpoint"
    if not isinstance(value, Tensor):
        is_tensor = isinstance(stored, TensorStorageMetadata)
        return f"a tensor in the checkpoint, here a {type(value).__name__}" if is_tensor else None
    if isinstance(stored, BytesStorageMetadata):
        return f"no tensor in the checkpoint, here one of shape {list(value.shape)}"
    if stored.size != value.shape:
        return f"{list(stored.size)} in the checkpoint, here {list(value.shape)}"
    if stored.properties.dtype != value.dtype:
        return f"{stored.properties.dtype} in the checkpoint, here {value.dtype}"
    if value.is_meta:
        return "has no memory here (device meta)"
    if has_summands(value):
        return "here each process has a summand of it"
    return None


def _not_asked_for(
    state_dict: Mapping[str, Any], flat: Mapping[str, Any], metadata: Metadata
) -> dict[str, Steps]:
    """What a checkpoint has, beside what a state asks for, in its entries of the top level."""
    tops = {str(key) for key in state_dict}
    return {
        name: steps
        for name, steps in metadata.planner_data.items()
        if name not in flat and steps[0] in tops and name in metadata.state_dict_metadata
    }


def _container(state_dict: Any, steps: Sequence[str | int]) -> Any:
    """The dictionary or list in a state that steps lead to; ``None`` if there is none."""
    for step in steps:
        try:
            state_dict = state_dict[_key(state_dict, step)]
        except (LookupError, TypeError):
            return None
    return state_dict


def _key(container: Any, step: str | int) -> Any:
    """The key that torch has made a string of, if it was none."""
    if not isinstance(container, Mapping) or step in container:
        return step
    return next((key for key in container if str(key) == step), step)


def check_values(directory: Path, metadata: Metadata, files: Sequence[str]) -> None:
    """Checks that no stored value claims more data than it has, or asks for code.

    Args:
        directory: of the checkpoint.
        metadata: of the checkpoint.
        files: of which to check the values.

    Raises:
        CorruptCheckpointError: names file and value.
    """
    by_file: dict[str, list[tuple[int, int, MetadataIndex]]] = {name: [] for name in files}
    for index, place in places(metadata).items():
        if place.relative_path in by_file:
            by_file[place.relative_path].append((place.offset, place.length, index))
    for name, stored in by_file.items():
        with (directory / name).open("rb") as file:
            for start, length, index in stored:
                try:
                    check_torch_stream(BufferedReader(_Range(file, start, length)), length)
                except Exception as error:
                    raise CorruptCheckpointError(
                        f"{directory / name}: {index.fqn} cannot be read ({error}); "
                        "use another checkpoint, or a copy of this one from elsewhere"
                    ) from error


class _Range(RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        base = 0 if whence == SEEK_SET else self._at if whence == SEEK_CUR else self._length
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
