"""Modules that are trained whole beside an adapter, as PEFT's ``modules_to_save`` stores them.

PEFT wraps every module whose full name *ends* with one of the names in ``modules_to_save``, so that
``norm`` also means ``input_layernorm``, and keeps a copy of the whole module with the adapter
(https://github.com/huggingface/peft, ``src/peft/utils/other.py``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from checkpointing.adapters.lora import trained_tensors
from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.plan import plan_to_foreign
from checkpointing.mapping.rules import WEIGHT
from checkpointing.mapping.tensors import LazyTensors, TensorSource

CLASSIFIER = "SEQ_CLS"
CLASSIFIER_HEAD = "output"


@dataclass(frozen=True)
class WholeModules:
    """What an adapter has of modules that are trained whole, by foreign names.

    Attributes:
        tensors: of these modules; of a tied model also the output projection's copy of the
            embedding, which PEFT wants to find.
        names: PEFT's ``modules_to_save``; empty for none.
        tied: the output projection follows the trained embedding.
    """

    tensors: LazyTensors
    names: list[str]
    tied: bool


def whole_modules(
    adapter: TensorSource, layout: Layout, subject: str, base: TensorSource | None
) -> WholeModules:
    """The modules of a native adapter that are trained whole, in the foreign layout.

    PEFT keeps the head of every classifier with the adapter, so it is there in any case.

    Args:
        adapter: native adapter tensors, checked.
        layout: the base's layout in the Hugging Face format.
        subject: names the adapter in errors.
        base: native weights of the base, for a classifier's head that is not trained.

    Raises:
        TensorMismatchError: if PEFT has no module that would hold them.
    """
    source = adapter
    if layout.family.task_type == CLASSIFIER and base is not None:
        source = _with_head(adapter, base)
    trained = trained_tensors(source.metas)
    problems = [*_parts_missing(layout, trained), *_experts(layout, trained)]
    if layout.family.task_type == CLASSIFIER and CLASSIFIER_HEAD not in trained:
        problems.append(
            f"{CLASSIFIER_HEAD}: PEFT keeps the head of every classifier with the adapter; name it "
            "in modules_to_save"
        )
    if problems:
        remedy = "Change modules_to_save, or save the merged model without an adapter."
        raise TensorMismatchError(subject, problems, remedy)
    metas = {name: source.metas[name] for names in trained.values() for name in names}
    planned = plan_to_foreign(layout, metas, subject, set(trained)).over(source)
    # PEFT goes by the names of transformers' modules, which those of stored tensors may not be.
    stored = {layout.family.name_in_transformers(name): name for name in planned.metas}
    copies = {
        copy: f"{pair.foreign}.weight"
        for copy, pair, _ in layout.copies()
        if pair.native in trained
    }
    stored |= copies
    tensors = LazyTensors(
        {name: planned.metas[own] for name, own in stored.items()},
        {name: partial(planned.rows, own) for name, own in stored.items()},
    )
    return WholeModules(tensors, _shortest(layout, trained), bool(copies))


def _with_head(adapter: TensorSource, base: TensorSource) -> TensorSource:
    head = WEIGHT.native_name(CLASSIFIER_HEAD)
    if head in adapter.metas:
        return adapter
    rows = {name: partial(adapter.rows, name) for name in adapter.metas}
    return LazyTensors(
        {**adapter.metas, head: base.metas[head]}, {**rows, head: partial(base.rows, head)}
    )


def _parts_missing(layout: Layout, trained: Mapping[str, Sequence[str]]) -> list[str]:
    """Foreign modules of which only some parts are trained."""
    fused: dict[str, list[ModulePair]] = {}
    for pair in layout.pairs:
        fused.setdefault(pair.foreign, []).append(pair)
    problems = []
    for foreign, pairs in fused.items():
        missing = [pair.native for pair in pairs if pair.native not in trained]
        if missing and len(missing) < len(pairs):
            problems.append(
                f"{foreign}: is fused of several modules, of which only some are trained whole; "
                f"name {', '.join(missing)} in modules_to_save too"
            )
    return problems


def _experts(layout: Layout, trained: Mapping[str, Sequence[str]]) -> list[str]:
    """Experts, which are no modules of their own in transformers."""
    return [
        f"{pair.native}: experts are trained whole, which PEFT's form cannot hold"
        for pair in layout.pairs
        if pair.native.rpartition(".")[0] in trained and not pair.expert
    ]


def _shortest(layout: Layout, trained: Collection[str]) -> list[str]:
    """Last names where just the trained modules end with them; else full names."""
    rename = layout.family.name_in_transformers
    every = {rename(pair.foreign): pair.native in trained for pair in layout.pairs}
    every |= {foreign.removesuffix(".weight"): False for foreign, _, _ in layout.copies()}
    names: dict[str, None] = {}
    for name in (name for name, is_trained in every.items() if is_trained):
        last = name.rsplit(".", 1)[-1]
        alone = all(is_trained for other, is_trained in every.items() if other.endswith(last))
        names[last if alone else name] = None
    return list(names)
