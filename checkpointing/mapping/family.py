"""A model family: its native modules, and where each is found in the foreign layouts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from checkpointing.mapping.axis_ops import RopeOrder
from checkpointing.mapping.rules import EXPERT, LAYER, Dropped, Module, Rule, Tied


@dataclass(frozen=True)
class Family:
    """Data of a family. The tables are checked when the family is made.

    Attributes:
        name: ``model_type`` in the family's ``config.json``.
        modules: the native modules.
        formats: for each foreign format the rules for all of the modules.
        hf_defaults: what transformers takes where ``config.json`` lacks a field. Sizes that the
            tensors show (layers, vocabulary, widths) are read from them instead.
        hf_fields: names in config.json of further sizes, by field of ``Dims``; the first that is
            there counts.
        hf_aliases: for a field of config.json, values that transformers takes for others.
        fused_in_engines: last names of native modules that inference engines compute as one, so
            that an adapter for them must name all of a group or none.
        rotates_halves: the native decoder rotates the first half of a head against the second,
            and not neighbouring pairs.
        hf_rotates_halves: so does Hugging Face's. Where the two differ, rows are permuted.
        hf_base: what transformers writes before the names of a decoder that is part of a model.
        hf_class: the class of transformers that loads such a model also out of a larger one.
        in_peft: PEFT names a module as its tensors are stored, so adapters may go there and back.
        norm_offset: what the RMS norms add to their scale.
        renamed_in_transformers: parts of module names in checkpoints, and what transformers' model
            calls them.
        bare_in_transformers: native modules that transformers holds as parameters of others.
        task_type: what the model is for, in PEFT's words.
        scaled_embedding: token embeddings are multiplied with the square root of their width.
    """

    name: str
    modules: tuple[Module, ...]
    formats: Mapping[str, tuple[Rule | Tied | Dropped, ...]]
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    hf_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fused_in_engines: tuple[tuple[str, ...], ...] = ()
    rotates_halves: bool = False
    hf_rotates_halves: bool = True
    hf_base: str = "model."
    hf_class: str = ""
    in_peft: bool = True
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    renamed_in_transformers: Mapping[str, str] = field(default_factory=dict)
    bare_in_transformers: tuple[str, ...] = ()
    task_type: str = "CAUSAL_LM"

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
                if isinstance(rule, Rule) and not self._counts_alike(rule):
                    raise ValueError(f"family {self.name}, {where}: {rule} loses layer or expert")
                if isinstance(rule, Rule) and rule.groups and not self._rows_first(rule):
                    raise ValueError(f"family {self.name}, {where}: {rule} groups no first axis")
        if (self.rotates_halves != self.hf_rotates_halves) != ("hf" in permuted):
            raise ValueError(
                f"family {self.name}: rows are permuted if and only if one of the native decoder "
                "and Hugging Face's rotates halves and the other pairs"
            )

    def _counts_alike(self, rule: Rule) -> bool:
        """Whether either side of a rule says which layer and which expert it is."""
        split = any(
            "expert" in set(parameter.axes) - set(parameter.foreign_axes)
            for parameter in self.module(rule.native).parameters
        )
        layered = LAYER in rule.native, LAYER in rule.foreign
        return layered[0] == layered[1] and split == (EXPERT in rule.foreign)

    def _rows_first(self, rule: Rule) -> bool:
        """Whether the axis along which a rule fuses is the first one of every tensor."""
        parameters = self.module(rule.native).parameters
        return all(parameter.foreign_axes[0] == rule.along for parameter in parameters)

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

    def name_in_transformers(self, module: str) -> str:
        """What transformers' model calls a module that checkpoints name so."""
        for stored, name in self.renamed_in_transformers.items():
            module = module.replace(stored, name)
        return module

    @cached_property
    def _by_name(self) -> dict[str, Module]:
        return {module.name: module for module in self.modules}


def _place(rule: Rule | Dropped) -> str:
    if not isinstance(rule, Rule):
        return rule.foreign
    part = "" if rule.part is None else f", part {rule.part}"
    return f"{rule.foreign}{part}{rule.layers and f' in {rule.layers}'}"


def _check_once(family: str, where: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    odd = [name for name in names if set(re.findall(r"{.*?}", name)) - {LAYER, EXPERT}]
    if twice or odd:
        raise ValueError(f"family {family}, {where}: named twice {twice}, unknown place {odd}")
