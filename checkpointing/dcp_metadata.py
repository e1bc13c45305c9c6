"""The ``.metadata`` of a checkpoint of ``torch.distributed.checkpoint``, read without running it.

The file is a pickle of plain records, which torch loads with ``pickle.load``: whoever wrote it can
have any code run. Here its instructions are followed with stand-ins in the place of all classes and
functions, only those are followed that such a file needs, and torch's own records are made of what
was found and checked.
"""

import pickle
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.errors import CheckpointingError, CheckpointNotFoundError, CorruptCheckpointError
from checkpointing.storage.paths import inside, refuse_link_outside

METADATA_NAME = ".metadata"

_KNOWN = {
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    # Where the checkpoint was written, which nobody reads.
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
}
_INSTRUCTIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.STACK_GLOBAL),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)
# More than any tensor has; torch allows as many.
_MOST_DIMENSIONS = 64


class _Record:
    """Stands for an object of a class, or for what a function was called to make."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle._Unpickler):
    """Follows the instructions of a pickle; makes nothing but plain data and records."""

    # The unpickler that is written in Python has such a table, and takes no memory in advance.
    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" not in _KNOWN:
            raise ValueError(f"it asks for {module}.{name}, which is no data, and is not run")
        # A class for this file alone, so that nothing in it can change one that others use.
        return type(name, (_Record,), {})


def read_metadata(directory: Path) -> Metadata:
    """What the files of a checkpoint hold, and where; no code in the file is run.

    Every part of every tensor is there and lies within one of the files beside it.

    Args:
        directory: the one that the file and the data lie in.

    Raises:
        CheckpointNotFoundError: if there is no such file, or not one that it names.
        CorruptCheckpointError: if it is damaged, would need to run code, or leaves out a part of a
            tensor.
        UnsafePathError: if it names a file elsewhere.
    """
    path = directory / METADATA_NAME
    refuse_link_outside(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{path}: no such file, which every checkpoint of torch.distributed.checkpoint has; "
            "correct the path, or take another checkpoint"
        ) from error
    try:
        metadata = _metadata(_Reader(BytesIO(content)).load(), path)
    except CheckpointingError:
        raise
    except Exception as error:
        # A made-up pickle can make its reader raise anything.
        raise CorruptCheckpointError(
            f"{path}: cannot be read ({error or type(error).__name__}); "
            "get the checkpoint anew, or take another one"
        ) from error
    _check_files(directory, metadata)
    return metadata


def _metadata(found: Any, path: Path) -> Metadata:
    fields = _fields(found, "Metadata")
    stored = {
        _index(index): _place(place, path) for index, place in _entries(fields["storage_data"])
    }
    tensors = {
        _text(name): _stored(entry) for name, entry in _entries(fields["state_dict_metadata"])
    }
    paths = {
        _text(name): _steps(steps) for name, steps in _entries(fields.get("planner_data") or {})
    }
    for name, entry in tensors.items():
        for index in parts_of(name, entry):
            if index not in stored:
                raise ValueError(f"it does not say where {_described(index)} lies")
    return Metadata(tensors, planner_data=paths, storage_data=stored)


def parts_of(name: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> list[MetadataIndex]:
    """The keys under which the parts of a tensor, or the one other value, are stored."""
    if isinstance(entry, BytesStorageMetadata):
        return [MetadataIndex(name)]
    return [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]


def _described(index: MetadataIndex) -> str:
    at = "" if index.offset is None else f" from {list(index.offset)} on"
    return f"{index.fqn}{at}"


def _stored(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, _Record) and type(entry).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    # A record of torch's that is pickled as a tuple, with the dtype first.
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor in it has no dtype")
    size = _numbers(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        of = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(of["offsets"]), _numbers(of["sizes"])
        ends = [at + length for at, length in zip(offsets, sizes, strict=True)]
        if any(end > whole for end, whole in zip(ends, size, strict=True)):
            raise ValueError(f"a part of a tensor in it ends at {ends}, outside of {list(size)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    held = sum(prod(chunk.sizes) for chunk in chunks)
    if held != prod(size):
        raise ValueError(f"its parts of a tensor of {prod(size)} elements have {held}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _place(place: Any, path: Path) -> _StorageInfo:
    fields = _fields(place, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError("what it describes is compressed or otherwise transformed")
    file = inside(path.parent, fields["relative_path"], path)
    start, length = _numbers((fields["offset"], fields["length"]))
    return _StorageInfo(file.name, start, length)


def _index(index: Any) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _numbers(offset))


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record):
        raise ValueError(f"it holds a {type(record).__name__} in the place of a {kind}")
    if not isinstance(record.state, dict):
        raise ValueError(f"it holds an empty {kind}")
    return record.state


def _entries(mapping: Any) -> list[tuple[Any, Any]]:
    if not isinstance(mapping, dict):
        raise ValueError(f"it holds a {type(mapping).__name__} in the place of a dictionary")
    return list(mapping.items())


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"it holds a {type(name).__name__} in the place of a name")
    return name


def _steps(steps: Any) -> tuple[str | int, ...]:
    plain = isinstance(steps, tuple) and all(isinstance(step, str | int) for step in steps)
    if not plain or not steps:
        raise ValueError("it does not say where in the state a value belongs")
    return tuple(steps)


def _numbers(numbers: Any) -> torch.Size:
    """Whole numbers from 0 on, which a file has as a tuple or as a ``torch.Size``."""
    if isinstance(numbers, _Record) and len(numbers.arguments) == 1:
        (numbers,) = numbers.arguments
    whole = isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)
    if not whole or len(numbers) > _MOST_DIMENSIONS:
        raise ValueError("it holds something else in the place of a size or a position")
    return torch.Size(numbers)


def _check_files(directory: Path, metadata: Metadata) -> None:
    """Checks that all data lies within the files that it is said to lie in."""
    ends: dict[str, int] = {}
    for place in places(metadata).values():
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    for name, end in ends.items():
        file = directory / name
        refuse_link_outside(file)
        if not file.is_file():
            raise CheckpointNotFoundError(
                f"{file}: no such file, though {METADATA_NAME} names it; the checkpoint is not "
                "whole: use another one, or its copy elsewhere"
            )
        if file.stat().st_size < end:
            raise CorruptCheckpointError(
                f"{file}: has {file.stat().st_size} bytes and should have {end}; it is truncated: "
                "use another checkpoint, or a copy of this one"
            )


def places(metadata: Metadata) -> Mapping[MetadataIndex, _StorageInfo]:
    """Where each part lies that a checkpoint holds."""
    stored: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
    return stored
