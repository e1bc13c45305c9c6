"""Tensors of which it is known where they lie in a file, as a source."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from checkpointing.formats.inert_pickle import StoredTensor
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta
from checkpointing.storage.page_in import mapped_rows
from checkpointing.storage.safetensors_file import unsupported_dtype
from checkpointing.storage.safetensors_header import SAFETENSORS_DTYPES


def stored_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> LazyTensors:
    """Tensors that view a map of a file, which is made when the first of them is read.

    Args:
        path: the file.
        tensors: where each lies in it, by name.

    Raises:
        CorruptCheckpointError: if a tensor has a dtype that no weight has.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise unsupported_dtype(path, f"{name} has dtype {tensor.dtype}")

    @cache
    def data() -> torch.UntypedStorage:
        mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        assert isinstance(mapped, torch.UntypedStorage)
        return mapped

    def rows(name: str) -> Rows:
        return mapped_rows(_view(data(), tensors[name]), name)

    metas = {name: TensorMeta(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return LazyTensors(metas, {name: partial(rows, name) for name in tensors})


def _view(data: torch.UntypedStorage, stored: StoredTensor) -> Tensor:
    storage = data[stored.offset : stored.offset + stored.nbytes]
    if stored.offset % stored.dtype.itemsize:
        storage = storage.clone()
    empty = torch.empty(0, dtype=stored.dtype)
    return empty.set_(storage, stored.first, stored.shape, stored.stride).contiguous()
