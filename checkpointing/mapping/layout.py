"""A family's rules, written out for a model's sizes: which tensor is which."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from torch import Tensor

from checkpointing.mapping.axis_ops import IDENTITY, AxisOp
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.rules import (
    EXPERT,
    LAYER,
    Dropped,
    Module,
    Parameter,
    Rule,
    Tied,
    expand,
    lengths,
)
from checkpointing.mapping.tensors import Rows


@dataclass(frozen=True, slots=True)
class ModulePair:
    """One native module and its foreign counterpart, by full names.

    Where the layouts group modules differently, each is the part that both have: of a fused
    foreign module the rows of one native one, of stacked native experts a single one.

    Attributes:
        native: name of the native module, which the pairs of its experts share.
        foreign: name of the foreign module, which others may share if it is fused.
        module: what the native module is.
        rule: how its tensors are carried over.
        dims: sizes of the model.
        start: where this module begins in the foreign one, on the axis along which that is fused.
        foreign_length: length of this axis of the foreign module.
        groups: number of groups on this axis, each with an equal piece of every part; ``start`` is
            as if there were one.
        expert: which of the native module's experts this is; ``None`` if it has none, or if they
            are stacked in the foreign module too.
    """

    native: str
    foreign: str
    module: Module
    rule: Rule
    dims: Dims
    start: int
    foreign_length: int
    groups: int = 1
    expert: int | None = None

    def to_foreign(self, tensor: Tensor, parameter: Parameter) -> Tensor:
        """Carries a parameter's tensor from the native to the foreign layout; exact.

        Of an expert it is :meth:`slice_of` the native tensor. If the foreign module is fused, the
        result is its part of the foreign tensor.
        """
        native, foreign = self._axes(parameter)
        if parameter.recast is not None:
            return parameter.recast.to_foreign(tensor, self.dims)
        tensor = _reordered(tensor, native, foreign)
        for dim, op in self._ops(foreign):
            tensor = op.to_foreign(tensor, dim, self.dims)
        return tensor

    def to_native(self, tensor: Tensor, parameter: Parameter) -> Tensor:
        """The exact inverse of :meth:`to_foreign`."""
        native, foreign = self._axes(parameter)
        if parameter.recast is not None:
            return parameter.recast.to_native(tensor, self.dims)
        for dim, op in self._ops(foreign):
            tensor = op.to_native(tensor, dim, self.dims)
        return _reordered(tensor, foreign, native)

    def native_shape(self, parameter: Parameter, rank: int = 0) -> tuple[int, ...]:
        """Shape of a parameter in the native layout, with all experts."""
        return self.module.shape(parameter, self.dims, rank)

    def foreign_shape(self, parameter: Parameter, rank: int = 0) -> tuple[int, ...]:
        """Shape of the foreign tensor, with all fused parts. No op changes the size of an axis."""
        sizes = self.module.sizes(self.dims, rank)
        sizes[self.rule.along] = self.foreign_length
        return lengths(self._axes(parameter)[1], sizes, self.dims)

    def part_of(self, foreign: Tensor, parameter: Parameter) -> Tensor:
        """This module's part of a foreign tensor; a view of it unless it lies in groups."""
        return self.part_of_rows(Rows.of(foreign), parameter).read_all()

    def put_part(self, part: Tensor, foreign: Tensor, parameter: Parameter) -> None:
        """Writes this module's part into a foreign tensor, from which :meth:`part_of` gives it."""
        axes = self._axes(parameter)[1]
        if self.rule.along not in axes:
            foreign.copy_(part)
            return
        dim, taken = axes.index(self.rule.along), 0
        for start, size in self._pieces():
            foreign.narrow(dim, start, size).copy_(part.narrow(dim, taken, size))
            taken += size

    def slice_of(self, native: Tensor, parameter: Parameter) -> Tensor:
        """This expert's slice of a native tensor, or all of it; a view of it."""
        if self.expert is None:
            return native
        return self.slice_of_rows(Rows.of(native), parameter).read_all()

    def part_of_rows(self, foreign: Rows, parameter: Parameter) -> Rows:
        """This module's part of a foreign tensor."""
        axes = self._axes(parameter)[1]
        if self.rule.along not in axes:
            return foreign
        dim, size = axes.index(self.rule.along), self.module.sizes(self.dims)[self.rule.along]
        if size == self.foreign_length:
            return foreign
        if dim == 0:
            pieces = [foreign.narrow(start, length) for start, length in self._pieces()]
            return pieces[0] if len(pieces) == 1 else Rows.concatenated(pieces)
        return foreign.map(lambda rows: rows.narrow(dim, self.start, size))

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Where each piece of this part begins in the foreign module, and how long it is."""
        size = self.module.sizes(self.dims)[self.rule.along] // self.groups
        for group in range(self.groups):
            yield (group * self.foreign_length + self.start) // self.groups, size

    def slice_of_rows(self, native: Rows, parameter: Parameter) -> Rows:
        """This expert's slice of a native tensor, or all of it."""
        if self.expert is None:
            return native
        dim, expert = parameter.axes.index("expert"), self.expert
        one = native if dim else native.narrow(expert, 1)
        shape = self._own_shape(self._axes(parameter)[0])
        return Rows.made_of([one], shape, lambda all: all[0].select(dim, expert if dim else 0))

    def rows_to_foreign(self, native: Rows, parameter: Parameter) -> Rows:
        """:meth:`to_foreign`, a few rows at a time where it works so."""
        unit = self._row_unit(parameter)
        if unit is None:
            shape = self._own_shape(self._axes(parameter)[1])
            return Rows.made_of([native], shape, lambda all: self.to_foreign(all[0], parameter))
        return native.map(lambda rows: self.to_foreign(rows, parameter), unit)

    def rows_to_native(self, foreign: Rows, parameter: Parameter) -> Rows:
        """:meth:`to_native`, a few rows at a time where it works so."""
        unit = self._row_unit(parameter)
        if unit is None:
            shape = self._own_shape(self._axes(parameter)[0])
            return Rows.made_of([foreign], shape, lambda all: self.to_native(all[0], parameter))
        return foreign.map(lambda rows: self.to_native(rows, parameter), unit)

    def _own_shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return lengths(axes, self.module.sizes(self.dims), self.dims)

    def _row_unit(self, parameter: Parameter) -> int | None:
        """Number of rows that are carried over by themselves; ``None`` if only all of them are."""
        native, foreign = self._axes(parameter)
        if parameter.recast is not None or not native or native[0] != foreign[0]:
            return None
        _, op = next(self._ops(foreign))
        return op.unit(self.dims)

    def _axes(self, parameter: Parameter) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes of this pair's native and foreign tensor."""
        if self.expert is None:
            return parameter.axes, parameter.foreign_axes
        native = tuple(axis for axis in parameter.axes if axis != "expert")
        return native, parameter.foreign_axes

    def _ops(self, axes: tuple[str, ...]) -> Iterator[tuple[int, AxisOp]]:
        by_axis = {"out": self.rule.out, "in": self.rule.in_}
        for dim, axis in enumerate(axes):
            yield dim, by_axis.get(axis, IDENTITY)


def _reordered(tensor: Tensor, axes: tuple[str, ...], wanted: tuple[str, ...]) -> Tensor:
    if axes == wanted:
        return tensor
    return tensor.permute([axes.index(axis) for axis in wanted])


class Layout:
    """All tensors of a model in the native and in one foreign layout.

    Attributes:
        family: the family.
        format: name of the foreign format, a key of ``family.formats``.
        dims: the model's sizes.
        pairs: every module that a model of these sizes has, in the order of the decoder.
    """

    def __init__(self, family: Family, format: str, dims: Dims) -> None:
        self.family = family
        self.format = format
        self.dims = dims
        entries = family.formats[format]
        self._rules = {rule.native: rule for rule in entries if isinstance(rule, Rule)}
        self._ties = {tie.native: tie for tie in entries if isinstance(tie, Tied)}
        self._dropped = [drop.foreign for drop in entries if isinstance(drop, Dropped)]
        self._places = {rule.native: self._place(rule) for rule in self._rules.values()}
        self.pairs = tuple(self._pairs())

    def _pairs(self) -> Iterator[ModulePair]:
        for stack, group in groupby(self.family.modules, key=_stack):
            modules = list(group)
            numbers = {module.name: getattr(self.dims, module.layers) for module in modules}
            for layer in sorted(set(chain(*numbers.values()))) if stack else [0]:
                for module in modules:
                    if not stack or layer in numbers[module.name]:
                        yield from self._pairs_of(module, layer)

    def _pairs_of(self, module: Module, layer: int) -> Iterator[ModulePair]:
        if self.dims.tied and module.name in self._ties:
            return
        rule = self._rules[module.name]
        native = rule.native.replace(LAYER, str(layer))
        foreign = rule.foreign.replace(LAYER, str(self._foreign_number(module, rule, layer)))
        start, length = self._places[module.name]
        groups: int = getattr(self.dims, rule.groups) if rule.groups else 1
        if EXPERT not in foreign:
            yield ModulePair(native, foreign, module, rule, self.dims, start, length, groups)
            return
        for expert in range(self.dims.experts):
            name = foreign.replace(EXPERT, str(expert))
            yield ModulePair(native, name, module, rule, self.dims, start, length, groups, expert)

    def _foreign_number(self, module: Module, rule: Rule, layer: int) -> int:
        if not rule.layers:
            return layer
        numbers: tuple[int, ...] = getattr(self.dims, rule.layers)
        return numbers[getattr(self.dims, module.layers).index(layer)]

    def _place(self, rule: Rule) -> tuple[int, int]:
        """Where the module begins in the foreign one, and how long that is."""
        sizes = {
            other.part or 0: self.family.module(other.native).sizes(self.dims).get(rule.along, 0)
            for other in self._rules.values()
            if (other.foreign, other.layers) == (rule.foreign, rule.layers)
        }
        return sum(size for part, size in sizes.items() if part < (rule.part or 0)), sum(
            sizes.values()
        )

    def parameters(self) -> Iterator[tuple[ModulePair, Parameter]]:
        """Every tensor of the model, by its module and parameter."""
        for pair in self.pairs:
            for parameter in pair.module.parameters_for(self.dims):
                yield pair, parameter

    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every native tensor, by name."""
        return {
            parameter.native_name(pair.native): pair.native_shape(parameter)
            for pair, parameter in self.parameters()
        }

    def copies(self) -> Iterator[tuple[str, ModulePair, bool]]:
        """Of a tied model: foreign weight, the module it copies, whether the format stores it."""
        if self.dims.tied:
            by_name = {pair.native: pair for pair in self.pairs}
            for tie in self._ties.values():
                foreign = f"{self._rules[tie.native].foreign}.weight"
                yield foreign, by_name[tie.to], tie.written

    def optional(self) -> set[str]:
        """Foreign tensors that may be there and hold nothing of their own."""
        dropped = {name for pattern in self._dropped for name in expand(pattern, self.dims)}
        return dropped | {foreign for foreign, _, _ in self.copies()}


def _stack(module: Module) -> str:
    """Name of the stack of layers that a module is in; empty if it is in none."""
    before, layered, _ = module.name.partition(LAYER)
    return before if layered else ""
