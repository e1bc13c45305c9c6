"""Tensors that are known before they are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import lcm
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


@dataclass(frozen=True)
class Rows:
    """A tensor that is read, or computed, in ranges of its first dimension.

    So a tensor that is larger than the memory which it may take passes through all that is done to
    it, a few rows at a time.

    Attributes:
        count: length of the first dimension; 1 for a scalar.
        unit: ranges begin and end at multiples of it. It is ``count`` for what can only be had
            whole.
        read: given where a range begins and ends, its rows; they may be a view of memory that the
            source owns. All of a scalar is its range from 0 to 1.
    """

    count: int
    unit: int
    read: Callable[[int, int], Tensor]

    @classmethod
    def whole(cls, shape: tuple[int, ...], read: Callable[[], Tensor]) -> "Rows":
        """A tensor that can only be had whole."""
        count = shape[0] if shape else 1
        return cls(count, max(count, 1), lambda start, stop: read())

    @classmethod
    def of(cls, tensor: Tensor) -> "Rows":
        """A tensor in memory; its rows are views of it."""
        if not tensor.dim():
            return cls.whole((), lambda: tensor)
        return cls(tensor.shape[0], 1, lambda start, stop: tensor[start:stop])

    @property
    def is_whole(self) -> bool:
        """It cannot be had in parts."""
        return self.unit >= self.count

    def read_all(self) -> Tensor:
        """The tensor."""
        return self.read(0, self.count)

    def map(self, convert: Callable[[Tensor], Tensor], unit: int = 1) -> "Rows":
        """What is made of each range by itself.

        Args:
            convert: makes as many rows as it is given.
            unit: number of rows that it must be given multiples of.
        """
        return Rows(self.count, lcm(self.unit, unit), lambda a, b: convert(self.read(a, b)))

    def narrow(self, start: int, count: int) -> "Rows":
        """A range of the rows as a tensor of its own."""
        if start % self.unit or (count % self.unit and start + count != self.count):
            return Rows(count, max(count, 1), lambda a, b: self.read_all()[start : start + count])
        return Rows(count, self.unit, lambda a, b: self.read(start + a, start + b))

    @classmethod
    def concatenated(cls, parts: "Sequence[Rows]") -> "Rows":
        """Tensors one after another along their first dimension."""
        ends = list(accumulate(part.count for part in parts))
        starts = [end - part.count for end, part in zip(ends, parts, strict=True)]

        def read(start: int, stop: int) -> Tensor:
            found = [
                part.read(max(start - first, 0), min(stop - first, part.count))
                for first, part in zip(starts, parts, strict=True)
                if start < first + part.count and first < stop
            ]
            return found[0] if len(found) == 1 else torch.cat(found)

        aligned = all(first % part.unit == 0 for first, part in zip(starts, parts, strict=True))
        unit = lcm(*(part.unit for part in parts)) if aligned else max(ends[-1], 1)
        return cls(ends[-1], unit, read)

    @classmethod
    def side_by_side(cls, parts: "Sequence[Rows]", dim: int) -> "Rows":
        """Tensors of as many rows, joined along another dimension than the first."""
        unit = lcm(*(part.unit for part in parts))
        return cls(
            parts[0].count, unit, lambda a, b: torch.cat([part.read(a, b) for part in parts], dim)
        )


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

    def rows(self, name: str) -> Rows:
        """The tensor, to be read in parts; nothing is read yet."""


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

    def rows(self, name: str) -> Rows:
        return Rows.of(self.read(name))


def as_source(state_dict: "Mapping[str, Tensor] | TensorSource") -> TensorSource:
    """The state dict itself where it is a source already, such as a lazily merged one."""
    if isinstance(state_dict, Mapping) and not isinstance(state_dict, LazyTensors):
        return StateDictSource(state_dict)
    return state_dict


class LazyTensors(Mapping[str, Tensor]):
    """A mapping of which each tensor is computed when it is asked for, and not kept.

    Both a ``Mapping``, so that it can stand where a state dict is expected, and a
    :class:`TensorSource`.

    Args:
        metas: shape and dtype of every tensor.
        rows: gives each tensor, to be read in parts.
        copies: names of tensors that are others over again, and of these.
    """

    def __init__(
        self,
        metas: Mapping[str, TensorMeta],
        rows: Mapping[str, Callable[[], Rows]],
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self.metas = dict(metas)
        self.copies = dict(copies or {})
        self._rows = dict(rows)

    @classmethod
    def of_whole(
        cls, metas: Mapping[str, TensorMeta], compute: Mapping[str, Callable[[], Tensor]]
    ) -> "LazyTensors":
        """Tensors that can only be computed whole."""
        return LazyTensors(
            metas,
            {name: partial(Rows.whole, metas[name].shape, one) for name, one in compute.items()},
        )

    def read(self, name: str) -> Tensor:
        return self.rows(name).read_all()

    def rows(self, name: str) -> Rows:
        return self._rows[name]()

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metas)

    def __len__(self) -> int:
        return len(self.metas)
