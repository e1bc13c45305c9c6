"""A model family: its native modules, and where each is found in the foreign layouts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from checkpointing.mapping.axis_ops import RopeOrder
from checkpointing.mapping.rules import LAYER, Dropped, Module, Rule, Tied


@dataclass(frozen=True)
class Family:
    """Data of a family. The tables are checked when the family is made.

    Attributes:
        name: ``model_type`` in the family's ``config.json``.
        modules: the native modules.
        formats: for each foreign format the rules for all of the modules.
        hf_defaults: what transformers takes where ``config.json`` lacks a field. Sizes that the
            tensors show (layers, vocabulary, widths) are read from them instead.
        hf_aliases: for a field of config.json, values that transformers takes for others.
        fused_in_engines: last names of native modules that inference engines compute as one, so
            that an adapter for them must name all of a group or none.
        rotates_halves: the native decoder rotates the first half of a head against the second,
            as Hugging Face does, and not neighbouring pairs. Then no rows are permuted.
        norm_offset: what the RMS norms add to their scale.
        scaled_embedding: token embeddings are multiplied with the square root of their width.
    """

    name: str
    modules: tuple[Module, ...]
    formats: Mapping[str, tuple[Rule | Tied | Dropped, ...]]
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    hf_aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fused_in_engines: tuple[tuple[str, ...], ...] = ()
    rotates_halves: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False

    def __post_init__(self) -> None:
        native = [module.name for module in self.modules]
        _check_once(self.name, "native modules", native)
        permuted: set[str] = set()
        for name, rules in self.formats.items():
            where = f"rules for {name}"
            own = [rule.native for rule in rules if isinstance(rule, Rule)]
            _check_once(self.name, where, own)
            _check_once(self.name, where, [_place(r) for r in rules if not isinstance(r, Tied)])
            if set(own) != set(native):
                odd = sorted(set(own) ^ set(native))
                raise ValueError(f"family {self.name}, {where}: not exactly one rule each: {odd}")
            for rule in rules:
                if isinstance(rule, Rule) and isinstance(rule.out, RopeOrder):
                    permuted.add(name)
                if isinstance(rule, Rule) and (LAYER in rule.native) != (LAYER in rule.foreign):
                    raise ValueError(f"family {self.name}, {where}: {rule} loses the layer")
        if self.rotates_halves == ("hf" in permuted):
            raise ValueError(
                f"family {self.name}: Hugging Face rotates halves, so its rows are permuted if and "
                "only if the native decoder rotates pairs"
            )

    def rules(self, format: str) -> tuple[Rule | Tied | Dropped, ...]:
        """The rules of a foreign format, or for ``"native"`` those that change no name."""
        if format != "native":
            return self.formats[format]
        ties = [rule for rule in next(iter(self.formats.values())) if isinstance(rule, Tied)]
        return (*(Rule(module.name, module.name) for module in self.modules), *ties)

    def module(self, name: str) -> Module:
        """The native module of that name or pattern."""
        return self._by_name[name]

    def has(self, name: str) -> bool:
        """Whether there is a native module of that name or pattern."""
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Module]:
        return {module.name: module for module in self.modules}


def _place(rule: Rule | Dropped) -> str:
    part = rule.part if isinstance(rule, Rule) else None
    return rule.foreign if part is None else f"{rule.foreign}, part {part}"


def _check_once(family: str, where: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    odd = [name for name in names if set(re.findall(r"{.*?}", name)) - {LAYER}]
    if twice or odd:
        raise ValueError(f"family {family}, {where}: named twice {twice}, unknown place {odd}")
