"""Tensors that are known before they are read."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
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
class Held:
    """A range of a tensor's rows, and the ranks of the processes that have it."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """How the rows of a tensor lie in the processes of a job; every one of them knows the same.

    Attributes:
        held: ranges that a process can read by itself, in order, together all rows; none if what
            is in one process are not whole rows, or not as many as are needed together.
        gathered: the same tensor, of which every process gets the rows that it reads, whoever
            holds them; every process must read the same ones at the same time.
        teams: how some of the processes read rows together that none has whole, if they can.
    """

    held: tuple[Held, ...]
    gathered: "Rows"
    teams: "Teams | None" = None


@dataclass(frozen=True)
class Teams:
    """Rows that a few processes of a job have together, and no other ones are needed for.

    Attributes:
        held: ranges, in order, together all rows, each with the processes that must read the same
            rows of it at the same time.
        rows: the tensor, to be read so.
    """

    held: tuple[Held, ...]
    rows: "Rows"


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
            source owns. All of a scalar is its range from 0 to 1. Of a tensor in shards it gives
            what this process holds.
        shards: where the rows are, if not all of them are in every process.
    """

    count: int
    unit: int
    read: Callable[[int, int], Tensor]
    shards: Shards | None = None

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

    @classmethod
    def made_of(
        cls,
        parts: "Sequence[Rows]",
        shape: tuple[int, ...],
        make: Callable[[Sequence[Tensor]], Tensor],
    ) -> "Rows":
        """A tensor that is made of others, each of which it needs whole."""
        whole = cls.whole(shape, lambda: make([part.read(0, part.count) for part in parts]))
        shards = [part.shards for part in parts if part.shards is not None]
        if not shards:
            return whole
        first = shards[0].held
        together = len(first) == 1 and all(
            len(one.held) == 1 and one.held[0].ranks == first[0].ranks for one in shards
        )
        held = (Held(0, whole.count, first[0].ranks),) if together else ()
        gathered = cls.made_of([part.gathered for part in parts], shape, make)
        return replace(whole, shards=Shards(held, gathered))

    @property
    def gathered(self) -> "Rows":
        """The same, to be read by every process at the same time if it lies in shards."""
        return self if self.shards is None else self.shards.gathered

    def read_all(self) -> Tensor:
        """The tensor; every process must ask for one in shards at the same time."""
        return self.gathered.read(0, self.count)

    def map(self, convert: Callable[[Tensor], Tensor], unit: int = 1) -> "Rows":
        """What is made of each range by itself.

        Args:
            convert: makes as many rows as it is given.
            unit: number of rows that it must be given multiples of.
        """
        return self.map_ranges(lambda rows, start, stop: convert(rows), unit)

    def map_ranges(self, convert: Callable[[Tensor, int, int], Tensor], unit: int = 1) -> "Rows":
        """As :meth:`map`, of what is told too where the range begins and ends."""
        shards = self.shards and Shards(
            _of_units(self.shards.held, lcm(self.unit, unit)),
            self.shards.gathered.map_ranges(convert, unit),
            _teams(
                self.shards.teams,
                lambda held: _of_units(held, lcm(self.unit, unit)),
                lambda rows: rows.map_ranges(convert, unit),
            ),
        )
        unit = lcm(self.unit, unit)
        return Rows(self.count, unit, lambda a, b: convert(self.read(a, b), a, b), shards)

    def within(self, context: Callable[[], AbstractContextManager[None]]) -> "Rows":
        """The same, read within a context."""

        def read(start: int, stop: int) -> Tensor:
            with context():
                return self.read(start, stop)

        shards = self.shards and Shards(
            self.shards.held,
            self.shards.gathered.within(context),
            _teams(self.shards.teams, tuple, lambda rows: rows.within(context)),
        )
        return replace(self, read=read, shards=shards)

    def narrow(self, start: int, count: int) -> "Rows":
        """A range of the rows as a tensor of its own."""
        stop = start + count
        if start % self.unit or (count % self.unit and stop != self.count):
            whole = Rows(count, max(count, 1), lambda a, b: self.read(0, self.count)[start:stop])
            shards = self.shards and Shards((), self.shards.gathered.narrow(start, count))
        else:
            whole = Rows(count, self.unit, lambda a, b: self.read(start + a, start + b))
            shards = self.shards and Shards(
                _cut(self.shards.held, start, stop),
                self.shards.gathered.narrow(start, count),
                _teams(
                    self.shards.teams,
                    lambda held: _cut(held, start, stop),
                    lambda rows: rows.narrow(start, count),
                ),
            )
        return replace(whole, shards=shards)

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
        held = [
            Held(first + one.start, first + one.stop, one.ranks)
            for first, part in zip(starts, parts, strict=True)
            for one in (() if part.shards is None else part.shards.held)
        ]
        shards = cls._joined(parts, _of_units(held, unit), cls.concatenated)
        return cls(ends[-1], unit, read, shards)

    @classmethod
    def side_by_side(cls, parts: "Sequence[Rows]", dim: int) -> "Rows":
        """Tensors of as many rows, joined along another dimension than the first."""
        unit = lcm(*(part.unit for part in parts))
        alike = len({part.shards and part.shards.held for part in parts}) == 1
        held = parts[0].shards.held if parts[0].shards is not None and alike else ()
        return cls(
            parts[0].count,
            unit,
            lambda a, b: torch.cat([part.read(a, b) for part in parts], dim),
            cls._joined(parts, _of_units(held, unit), lambda own: cls.side_by_side(own, dim)),
        )

    @staticmethod
    def _joined(
        parts: "Sequence[Rows]", held: tuple[Held, ...], join: "Callable[[Sequence[Rows]], Rows]"
    ) -> Shards | None:
        """The shards of parts that are joined, if any of them has shards."""
        shards = [part.shards for part in parts if part.shards is not None]
        if not shards:
            return None
        # A part that every process has, or none can read by itself, has no ranges here.
        complete = len(shards) == len(parts) and all(one.held for one in shards)
        return Shards(held if complete else (), join([part.gathered for part in parts]))


def _teams(
    teams: Teams | None,
    ranges: Callable[[Sequence[Held]], tuple[Held, ...]],
    rows: Callable[[Rows], Rows],
) -> Teams | None:
    """What teams read of something that is made of what they have, if they can."""
    held = () if teams is None else ranges(teams.held)
    return Teams(held, rows(teams.rows)) if teams is not None and held else None


def _of_units(held: Sequence[Held], unit: int) -> tuple[Held, ...]:
    """The ranges, if each begins at a multiple of the unit, and so ends at one or at the end."""
    return tuple(held) if all(one.start % unit == 0 for one in held) else ()


def _cut(held: Sequence[Held], start: int, stop: int) -> tuple[Held, ...]:
    """What of the ranges lies in another one, which the new ones are counted from."""
    return tuple(
        Held(max(one.start, start) - start, min(one.stop, stop) - start, one.ranks)
        for one in held
        if one.start < stop and start < one.stop
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


def is_sharded(source: TensorSource) -> bool:
    """Whether any of the tensors lies in shards in the processes of a job."""
    return any(source.rows(name).shards is not None for name in source.metas)


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether it is torch's tensor of which each process of a job holds a part."""
    # Nobody has one who has not imported it, which takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class StateDictSource:
    """A state dict in memory, as a source. Its tensors are handed out as they are.

    Those of which each process of a job has a part (``DTensor``) are known by their whole shape.

    Attributes:
        state_dict: the state dict.
    """

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self.state_dict = state_dict
        self.metas: dict[str, TensorMeta] = {
            name: meta_of(tensor) for name, tensor in state_dict.items()
        }

    def read(self, name: str) -> Tensor:
        tensor = self.state_dict[name].detach()
        return self.rows(name).read_all() if is_dtensor(tensor) else tensor

    def rows(self, name: str) -> Rows:
        tensor = self.state_dict[name].detach()
        if is_dtensor(tensor):
            # Imported here: it is made of what is in this module.
            from checkpointing.mapping.dtensors import rows_of_dtensor

            return rows_of_dtensor(tensor, name)
        return Rows.of(tensor)


def as_source(state_dict: "Mapping[str, Tensor] | TensorSource") -> TensorSource:
    """The state dict itself where it is a source already, such as a lazily merged one."""
    if isinstance(state_dict, Mapping) and not isinstance(state_dict, LazyTensors):
        return StateDictSource(state_dict)
    return state_dict


def cast(source: TensorSource, dtype: torch.dtype) -> "LazyTensors":
    """The same tensors, those of a floating point dtype in another one; computed when read."""
    metas = {
        name: replace(meta, dtype=dtype) if meta.dtype.is_floating_point else meta
        for name, meta in source.metas.items()
    }

    def rows(name: str) -> Rows:
        return source.rows(name).map(lambda some: some.to(metas[name].dtype))

    return LazyTensors(metas, {name: partial(rows, name) for name in metas})


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
        cls,
        metas: Mapping[str, TensorMeta],
        compute: Mapping[str, Callable[[], Tensor]],
        gathers: bool = False,
    ) -> "LazyTensors":
        """Tensors that can only be computed whole.

        Args:
            metas: shape and dtype of every tensor.
            compute: computes each tensor.
            gathers: what they are computed of lies in shards, so that every process must compute
                the same one at the same time.
        """

        def rows(name: str, one: Callable[[], Tensor]) -> Rows:
            whole = Rows.whole(metas[name].shape, one)
            return replace(whole, shards=Shards((), whole)) if gathers else whole

        return LazyTensors(metas, {name: partial(rows, name, one) for name, one in compute.items()})

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
