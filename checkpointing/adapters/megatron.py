"""Adapters by Megatron-Bridge's names, through the same rules as PEFT's.

Names (https://github.com/NVIDIA-NeMo/Megatron-Bridge, ``src/megatron/bridge/peft``): A is
``adapter.linear_in.weight`` and B ``adapter.linear_out.weight`` of the module that is adapted, a
DoRA magnitude ``adapter.weight_magnitude``. The parts of a fused module share A, and have their
rows of B as the module has them; in canonical LoRA each part has an adapter of its own. All have
one rank and one scale, ``alpha / dim``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import adapter_modules, check_adapter, trained_tensors
from checkpointing.adapters.peft import PEFT_PREFIX, with_one_scale
from checkpointing.adapters.peft_in import from_peft
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.families.megatron import MEGATRON_PARTS
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.rules import Dropped, Rule, Tied
from checkpointing.mapping.tensors import LazyTensors, TensorSource

_ADAPTER = ".adapter."
_ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
# Last names of the tensors of an adapter, and PEFT's.
_TENSORS = {
    "linear_in.weight": "lora_A.weight",
    "linear_out.weight": "lora_B.weight",
    "weight_magnitude": "lora_magnitude_vector",
}


@dataclass(frozen=True)
class MegatronAdapter:
    """An adapter as Megatron-Bridge stores it.

    Attributes:
        tensors: by its names, whole.
        settings: of its config, by its names.
    """

    tensors: LazyTensors
    settings: Mapping[str, Any]


def from_megatron(
    tensors: TensorSource, settings: Mapping[str, Any], layout: Layout, subject: str
) -> tuple[LazyTensors, AdapterConfig]:
    """An adapter of Megatron-Bridge in native form; the tensors keep their dtypes.

    Args:
        tensors: by its names, whole.
        settings: ``dim`` and ``alpha``, and perhaps ``dropout``.
        layout: the base's layout in Megatron's format.
        subject: names the adapter in errors.

    Raises:
        TensorMismatchError: lists every tensor that is unknown, missing or misshaped.
    """
    names = {_peft_name(name): name for name in tensors.metas}
    renamed = LazyTensors(
        {new: tensors.metas[name] for new, name in names.items()},
        {new: partial(tensors.rows, name) for new, name in names.items()},
    )
    parts = {part for each in MEGATRON_PARTS.values() for part in each}
    if any(not parts.isdisjoint(name.split(".")) for name in names):
        layout = _unfused(layout)
    config = {
        "peft_type": "LORA",
        "r": settings["dim"],
        "lora_alpha": settings["alpha"],
        "lora_dropout": settings.get("dropout") or 0.0,
        "use_dora": any(name.endswith(_TENSORS["weight_magnitude"]) for name in names),
    }
    try:
        return from_peft(renamed, config, layout, subject)
    except TensorMismatchError as error:
        problems = [_in_megatrons_names(problem) for problem in error.problems]
        raise TensorMismatchError(
            subject,
            problems,
            "The adapter must be that of this base, and its rank the one that its settings say.",
        ) from None


def to_megatron(adapter: TensorSource, config: AdapterConfig, layout: Layout) -> MegatronAdapter:
    """A native adapter as Megatron-Bridge stores it, with one rank and one scale.

    Parts of a fused module that do not share A have it stacked, and a block-diagonal B. Experts
    have an adapter each.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        layout: the base's layout in Megatron's format.

    Raises:
        ConfigError: if Megatron-Bridge has no form for the adapter.
        TensorMismatchError: if the adapter does not fit the base, or is not whole.
    """
    subject = "saving an adapter for Megatron"
    check_adapter(adapter.metas, config, layout.native_shapes(), subject)
    carrying = adapter_modules(adapter.metas)
    modules = {pair.foreign for pair in layout.pairs if pair.native in carrying}
    last_names = sorted({module.rsplit(".", 1)[-1] for module in modules})
    unknown = [name for name in last_names if name not in _ADAPTED]
    problems = {
        "modules that are trained whole (modules_to_save)": trained_tensors(adapter.metas),
        "a bias of B (lora_bias)": config.lora_bias,
        f"adapters on {', '.join(unknown)}": unknown,
    }
    has = [kind for kind, is_so in problems.items() if is_so]
    if has:
        raise ConfigError(
            f"{subject}: Megatron-Bridge has no form for {' and '.join(has)}; merge the adapter "
            "(`tune merge --to megatron`), or write it for PEFT"
        )
    tensors, fields = with_one_scale(adapter, config, layout)
    names = {_megatron_name(name): name for name in tensors.metas}
    metas = {new: tensors.metas[name] for new, name in names.items()}
    rows = {new: partial(tensors.rows, name) for new, name in names.items()}
    return MegatronAdapter(
        LazyTensors(metas, rows),
        {
            "dim": fields["r"],
            "alpha": fields["lora_alpha"],
            "dropout": config.dropout,
            "target_modules": last_names,
        },
    )


def _peft_name(name: str) -> str:
    """As PEFT would call a tensor of Megatron-Bridge; of a part's own adapter, as of a module."""
    for own, ending in _TENSORS.items():
        if name.endswith(f".{own}"):
            module, _, part = name.removesuffix(f".{own}").partition(".adapter")
            return f"{module}{part}.{ending}"
    return name


def _megatron_name(name: str) -> str:
    """What Megatron-Bridge calls a tensor of PEFT's form."""
    name = name.removeprefix(PEFT_PREFIX)
    for own, ending in _TENSORS.items():
        if name.endswith(f".{ending}"):
            return f"{name.removesuffix(f'.{ending}')}{_ADAPTER}{own}"
    return name


def _in_megatrons_names(problem: str) -> str:
    name, colon, rest = problem.partition(":")
    return f"{_megatron_name(name)}{colon}{rest}"


def _unfused(layout: Layout) -> Layout:
    """The same layout with every part of a fused module as one of its own."""
    rules = tuple(map(_own_rule, layout.family.formats[layout.format]))
    family = replace(layout.family, formats={**layout.family.formats, layout.format: rules})
    return Layout(family, layout.format, layout.dims)


def _own_rule(rule: Rule | Tied | Dropped) -> Rule | Tied | Dropped:
    if not isinstance(rule, Rule) or rule.part is None:
        return rule
    own = MEGATRON_PARTS[rule.foreign.rsplit(".", 1)[-1]][rule.part]
    return replace(rule, foreign=f"{rule.foreign}.{own}", part=None, groups="")
