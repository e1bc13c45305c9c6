"""Tensors that are known before they are read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor, as a header tells them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class TensorSource(Protocol):
    """Named tensors that are read, or computed, one at a time.

    Files, state dicts, a converted and a merged model are all sources, so they can be stacked:
    converting a checkpoint is writing a source that converts a source that reads.
    """

    @property
    def metas(self) -> Mapping[str, TensorMeta]:
        """Shape and dtype of every tensor, in a fixed order; no tensor data is touched."""

    def read(self, name: str) -> Tensor:
        """The tensor; it may be a view of memory that the source owns."""


def meta_of(tensor: Tensor) -> TensorMeta:
    """Shape and dtype of a tensor in memory."""
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def shapes_of(source: TensorSource) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, by name."""
    return {name: meta.shape for name, meta in source.metas.items()}


class StateDictSource:
    """A state dict in memory, as a source. Its tensors are handed out as they are."""

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self._state_dict = state_dict
        self.metas: dict[str, TensorMeta] = {
            name: meta_of(tensor) for name, tensor in state_dict.items()
        }

    def read(self, name: str) -> Tensor:
        return self._state_dict[name].detach()


def as_source(state_dict: "Mapping[str, Tensor] | TensorSource") -> TensorSource:
    """The state dict itself where it is a source already, such as a lazily merged one."""
    if isinstance(state_dict, Mapping) and not isinstance(state_dict, LazyTensors):
        return StateDictSource(state_dict)
    return state_dict


class LazyTensors(Mapping[str, Tensor]):
    """A mapping of which each tensor is computed when it is asked for, and not kept.

    Both a ``Mapping``, so that it can stand where a state dict is expected, and a
    :class:`TensorSource`.
    """

    def __init__(
        self, metas: Mapping[str, TensorMeta], compute: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        self.metas = dict(metas)
        self._compute = dict(compute)

    def read(self, name: str) -> Tensor:
        return self._compute[name]()

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metas)

    def __len__(self) -> int:
        return len(self.metas)
