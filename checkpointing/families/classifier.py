"""Decoders with a classification head in place of the output projection, as reward models have."""

from dataclasses import replace

from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Dropped, Rule, Tied, linear

SUFFIX = "_classifier"


def classifier(family: Family) -> Family:
    """The family of a decoder's ``ForSequenceClassification`` model.

    Hugging Face calls the head ``score``, torchtune ``output``.

    Args:
        family: of the decoder.
    """
    head = Rule("output", "score")

    def with_head(rule: Rule | Tied | Dropped) -> Rule | Tied | Dropped:
        return head if isinstance(rule, Rule) and rule.native == head.native else rule

    return replace(
        family,
        name=family.name + SUFFIX,
        modules=tuple(
            linear("output", "labels", "hidden") if module.name == "output" else module
            for module in family.modules
        ),
        formats={
            "hf": tuple(
                with_head(rule) for rule in family.formats["hf"] if not isinstance(rule, Tied)
            )
        },
        hf_fields={**family.hf_fields, "labels": ("num_labels",)},
        task_type="SEQ_CLS",
    )
