"""The file formats of tensors, a few rows of which are in memory at a time."""

import ctypes
import json
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource, meta_of
from checkpointing.storage.new_file import NewFile, PlacedTensor, Progress
from checkpointing.storage.safetensors_header import SAFETENSORS_DTYPES
from checkpointing.storage.tensor_bytes import named_tensors
from checkpointing.storage.torch_archive import TorchArchive


def parse_size(size: str | int) -> int:
    """Bytes in ``"5GB"`` (10**9), ``"200MiB"`` (2**20) or a plain number.

    Raises:
        ConfigError: if it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if match is not None:
        base = 1024 if match[3] else 1000
        nbytes = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
        if nbytes > 0:
            return nbytes
    raise ConfigError(f"max_shard_size: {size!r} is no size; write for example 5GB or 500MB")


def plan_shards(metas: Mapping[str, TensorMeta], max_bytes: int | None) -> list[list[str]]:
    """Names of the tensors of each file, in order; a larger tensor gets a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, meta in metas.items():
        if shards[-1] and max_bytes is not None and filled + meta.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += meta.nbytes
    return shards


def write_safetensors(
    file: NewFile, source: TensorSource, names: Sequence[str], progress: Progress
) -> None:
    """Writes the content of a ``.safetensors`` file.

    Layout: 8 bytes little-endian length of the header, the JSON header padded with spaces to a
    multiple of 8, the tensors' data (https://github.com/huggingface/safetensors#format).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name in names:
        meta = source.metas[name]
        ends.append(ends[-1] + meta.nbytes)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": ends[-2:],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    file.set_size(start + ends[-1])
    file.write(0, len(encoded).to_bytes(8, "little") + encoded)
    offsets = {name: start + end for name, end in zip(names, ends, strict=False)}
    file.write_tensors(_placed(source, offsets), source, progress)


def write_torch_file(
    file: NewFile, source: TensorSource, names: Sequence[str], progress: Progress
) -> None:
    """Writes a state dict as ``torch.save`` does."""
    metas = {name: source.metas[name] for name in names}
    copies = source.copies if isinstance(source, LazyTensors) else {}
    archive = TorchArchive(metas, {n: own for n, own in copies.items() if {n, own} <= set(metas)})
    write_archive(file, archive, source, progress)
    progress(sum(metas[name].nbytes for name in names if name not in archive.offsets))


def write_archive(
    file: NewFile, archive: TorchArchive, source: TensorSource, progress: Progress
) -> None:
    """Writes a file of ``torch.save``.

    Args:
        file: new.
        archive: where everything lies in it.
        source: the tensors.
        progress: called by several threads.
    """
    # Imported here: few files are of this kind.
    from zlib_ng.zlib_ng import crc32, crc32_combine

    file.set_size(archive.size)
    ranges = file.write_tensors(_placed(source, archive.offsets), source, progress, crc32)
    crcs = {}
    for name in archive.offsets:
        crcs[name] = 0
        for crc, size in ranges[name]:
            crcs[name] = crc32_combine(crcs[name], crc, size)
    for offset, piece in archive.pieces(crcs):
        file.write(offset, piece)


def _placed(source: TensorSource, offsets: Mapping[str, int]) -> list[PlacedTensor]:
    return [PlacedTensor(name, source.metas[name], offset) for name, offset in offsets.items()]


def tensors_by_name(content: object) -> dict[str, Tensor]:
    """The tensors in plain data, each once, by the path to it; a path that is taken gets longer."""
    first: dict[int, tuple[str, Tensor]] = {}
    for path, tensor in named_tensors(content):
        first.setdefault(id(tensor), (path, tensor))
    tensors: dict[str, Tensor] = {}
    for path, tensor in first.values():
        while path in tensors:
            path += "'"
        tensors[path] = tensor
    return tensors


def archive_of(content: object) -> TorchArchive:
    """Where plain data and the tensors in it lie in a file, by :func:`tensors_by_name`.

    Raises:
        ConfigError: if a tensor is neither plain nor in shards.
    """
    tensors = tensors_by_name(content)
    metas = {name: meta_of(tensor) for name, tensor in tensors.items()}
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    return TorchArchive(metas, content=content, name_of=name_of)


def write_torch_object(file: NewFile, content: object) -> None:
    """Writes plain data and tensors with ``torch.save``."""
    stream = _Stream(file, content)
    torch.save(content, stream)  # type: ignore[arg-type]  # it has what torch.save uses
    stream.flush()


class _Stream:
    """A file that is written from its start to its end, as ``torch.save`` does.

    It is given the memory of tensors as it is, which tells whose data it is.
    """

    def __init__(self, file: NewFile, content: object) -> None:
        self._file = file
        self._end = 0
        self._small = bytearray()
        self._names = {
            (storage.data_ptr(), storage.nbytes()): name
            for name, tensor in named_tensors(content)
            if (storage := tensor.untyped_storage()).nbytes()
        }

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of the data."""
        view = memoryview(data).cast("B")
        name = self._names.get((_address(view), len(view)), "")
        if name or len(view) >= _LARGE:
            self.flush()
            self._file.write(self._end, view, name)
            self._end += len(view)
        else:
            self._small += view
            if len(self._small) >= _GATHERED:
                self.flush()
        return len(view)

    def flush(self) -> None:
        """Writes what was gathered of small pieces."""
        if self._small:
            self._file.write(self._end, memoryview(self._small))
            self._end += len(self._small)
            self._small = bytearray()


_LARGE, _GATHERED = 1 << 20, 1 << 26


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of Python's C interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview) -> int:
    """Where the bytes lie, which a view does not tell if it may not be written."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address
