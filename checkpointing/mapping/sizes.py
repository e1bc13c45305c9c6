"""Sizes that a config file leaves out, read from the tensors."""

from collections.abc import Mapping

from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import LAYER, Rule
from checkpointing.mapping.tensors import TensorMeta


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
            meta = foreign.get(f"{rule.foreign.replace(LAYER, '0')}.{parameter.foreign}")
            sizes = {"out": module.out, "in": module.in_}
            for dim, axis in enumerate(parameter.axes):
                if axis == "out" and rule.part is not None:
                    continue
                if sizes[axis] == field and meta is not None and dim < len(meta.shape):
                    return meta.shape[dim]
    return None


def _layers(family: Family, format: str, foreign: Mapping[str, TensorMeta]) -> int | None:
    rule = next(rule for rule in _rules(family, format) if LAYER in rule.foreign)
    before = rule.foreign.split(LAYER)[0]
    numbers = [
        int(number)
        for name in foreign
        if name.startswith(before) and (number := name[len(before) :].split(".")[0]).isdigit()
    ]
    return max(numbers) + 1 if numbers else None


def _rules(family: Family, format: str) -> list[Rule]:
    return [rule for rule in family.rules(format) if isinstance(rule, Rule)]
