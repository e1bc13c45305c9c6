"""Writing with ``torch.distributed.checkpoint``: what it writes is digested on the way."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from io import IOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpointing.dcp_state import check_saveable, flattened, local_part
from checkpointing.storage.digest import Digest, FileDigest, Part

# Of a checkpoint, as many lines for single tensors as a manifest has room for; beyond, a line is
# for so many bytes.
_MOST_PARTS = 1 << 19
_RANGE = 64 << 20


class StatePlanner(DefaultSavePlanner):
    """Plans the save of a state as it is now, though it may change while it is written.

    What is not in shards is taken from the first process that has it, whatever the others have.

    Args:
        state_dict: nested dictionaries and lists of tensors and plain data.

    Raises:
        ConfigError: if a value cannot be saved so that it loads without running code, or two have
            the same dotted name.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in flattened(state_dict).items():
            check_saveable(name, value)
        super().set_up_planner(dict(state_dict))
        self._copies: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Size of all tensors, whole."""
        return sum(one.nbytes for one in self.state_dict.values() if isinstance(one, Tensor))

    def copy_into(self, buffers: dict[str, Tensor]) -> None:
        """Copies all values that this process has, of which the copies are written then.

        Args:
            buffers: memory by names of tensors, used again where it fits and added to.
        """
        for name, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                self._copies[name] = deepcopy(value)
                continue
            own = local_part(value)
            buffer = buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (own.shape, own.dtype):
                buffer = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
                buffers[name] = buffer
            self._copies[name] = buffer.copy_(own, non_blocking=own.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            whole = {item.index for item in plan.items if item.type != WriteItemType.SHARD}
            repeated = whole & taken
            taken |= whole
            items = [item for item in plan.items if item.index not in repeated]
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._copies:
            return self._copies[index.fqn]
        return super().lookup_object(index)


class DigestingWriter(FileSystemWriter):
    """Writes the files of this process, one for its data, and keeps their checksums.

    Args:
        directory: to write into.
        process_count: number of processes that write.
    """

    def __init__(self, directory: Path, process_count: int) -> None:
        # One file, by one thread: an error in another one would be lost.
        super().__init__(directory, single_file_per_rank=True, thread_count=1, sync_files=True)
        self._files = _DigestingFiles()
        self.fs = self._files
        self._process_count = process_count
        self._names: dict[tuple[str, int, int], str] = {}

    @property
    def error(self) -> OSError | None:
        """What the system refused, which torch tells without its number."""
        return self._files.error

    def storage_meta(self) -> StorageMeta | None:
        # Where the files lay while they were written is no matter of those who read them.
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if len(plan.items) * self._process_count > _MOST_PARTS:
            self._files.least_part = _RANGE
        written = super().write_data(plan, planner)
        for result in written.value():
            place = result.storage_data
            key = place.relative_path, place.offset, place.length
            self._names[key] = result.index.fqn
        return written

    def digests(self) -> dict[str, FileDigest]:
        """What each file must hold that this process has written, by its name."""
        return {
            name: FileDigest(
                tuple(
                    Part(size, checksum, self._names.get((name, start, size), ""))
                    for start, size, checksum in parts
                )
            )
            for name, parts in self._files.parts.items()
        }


class _DigestingFiles(FileSystem):
    """A file system of torch.distributed.checkpoint, of which new files are digested.

    Attributes:
        parts: of each file by its name: offset, size and checksum.
        least_part: size in bytes from which on a part may end.
        error: what the system refused first.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[tuple[int, int, str]]] = {}
        self.least_part = 0
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        try:
            with open(path, mode) as file:
                digested = _DigestedFile(cast(BinaryIO, file), self.least_part)
                yield digested
            self.parts[Path(path).name] = digested.finish()
        except OSError as error:
            self.error = self.error or error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.parts[Path(new_path).name] = self.parts.pop(Path(path).name)


class _DigestedFile(IOBase):
    """A file that is written from its start to its end, and digested.

    A part of it ends where the position is asked for: between what is written for one tensor and
    for the next.
    """

    def __init__(self, file: BinaryIO, least_part: int) -> None:
        super().__init__()
        self._file = file
        self._least_part = least_part
        self._parts: list[tuple[int, int, str]] = []
        self._start = self._end = 0
        self._digest = Digest()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._end += len(view)
        return len(view)

    def tell(self) -> int:
        if self._end - self._start > self._least_part:
            self._end_part()
        return self._end

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        super().close()
        self._file.close()

    def finish(self) -> list[tuple[int, int, str]]:
        """All parts: offset, size and checksum."""
        if self._end > self._start:
            self._end_part()
        return self._parts

    def _end_part(self) -> None:
        self._parts.append((self._start, self._end - self._start, self._digest.checksum()))
        self._start, self._digest = self._end, Digest()
