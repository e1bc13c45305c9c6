"""Whether a model's output projection is its token embedding: the tensors decide."""

import logging

import torch

from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Rule, Tied
from checkpointing.mapping.tensors import TensorSource

logger = logging.getLogger(__name__)

_PROBE_ROWS = 16


def is_tied(
    family: Family, format: str, source: TensorSource, says: bool | None, subject: str
) -> bool:
    """Whether the foreign (or ``"native"``) tensors are those of a model with tied embeddings.

    A head that is stored and differs from the embedding is never dropped, whatever the config
    says; one that is a bitwise copy of it holds nothing of its own.

    Args:
        family: the model's family.
        format: a foreign format of the family, or ``"native"``.
        source: the model's tensors.
        says: what the config says, ``None`` if it says nothing.
        subject: names the checkpoint in the warning.
    """
    head, embedding = tied_names(family, format)
    metas = source.metas
    if not head:
        return False
    if head not in metas:
        return True if says is None else says
    if says is False:
        return False
    same = embedding in metas and same_tensors(source, head, embedding)
    if says and not same:
        logger.warning(
            "%s: the config says that the embeddings are tied, but %s differs from %s; "
            "both are kept, and the model is treated as untied",
            subject,
            head,
            embedding,
        )
    return same


def tied_names(family: Family, format: str) -> tuple[str, str]:
    """The names of the head and of the embedding that it may copy; empty if none is tied."""
    rules = family.rules(format)
    names = {rule.native: rule.foreign for rule in rules if isinstance(rule, Rule)}
    for tie in rules:
        if isinstance(tie, Tied):
            return f"{names[tie.native]}.weight", f"{names[tie.to]}.weight"
    return "", ""


def same_tensors(source: TensorSource, first: str, second: str) -> bool:
    """Whether two tensors of a source are equal; what does not tell is not read."""
    if source.metas[first] != source.metas[second]:
        return False
    a, b = source.read(first), source.read(second)
    if a.data_ptr() == b.data_ptr():
        return True
    # Different heads differ in their first rows already; most of the reading is saved then.
    return torch.equal(a[:_PROBE_ROWS], b[:_PROBE_ROWS]) and torch.equal(a, b)
