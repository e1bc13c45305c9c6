"""A model family: its native modules, and where each is found in the foreign layouts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        fused_in_engines: last names of native modules that inference engines compute as one, so
            that an adapter for them must name all of a group or none.
    """

    name: str
    modules: tuple[Module, ...]
    formats: Mapping[str, tuple[Rule | Tied | Dropped, ...]]
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    fused_in_engines: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        native = [module.name for module in self.modules]
        _check_once(self.name, "native modules", native)
        for name, rules in self.formats.items():
            where = f"rules for {name}"
            own = [rule.native for rule in rules if isinstance(rule, Rule)]
            _check_once(self.name, where, own)
            _check_once(self.name, where, [r.foreign for r in rules if not isinstance(r, Tied)])
            if set(own) != set(native):
                odd = sorted(set(own) ^ set(native))
                raise ValueError(f"family {self.name}, {where}: not exactly one rule each: {odd}")
            for rule in rules:
                if isinstance(rule, Rule) and (LAYER in rule.native) != (LAYER in rule.foreign):
                    raise ValueError(f"family {self.name}, {where}: {rule} loses the layer")

    def rules(self, format: str) -> tuple[Rule | Tied | Dropped, ...]:
        """The rules of a foreign format, or for ``"native"`` those that change no name."""
        if format != "native":
            return self.formats[format]
        ties = [rule for rule in next(iter(self.formats.values())) if isinstance(rule, Tied)]
        return (*(Rule(module.name, module.name) for module in self.modules), *ties)

    def module(self, name: str) -> Module:
        """The native module of that name or pattern."""
        return next(module for module in self.modules if module.name == name)


def _check_once(family: str, where: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    odd = [name for name in names if set(re.findall(r"{.*?}", name)) - {LAYER}]
    if twice or odd:
        raise ValueError(f"family {family}, {where}: named twice {twice}, unknown place {odd}")
