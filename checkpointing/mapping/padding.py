"""Rows of zeros behind the vocabulary, which some layouts have so that it divides evenly."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch

from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Rule
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorSource


def vocabulary_tensors(family: Family, format: str) -> list[str]:
    """Foreign names of the tensors with a row for each token."""
    names = []
    for rule in family.formats[format]:
        if isinstance(rule, Rule):
            module = family.module(rule.native)
            if "vocab" in (module.out, module.in_):
                names += [parameter.foreign_name(rule.foreign) for parameter in module.parameters]
    return names


def padded(source: TensorSource, names: Collection[str], multiple: int) -> LazyTensors:
    """The same tensors, with rows of zeros behind some, up to a multiple."""

    def rows(name: str, count: int) -> Rows:
        meta = source.metas[name]
        shape, dtype = meta.shape[1:], meta.dtype
        filling = Rows(count, 1, lambda a, b: torch.zeros((b - a, *shape), dtype=dtype))
        return Rows.concatenated([source.rows(name), filling])

    missing = {name: -source.metas[name].shape[0] % multiple for name in names}
    return _changed(
        source,
        {name: source.metas[name].shape[0] + count for name, count in missing.items()},
        {name: partial(rows, name, count) for name, count in missing.items() if count},
    )


def unpadded(source: TensorSource, names: Collection[str], rows: int) -> LazyTensors:
    """The same tensors, of some only the first rows; the inverse of :func:`padded`."""
    longer = [name for name in names if source.metas[name].shape[0] > rows]
    return _changed(
        source,
        dict.fromkeys(longer, rows),
        {name: partial(_first, source, name, rows) for name in longer},
    )


def _first(source: TensorSource, name: str, count: int) -> Rows:
    return source.rows(name).narrow(0, count)


def _changed(
    source: TensorSource, counts: dict[str, int], changed: dict[str, partial[Rows]]
) -> LazyTensors:
    metas = dict(source.metas)
    for name, count in counts.items():
        metas[name] = replace(metas[name], shape=(count, *metas[name].shape[1:]))
    return LazyTensors(
        metas, {name: changed.get(name, partial(source.rows, name)) for name in metas}
    )
