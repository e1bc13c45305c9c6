"""Reading ``.safetensors`` files.

Layout: 8 bytes little-endian length of the header, the header, the tensors' data
(https://github.com/huggingface/safetensors#format).
"""

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from checkpointing.errors import (
    CheckpointingError,
    CorruptCheckpointError,
    OutOfMemoryError,
)
from checkpointing.mapping.tensors import Rows
from checkpointing.storage.page_in import mapped_rows
from checkpointing.storage.safetensors_header import (
    DTYPE_BY_NAME,
    UnsupportedDtypeError,
    parse_header,
)

_LENGTH_BYTES = 8
# The format's own limit.
_MAX_HEADER = 100_000_000
# asm-generic/mman-common.h: no claim on memory for all of it, which is denied to a private map of a
# file that is larger than the memory.
_NO_RESERVE = 0x4000


class SafetensorsSource:
    """The tensors of one ``.safetensors`` file, as views of its memory map.

    The map is private: what is written into a tensor never reaches the file. It is kept as long as
    one of its tensors is.

    Attributes:
        metas: in the order of the names.

    Raises:
        CorruptCheckpointError: if the header is damaged, or not what the format says; if the file
            is truncated; if a tensor is of a dtype that is not supported.
    """

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            if size < _LENGTH_BYTES:
                raise ValueError("it has no header")
            # Of this map all is read, the header too, so that it is of one file if another takes
            # its name meanwhile.
            self._storage = _mapped(path, size)
            length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
            self._data = _LENGTH_BYTES + length
            if length > _MAX_HEADER or self._data > size:
                raise ValueError(f"its header claims to have {length} bytes")
            self._header = parse_header(self._bytes(_LENGTH_BYTES, self._data), size - self._data)
        except UnsupportedDtypeError as error:
            raise unsupported_dtype(path, error) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise unreadable(path, error) from error
        self.metas = self._header.metas

    def _bytes(self, begin: int, end: int) -> bytes:
        return ctypes.string_at(self._storage.data_ptr() + begin, end - begin)

    def read(self, name: str) -> Tensor:
        meta = self.metas[name]
        tensor = torch.empty(0, dtype=meta.dtype, device="cpu")
        if not meta.nbytes:
            return tensor.reshape(meta.shape)
        begin = self._data + self._header.begins[name]
        storage = self._storage[begin : begin + meta.nbytes]
        if begin % meta.dtype.itemsize:
            # Elements must lie at multiples of their size, which the format does not ask for.
            storage = storage.clone()
        return tensor.set_(storage).reshape(meta.shape)

    def rows(self, name: str) -> Rows:
        return mapped_rows(self.read(name), name)


def _mapped(path: Path, size: int) -> torch.UntypedStorage:
    flags = mmap.MAP_PRIVATE | (_NO_RESERVE if sys.platform == "linux" else 0)
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def unreadable(path: Path, error: Exception) -> CheckpointingError:
    """What to raise for a file that is damaged, truncated, not what its name says, or too large."""
    reason = (str(error).strip() or type(error).__name__).split("\n")[0]
    if os.strerror(errno.ENOMEM) in reason:
        return OutOfMemoryError(
            f"{path} ({path.stat().st_size} bytes): cannot be mapped ({reason}); raise the limit "
            "on memory (`ulimit -d` or `ulimit -v`), which counts mapped files too"
        )
    return CorruptCheckpointError(
        f"{path} ({path.stat().st_size} bytes): cannot be read ({reason}); "
        "the file is damaged, truncated or no tensor file: get it anew"
    )


def unsupported_dtype(path: Path, problem: object) -> CorruptCheckpointError:
    """What to raise for a tensor of a dtype that is not supported."""
    return CorruptCheckpointError(
        f"{path}: {problem}, which is not supported; convert it to one of {sorted(DTYPE_BY_NAME)}"
    )
