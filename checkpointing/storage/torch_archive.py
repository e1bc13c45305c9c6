"""The format of ``torch.save``, for tensors whose data is written in any order.

Layout: that of torch 2.13 (``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``), a
zip archive (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT) in which nothing is
compressed. The entries, their order and content and the offsets of their data are those of
``torch.save``. It writes CRC-32 and size behind the data, as a descriptor; here both stand in the
header before it, and the next header is longer instead, since ``torch.load`` can compute offsets.
"""

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from struct import pack
from typing import Any
from zlib import crc32

import torch

from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import TensorMeta

# The other dtypes have no storage class of their own.
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_ALIGNMENT = 64
_ID, _ID_DIGITS = ".data/serialization_id", 40
_LOCAL_HEADER, _FIELD_HEADER = 30, 4
_UTF8_PATHS = 1 << 11
# Of 64 bits is the field for a number as large as this, or larger (Zip64).
_MAX_32, _MAX_16 = 0xFFFFFFFF, 0xFFFF


class TorchArchive:
    """Where everything lies in a file that ``torch.load`` reads.

    Args:
        metas: shape and dtype of each tensor, by name.
        copies: names of tensors that are others over again, and of these, which come before them:
            they share the data, as tied weights do.
        name: of the directory in the archive, without a slash.
        content: what the file holds: plain data, in which there are tensors; those of a dictionary
            of them by name if not given.
        name_of: name of each tensor in the content, by its ``id``.

    Raises:
        ConfigError: if the content has a tensor that has no name.

    Attributes:
        metas: shape and dtype of each tensor.
        size: of the file, in bytes.
        offsets: where each tensor's data begins in the file, in bytes; a multiple of 64. The data
            are the tensor's elements in row-major order, little-endian. Copies are left out.
    """

    def __init__(
        self,
        metas: Mapping[str, TensorMeta],
        copies: Mapping[str, str] | None = None,
        name: str = "archive",
        content: object = None,
        name_of: Mapping[int, str] | None = None,
    ) -> None:
        self.metas = metas
        copies = copies or {}
        before = {
            "data.pkl": _pickle(metas, copies, content, name_of or {}),
            ".format_version": b"1",
            ".storage_alignment": str(_ALIGNMENT).encode(),
            "byteorder": b"little",
        }
        self._tensors = {
            f"data/{index}": tensor for index, tensor in enumerate(_without(metas, copies))
        }
        self._contents = before | {"version": b"3\n"}
        sizes = {key: len(content) for key, content in before.items()}
        sizes |= {key: metas[tensor].nbytes for key, tensor in self._tensors.items()}
        sizes |= {"version": len(self._contents["version"]), _ID: _ID_DIGITS}
        self._entries = dict(_place(name, sizes))
        self.offsets = {tensor: self._entries[key].data for key, tensor in self._tensors.items()}
        start, end = self.pieces(dict.fromkeys(self.offsets, 0))[-1]
        self.size = start + len(end)

    def pieces(self, crcs: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """All of the file that is no tensor's data.

        Args:
            crcs: CRC-32 of each tensor's data, by name; of copies none.

        Returns:
            Offsets in the file, ascending, and the bytes from there on. Together with the tensors'
            data they are the whole file, without a gap or an overlap.
        """
        crc_of = {key: crcs[tensor] for key, tensor in self._tensors.items()}
        identity = self._contents["data.pkl"] + pack(f"<{len(crc_of)}I", *crc_of.values())
        # torch only logs it: a number that tells this content from any other.
        number = int.from_bytes(hashlib.sha256(identity).digest()[:16], "big")
        contents = self._contents | {_ID: f"{number:0{_ID_DIGITS}}".encode()}
        crc_of |= {key: crc32(content) for key, content in contents.items()}
        pieces, directory = [], []
        for key, entry in self._entries.items():
            header = entry.local_header(crc_of[key])
            pieces.append((entry.header, header + contents.get(key, b"")))
            directory.append(entry.central_header(crc_of[key]))
        start = entry.data + entry.size
        return [*pieces, (start, _end_of_archive(start, directory))]


@dataclass(frozen=True)
class _Entry:
    path: bytes
    header: int
    data: int
    size: int

    def local_header(self, crc: int) -> bytes:
        extra = _zip64(self.size, self.size) if self.size >= _MAX_32 else b""
        room = self.data - self.header - _LOCAL_HEADER - len(self.path) - len(extra)
        padding = room - _FIELD_HEADER
        extra += pack("<2sH", b"FB", padding) + b"Z" * padding
        size = min(self.size, _MAX_32)
        fields = (0, _UTF8_PATHS, 0, 0, 0, crc, size, size, len(self.path), len(extra))
        return pack("<4s5H3I2H", b"PK\3\4", *fields) + self.path + extra

    def central_header(self, crc: int) -> bytes:
        extra = _zip64(*(n for n in (self.size, self.size, self.header) if n >= _MAX_32))
        size, header = min(self.size, _MAX_32), min(self.header, _MAX_32)
        fields = (0, 0, _UTF8_PATHS, 0, 0, 0, crc, size, size, len(self.path), len(extra))
        return pack("<4s6H3I5H2I", b"PK\1\2", *fields, 0, 0, 0, 0, header) + self.path + extra


def _zip64(*numbers: int) -> bytes:
    return pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _place(name: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, _Entry]]:
    # `theirs` is where torch.save has the header, and torch.load assumes it.
    header = theirs = 0
    for key, size in sizes.items():
        path = f"{name}/{key}".encode()
        large, far = size >= _MAX_32, theirs >= _MAX_32
        data = theirs + _LOCAL_HEADER + len(path) + _FIELD_HEADER
        if large or far:
            data += _FIELD_HEADER + 16 * large + 8 * far
        data += -data % _ALIGNMENT
        yield key, _Entry(path, header, data, size)
        header = theirs = data + size
        if size:
            theirs += 24 if large or far else 16


def _end_of_archive(start: int, directory: list[bytes]) -> bytes:
    content, count = b"".join(directory), len(directory)
    size, end = len(content), start + len(content)
    # Made and to be read by version 4.5, which has Zip64; on Unix. As torch.save says.
    content += pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 0x2D, 0, 0, count, count, size, start)
    content += pack("<4sIQI", b"PK\6\7", 0, end, 1)
    counts = [min(count, _MAX_16)] * 2
    sizes = min(size, _MAX_32), min(start, _MAX_32)
    return content + pack("<4s4H2IH", b"PK\5\6", 0, 0, *counts, *sizes, 0)


@dataclass(frozen=True)
class _Storage:
    persistent_id: tuple[Any, ...]


@dataclass(frozen=True)
class _Tensor:
    """Pickled as the tensor that it describes, whose data is not there."""

    key: str
    meta: TensorMeta

    def __reduce__(self) -> tuple[Any, ...]:
        dtype = self.meta.dtype
        tensor = torch.empty(self.meta.shape, dtype=dtype, device="meta")
        layout: tuple[Any, ...] = (0, tuple(tensor.shape), tensor.stride(), False, OrderedDict())
        if dtype in _STORAGES:
            storage = _Storage(("storage", _STORAGES[dtype], self.key, "cpu", tensor.numel()))
            return torch._utils._rebuild_tensor_v2, (storage, *layout)
        storage = _Storage(("storage", torch.UntypedStorage, self.key, "cpu", self.meta.nbytes))
        return torch._utils._rebuild_tensor_v3, (storage, *layout, dtype)


class _Pickler(pickle.Pickler):
    def __init__(self, file: BytesIO, tensors: Mapping[int, _Tensor]) -> None:
        super().__init__(file, protocol=2)
        self._tensors = tensors

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        return obj.persistent_id if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: object) -> Any:
        tensor = self._tensors.get(id(obj))
        if tensor is None and isinstance(obj, torch.Tensor):
            raise ConfigError(
                f"a {type(obj).__name__} of the shape {list(obj.shape)} cannot be saved beside "
                "tensors in shards; turn it into plain tensors in dictionaries and lists"
            )
        return NotImplemented if tensor is None else tensor.__reduce__()


def _without(metas: Mapping[str, TensorMeta], copies: Mapping[str, str]) -> list[str]:
    return [name for name in metas if name not in copies]


def _pickle(
    metas: Mapping[str, TensorMeta],
    copies: Mapping[str, str],
    content: object,
    name_of: Mapping[int, str],
) -> bytes:
    buffer = BytesIO()
    keys = {name: str(index) for index, name in enumerate(_without(metas, copies))}
    tensors = {name: _Tensor(keys[copies.get(name, name)], meta) for name, meta in metas.items()}
    pickler = _Pickler(buffer, {key: tensors[name] for key, name in name_of.items()})
    pickler.dump(tensors if content is None else content)
    return buffer.getvalue()
