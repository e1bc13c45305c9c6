"""Reading what lies beside the adapter in a PEFT file: modules trained whole, copies of the base's.

The way in for what :mod:`checkpointing.adapters.peft_whole` writes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from checkpointing.adapters.peft_config_in import PeftSettings
from checkpointing.adapters.peft_names import BaseTensor, PeftNames
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.plan import plan_to_native
from checkpointing.mapping.tensors import LazyTensors, TensorSource


@dataclass(frozen=True)
class WholeModulesIn:
    """The modules of a PEFT adapter that were trained whole.

    Attributes:
        tensors: their native tensors.
        modules_to_save: last names where all modules of that name are among them; else full names.
        problems: what is wrong, one line each, by the names in the file.
    """

    tensors: LazyTensors
    modules_to_save: tuple[str, ...]
    problems: list[str]


def whole_from_peft(
    tensors: TensorSource,
    keys: Iterable[str],
    settings: PeftSettings,
    layout: Layout,
    base: TensorSource | None,
) -> WholeModulesIn:
    """Reads the tensors of a file that are none of the adapter's.

    Args:
        tensors: of the file.
        keys: those that are none of the adapter's.
        settings: what the config says; it decides what was trained. All else must be the base's.
        layout: the base's layout in the Hugging Face format.
        base: the base's native weights, with which copies are compared; without it only their
            shapes are checked.
    """
    names = PeftNames(layout)
    problems: list[str] = []
    trained: dict[str, BaseTensor] = {}
    heads: list[BaseTensor] = []
    for key in keys:
        found = names.find_base(key)
        shape = tensors.metas[key].shape
        if found is None:
            problems.append(f"{key}: unexpected, {list(shape)}")
        elif shape != found.shape:
            problems.append(
                f"{key}: {list(shape)}, where the base has {list(found.shape)}: it was resized; "
                "start from the base that it belongs to"
            )
        elif found.is_copy or not _was_trained(found, settings, layout):
            if base is not None and not _is_bases(tensors, found, base):
                problems.append(
                    f"{key}: differs from the base's: it was trained, and modules_to_save does not "
                    "name it; start from a base that holds it"
                )
        elif found.is_tied_head:
            heads.append(found)
        elif any("expert" in parameter.axes for _, parameter in found.parts):
            problems.append(f"{key}: experts were trained whole, which native training does not do")
        elif found.name in trained:
            problems.append(f"{key}: the same tensor as {trained[found.name].key}")
        else:
            trained[found.name] = found
    problems += _tied_problems(tensors, trained, heads, settings, layout, base)
    problems += _missing(trained, settings, layout)
    modules = {pair.native for found in trained.values() for pair, _ in found.parts}
    native = LazyTensors({}, {})
    if modules and not problems:
        metas = {name: tensors.metas[found.key] for name, found in trained.items()}
        rows = {name: partial(tensors.rows, found.key) for name, found in trained.items()}
        renamed = LazyTensors(metas, rows)
        native = plan_to_native(layout, metas, "modules_to_save", modules).over(renamed)
    return WholeModulesIn(native, _short_names(layout, modules), problems)


def _was_trained(found: BaseTensor, settings: PeftSettings, layout: Layout) -> bool:
    name = layout.family.name_in_transformers(found.module)
    # With ensure_weight_tying PEFT saves the head beside the embedding, without naming it.
    return settings.saves(name) or (found.is_tied_head and settings.ensure_weight_tying)


def _is_bases(tensors: TensorSource, found: BaseTensor, base: TensorSource) -> bool:
    for pair, parameter in found.parts:
        own = pair.slice_of(base.read(parameter.native_name(pair.native)), parameter)
        copy = pair.to_native(pair.part_of(tensors.read(found.key), parameter), parameter)
        if not torch.equal(copy.to(own.dtype), own):
            return False
    return True


def _tied_problems(
    tensors: TensorSource,
    trained: dict[str, BaseTensor],
    heads: list[BaseTensor],
    settings: PeftSettings,
    layout: Layout,
    base: TensorSource | None,
) -> list[str]:
    """What keeps head and embedding of a tied model from being one; PEFT may train them apart."""
    problems = []
    for _, pair, _ in layout.copies():
        embedding = trained.get(f"{pair.foreign}.weight")
        if embedding is not None and not heads and not settings.ensure_weight_tying:
            problems.append(
                f"{embedding.key}: was trained, and the output projection, which is this embedding "
                "in the base, was not, since ensure_weight_tying is false; start from an untied "
                "base, with a head of its own and tie_word_embeddings false"
            )
        for head in heads:
            if embedding is None:
                same = base is None or _is_bases(tensors, head, base)
            else:
                same = _equal(tensors.read(head.key), tensors.read(embedding.key))
            if not same:
                problems.append(
                    f"{head.key}: was trained apart from the embedding that it is in the base; "
                    "start from an untied base, with a head of its own and tie_word_embeddings "
                    "false"
                )
    return problems


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _missing(trained: dict[str, BaseTensor], settings: PeftSettings, layout: Layout) -> list[str]:
    """Tensors of modules that the config means and the file lacks; PEFT cannot load it then."""
    problems: dict[str, None] = {}
    for pair, parameter in layout.parameters():
        stored = parameter.foreign_name(pair.foreign)
        module = layout.family.name_in_transformers(pair.foreign)
        if settings.saves(module) and stored not in trained and "expert" not in parameter.axes:
            name, shape = parameter.foreign_name(module), list(pair.foreign_shape(parameter))
            problems[f"base_model.model.{name}: missing, expected {shape}"] = None
    return list(problems)


def _short_names(layout: Layout, modules: set[str]) -> tuple[str, ...]:
    every: dict[str, list[str]] = {}
    for name in dict.fromkeys(pair.native for pair in layout.pairs):
        every.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    short: list[str] = []
    for last, names in every.items():
        found = [name for name in names if name in modules]
        short += [last] if found == names else found
    return tuple(short)
