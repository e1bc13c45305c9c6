"""Files of ``torch.save`` that hold more than plain data, read without making any of it.

Trainers save their settings, optimizers and random states beside the weights, as objects of classes
of their own. Here such an object is only its class's name, what it was called with and its state:
nothing is imported or called that a file names. Tensors are where their data lies in the file.
"""

import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import IO, Any
from zipfile import ZipFile

import torch

from checkpointing.storage.torch_file import stored_records

# No file names nearly as many; each becomes a class.
_MOST_CLASSES = 10_000
_LOCAL_HEADER = 30
_KEEPING = ("PUT", "BINPUT", "LONG_BINPUT")
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class Inert:
    """Stands for an object that is not made.

    Attributes:
        path: dotted name of its class, or of the function that would make it.
        arguments: what that would be called with.
        state: what it would be filled with.
    """

    path = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any, **named: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> "Inert":
        # A function that is an attribute of something: what it would give is not made either.
        return Inert(*arguments)

    def append(self, item: Any) -> None:
        """Leaves out an item of a class of lists."""

    def extend(self, items: Any) -> None:
        """Leaves out the items of a class of lists."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@dataclass(frozen=True)
class StoredTensor:
    """Where the data of a tensor lies in a file; checked to lie within it.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        stride: in elements.
        offset: of its storage in the file, in bytes.
        nbytes: size of the storage.
        first: number of the tensor's first element in the storage.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    first: int


@dataclass(frozen=True)
class _Storage:
    offset: int
    nbytes: int
    dtype: torch.dtype


class _Function:
    """One of the functions that make tensors; callable, and nothing else."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], storages: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(file)
        self._storages = storages
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path == "collections.OrderedDict":
            return OrderedDict
        if path == "torch._utils._rebuild_tensor_v2":
            return _Function(_tensor)
        if path == "torch._utils._rebuild_tensor_v3":
            return _Function(_typed_tensor)
        if path == "torch._utils._rebuild_parameter":
            return _Function(lambda data, *_: data)
        if path == "torch.Size":
            return _Function(tuple)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if path not in self._classes:
            if len(self._classes) == _MOST_CLASSES:
                raise ValueError("it names more classes than any checkpoint has")
            self._classes[path] = type("Inert", (Inert,), {"path": path})
        return self._classes[path]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, count = pid
        dtype = _STORAGES[storage_type.path.rpartition(".")[2]]
        offset, nbytes = self._storages[key]
        if kind != "storage" or type(count) is not int or count * dtype.itemsize != nbytes:
            raise ValueError(f"it says that storage {key} has {count} elements, which it has not")
        return _Storage(offset, nbytes, dtype)


def _tensor(storage: _Storage, first: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return _checked(storage, storage.dtype, first, shape, stride)


def _typed_tensor(
    storage: _Storage, first: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any
) -> StoredTensor:
    return _checked(storage, dtype, first, shape, stride)


def _checked(
    storage: _Storage, dtype: torch.dtype, first: Any, shape: Any, stride: Any
) -> StoredTensor:
    numbers = (first, *shape, *stride)
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("it has a tensor whose shape is none")
    last = first + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    count = storage.nbytes // dtype.itemsize
    if prod(shape) > count or (prod(shape) and last >= count):
        raise ValueError(f"it has a tensor of shape {list(shape)}, more than it holds")
    return StoredTensor(dtype, tuple(shape), tuple(stride), storage.offset, storage.nbytes, first)


def read_inert(file: IO[bytes], size: int, start: int = 0) -> Any:
    """What a file of ``torch.save`` holds, with objects as :class:`Inert`.

    Args:
        file: an archive of zip, as torch writes it since 1.6.
        size: of the archive in bytes.
        start: where the archive begins in the file that offsets of tensors are counted in.

    Raises:
        Exception: of any kind, if it is no such file, or claims more than it holds.
    """
    with ZipFile(file) as archive:
        records = stored_records(archive, size)
        pickles = [name for name in records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it holds {len(pickles)} pickles, not one")
        prefix = pickles[0].removesuffix(".pkl") + "/"
        storages = {
            name.removeprefix(prefix): (
                start + _data_offset(file, record.header_offset),
                record.file_size,
            )
            for name, record in records.items()
            if name.startswith(prefix)
        }
        if any(offset + nbytes > start + size for offset, nbytes in storages.values()):
            raise ValueError("its archive claims more than it holds")
        return _load(archive.read(pickles[0]), storages)


def read_inert_pickle(content: bytes) -> Any:
    """What a pickle holds that has no tensors, with objects as :class:`Inert`.

    Raises:
        Exception: of any kind, if it is none.
    """
    return _load(content, {})


def _load(content: bytes, storages: Mapping[str, tuple[int, int]]) -> Any:
    # What is kept for later is kept by a number, and room is made for all smaller ones.
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in _KEEPING and not (argument is not None and 0 <= argument <= count):
            raise ValueError(f"its pickle keeps something under the number {argument}")
    return _Unpickler(BytesIO(content), storages).load()


def _data_offset(file: IO[bytes], header: int) -> int:
    """Where an entry's data begins, behind its header, name and extra field."""
    file.seek(header)
    fields = file.read(_LOCAL_HEADER)
    return (
        header
        + _LOCAL_HEADER
        + int.from_bytes(fields[26:28], "little")
        + int.from_bytes(fields[28:30], "little")
    )
