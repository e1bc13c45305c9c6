"""Whether a model's output projection is its token embedding: the tensors decide."""

import logging
from math import lcm

from checkpointing.mapping.axis_ops import same_bits
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Rule, Tied
from checkpointing.mapping.tensors import Rows, TensorSource

logger = logging.getLogger(__name__)

# Different heads differ in their first rows already; most of the reading is saved then.
_PROBE_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 26


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
    """Whether two tensors of a source are bitwise equal; what does not tell is not read."""
    meta = source.metas[first]
    if meta != source.metas[second]:
        return False
    a, b = source.rows(first), source.rows(second)
    if a.shards is not None or b.shards is not None:
        a, b = Rows.of(a.read_all()), Rows.of(b.read_all())
    unit, row_bytes = lcm(a.unit, b.unit), max(meta.nbytes // max(a.count, 1), 1)
    start, block = 0, _PROBE_BYTES
    while start < a.count:
        stop = min(start + max(block // row_bytes // unit, 1) * unit, a.count)
        one, other = a.read(start, stop), b.read(start, stop)
        if one.data_ptr() == other.data_ptr():
            return True  # views of the same memory
        if not same_bits(one, other):
            return False
        start, block = stop, _BLOCK_BYTES
    return True
