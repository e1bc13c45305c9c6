"""Lazy reading of tensor files: headers first, data when it is asked for.

Nothing that a file holds is run: safetensors, or ``torch.load`` with ``weights_only=True``.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import (
    CheckpointingError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from checkpointing.mapping.tensors import Rows, StateDictSource, TensorMeta, TensorSource
from checkpointing.storage.page_in import mapped_rows
from checkpointing.storage.paths import refuse_link_outside
from checkpointing.storage.safetensors_file import (
    SafetensorsSource,
    unreadable,
    unsupported_dtype,
)
from checkpointing.storage.safetensors_header import SAFETENSORS_DTYPES
from checkpointing.storage.tensor_classes import safe_classes
from checkpointing.storage.torch_file import check_torch_file

# The index of a model of 10**12 parameters has about 15 MB.
_MAX_JSON = 64 << 20
# Those of the largest number of 64 bits, and a sign.
_MAX_DIGITS = 20


def load_torch_file(path: Path, *, mmap: bool = True) -> Any:
    """What a file of ``torch.save`` holds, on the CPU; no code in it is run.

    Plain data is read: tensors, numbers, strings, and lists and dictionaries of these, and the
    states of torchao's optimizers.

    Raises:
        ConfigError: if it holds such states and torchao is missing, or has them no more.
        CheckpointNotFoundError: if the file is not there.
        CorruptCheckpointError: if it is damaged, truncated, would need to run code, or claims more
            data than it holds.
        UnsafePathError: if it is a link to a file elsewhere.
    """
    refuse_link_outside(path)
    try:
        checked = check_torch_file(path)
        # torchao is imported for a file that asks for it, and for no other.
        with torch.serialization.safe_globals(safe_classes(checked.globals, path)):
            # Files from before torch 1.6 cannot be mapped.
            mapped = mmap and checked.is_zip
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointingError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: no such file") from error
    except Exception as error:
        # A made-up pickle can make its reader raise anything.
        raise unreadable(path, error) from error


def open_tensor_file(path: Path) -> TensorSource:
    """The tensors of a ``.safetensors`` file, or of a state dict that ``torch.save`` wrote.

    Raises:
        CheckpointNotFoundError: if the file is not there.
        CorruptCheckpointError: if it cannot be read, or holds other things than tensors.
        UnsafePathError: if it is a link to a file elsewhere.
    """
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path}: no such file")
    refuse_link_outside(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource(path)
    content = load_torch_file(path)
    if not isinstance(content, Mapping):
        raise CorruptCheckpointError(
            f"{path}: holds a {type(content).__name__}, not a state dict of names and tensors"
        )
    odd = [
        str(name)
        for name, value in content.items()
        if not isinstance(value, Tensor) or not isinstance(name, str)
    ]
    if odd:
        raise CorruptCheckpointError(
            f"{path}: not a flat state dict, no tensor under {odd[:5]}; if the weights are nested "
            "in the file, save that inner dict as a file of its own"
        )
    for name, tensor in content.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise unsupported_dtype(path, f"{name} has dtype {tensor.dtype}")
    return _TorchFileSource(content)


class _TorchFileSource(StateDictSource):
    """Tensors that view a memory map."""

    def rows(self, name: str) -> Rows:
        return mapped_rows(self.read(name), name)


class FilesSource:
    """The tensors of several files as one source.

    Attributes:
        metas: of all files, in the order of the files.
        file_of: the file that holds each tensor.

    Raises:
        CorruptCheckpointError: if a tensor stands in two files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.metas: dict[str, TensorMeta] = {}
        self.file_of: dict[str, Path] = {}
        self._sources: dict[Path, TensorSource] = {}
        for path in paths:
            source = self._sources[path] = open_tensor_file(path)
            twice = [name for name in source.metas if name in self.metas]
            if twice:
                raise CorruptCheckpointError(
                    f"{path}: {twice[0]} (and {len(twice) - 1} more) also stands in "
                    f"{self.file_of[twice[0]]}; name only the files of one checkpoint"
                )
            self.metas.update(source.metas)
            self.file_of.update(dict.fromkeys(source.metas, path))

    def read(self, name: str) -> Tensor:
        return self._sources[self.file_of[name]].read(name)

    def rows(self, name: str) -> Rows:
        return self._sources[self.file_of[name]].rows(name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    A whole number that needs more than 64 bits is read as a floating-point number.

    Raises:
        CheckpointNotFoundError: if the file is not there.
        CorruptCheckpointError: if it is not JSON, no object, or far larger than any that a
            checkpoint needs.
        UnsafePathError: if it is a link to a file elsewhere.
    """
    refuse_link_outside(path)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON + 1)
        if len(text) > _MAX_JSON:
            raise CorruptCheckpointError(
                f"{path}: has more than {_MAX_JSON} bytes, which no file of its kind has; get it "
                "anew"
            )
        content = json.loads(text.decode(), parse_int=_whole_number)
    except CheckpointingError:
        raise
    except OSError as error:
        if path.is_file():
            raise
        raise CheckpointNotFoundError(f"{path}: no such file") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not valid JSON ({error}); get it anew") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path}: holds no JSON object; get it anew")
    return content


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)
