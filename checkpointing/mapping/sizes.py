"""Sizes that a config file leaves out, read from the tensors."""

import re
from collections.abc import Mapping

from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import EXPERT, LAYER, Rule
from checkpointing.mapping.tensors import TensorMeta

_LAYER_NUMBER = re.compile(r"([0-9]{1,9})(?:\.|$)")


def size_from_tensors(
    family: Family, format: str, field: str, foreign: Mapping[str, TensorMeta]
) -> int | None:
    """The size that a field of ``Dims`` must have for the tensors to fit; ``None`` if unseen.

    Only for axes whose op keeps their length, and that are not fused with others.
    """
    if field == "layers":
        return _layers(family, format, foreign)
    for rule in _rules(family, format):
        module = family.module(rule.native)
        for parameter in module.parameters:
            name = rule.foreign.replace(LAYER, "0").replace(EXPERT, "0")
            if format == "native":
                meta, axes = foreign.get(parameter.native_name(name)), parameter.axes
            else:
                meta, axes = foreign.get(parameter.foreign_name(name)), parameter.foreign_axes
            sizes = {"out": module.out, "in": module.in_}
            for dim, axis in enumerate(axes):
                if axis == rule.along and rule.part is not None:
                    continue
                if sizes.get(axis) == field and meta is not None and dim < len(meta.shape):
                    return meta.shape[dim]
    return None


def _layers(family: Family, format: str, foreign: Mapping[str, TensorMeta]) -> int | None:
    rule = next(rule for rule in _rules(family, format) if LAYER in rule.foreign)
    before = rule.foreign.split(LAYER)[0]
    numbers = [
        int(found[1])
        for name in foreign
        if name.startswith(before) and (found := _LAYER_NUMBER.match(name, len(before)))
    ]
    return max(numbers) + 1 if numbers else None


def _rules(family: Family, format: str) -> list[Rule]:
    return [rule for rule in family.rules(format) if isinstance(rule, Rule)]
