"""A family's rules, written out for a model's sizes: which tensor is which."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from checkpointing.mapping.axis_ops import IDENTITY, AxisOp
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.rules import (
    LAYER,
    Dropped,
    Module,
    Parameter,
    Rule,
    Tied,
    expand,
)


@dataclass(frozen=True)
class ModulePair:
    """One native module and its foreign counterpart, by full names.

    Attributes:
        native: name of the native module.
        foreign: name of the foreign module, which others may share if it is fused.
        module: what the native module is.
        rule: how its tensors are carried over.
        dims: sizes of the model.
        start: where this module begins on the out axis of the foreign one.
        foreign_out: length of the out axis of the foreign module.
    """

    native: str
    foreign: str
    module: Module
    rule: Rule
    dims: Dims
    start: int
    foreign_out: int

    def to_foreign(self, tensor: Tensor, parameter: Parameter) -> Tensor:
        """Carries a parameter's tensor from the native to the foreign layout; exact.

        If the foreign module is fused, this is its part of the foreign tensor.
        """
        for dim, op in self._ops(parameter):
            tensor = op.to_foreign(tensor, dim, self.dims)
        return tensor

    def to_native(self, tensor: Tensor, parameter: Parameter) -> Tensor:
        """The exact inverse of :meth:`to_foreign`."""
        for dim, op in reversed(list(self._ops(parameter))):
            tensor = op.to_native(tensor, dim, self.dims)
        return tensor

    def native_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Shape of a parameter in the native layout."""
        return self.module.shape(parameter, self.dims)

    def foreign_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Shape of the foreign tensor: the op on a tensor without data, with all fused parts."""
        native = torch.empty(self.native_shape(parameter), device="meta")
        sizes = self.to_foreign(native, parameter).shape
        return tuple(
            self.foreign_out if axis == "out" else size
            for axis, size in zip(parameter.axes, sizes, strict=True)
        )

    def part_of(self, foreign: Tensor, parameter: Parameter) -> Tensor:
        """This module's part of a foreign tensor; a view of it."""
        size = getattr(self.dims, self.module.out)
        for dim, axis in enumerate(parameter.axes):
            if axis == "out" and size != foreign.shape[dim]:
                foreign = foreign.narrow(dim, self.start, size)
        return foreign

    def _ops(self, parameter: Parameter) -> Iterator[tuple[int, AxisOp]]:
        by_axis = {"out": self.rule.out, "in": self.rule.in_, "rank": IDENTITY}
        for dim, axis in enumerate(parameter.axes):
            yield dim, by_axis[axis]


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
        self.pairs = tuple(self._pairs())

    def _pairs(self) -> Iterator[ModulePair]:
        for layered, group in groupby(self.family.modules, key=lambda m: LAYER in m.name):
            modules = list(group)
            for layer in range(self.dims.layers) if layered else [0]:
                for module in modules:
                    if self.dims.tied and module.name in self._ties:
                        continue
                    rule = self._rules[module.name]
                    native, foreign = (
                        name.replace(LAYER, str(layer)) for name in (rule.native, rule.foreign)
                    )
                    start, foreign_out = self._place(rule)
                    yield ModulePair(native, foreign, module, rule, self.dims, start, foreign_out)

    def _place(self, rule: Rule) -> tuple[int, int]:
        """Where the module begins in the foreign one, and how long that is."""
        sizes = {
            other.part or 0: getattr(self.dims, self.family.module(other.native).out)
            for other in self._rules.values()
            if other.foreign == rule.foreign
        }
        return sum(size for part, size in sizes.items() if part < (rule.part or 0)), sum(
            sizes.values()
        )

    def parameters(self) -> Iterator[tuple[ModulePair, Parameter]]:
        """Every tensor of the model, by its module and parameter."""
        for pair in self.pairs:
            for parameter in pair.module.parameters_for(self.dims):
                yield pair, parameter

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
