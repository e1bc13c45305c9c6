"""Model-parallel shards: every rank holds a slice of most tensors, and the whole of the norms.

Meta's releases come as one file per rank. Column-parallel weights are cut along their out axis,
row-parallel ones along their in axis (Shoeybi et al. 2019).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import LAYER, Parameter, Rule
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta, TensorSource


def split_axes(family: Family, format: str, layers: int) -> dict[str, tuple[Parameter, Rule]]:
    """For each foreign tensor that is cut into shards, its parameter and rule."""
    found = {}
    for rule in family.formats[format]:
        if isinstance(rule, Rule) and rule.split:
            for parameter in family.module(rule.native).parameters:
                for layer in range(layers):
                    name = rule.foreign.replace(LAYER, str(layer))
                    found[parameter.foreign_name(name)] = (parameter, rule)
    return found


def join(
    family: Family, format: str, layers: int, ranks: Sequence[TensorSource], hidden: int, where: str
) -> tuple[LazyTensors, dict[str, int]]:
    """The whole tensors of a model whose shards are given, in the order of the ranks.

    Args:
        family: the model's family.
        format: the foreign format.
        layers: number of layers.
        ranks: the shards.
        hidden: width of the model, which tells along which axis an embedding was cut.
        where: names the checkpoint in errors.

    Returns:
        The whole tensors, and for each tensor that was cut the dimension of the cut.

    Raises:
        TensorMismatchError: lists every tensor that the ranks do not hold alike.
    """
    first = ranks[0].metas
    problems = [
        f"{name}: not in every shard"
        for name in dict.fromkeys(name for rank in ranks for name in rank.metas)
        if not all(name in rank.metas for rank in ranks)
    ]
    cuts = split_axes(family, format, layers)
    dims: dict[str, int] = {}
    metas: dict[str, TensorMeta] = {}
    for name, meta in first.items():
        shards = [rank.metas.get(name, meta) for rank in ranks]
        if name in cuts and len(ranks) > 1:
            dims[name] = dim = _cut_dimension(*cuts[name], family, meta.shape, hidden, len(ranks))
            size = sum(shard.shape[dim] for shard in shards)
            metas[name] = TensorMeta((*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.dtype)
            alike = all(
                shard.dtype == meta.dtype
                and (*shard.shape[:dim], *shard.shape[dim + 1 :])
                == (*meta.shape[:dim], *meta.shape[dim + 1 :])
                for shard in shards
            )
        else:
            metas[name] = meta
            alike = all(shard == meta for shard in shards)
        if not alike:
            problems.append(f"{name}: the shards are {', '.join(map(str, shards))}")
    if problems:
        raise TensorMismatchError(
            where, problems, "The files must be all the shards of one checkpoint, and no others."
        )
    rows = {name: partial(_joined, ranks, name, dims.get(name)) for name in first}
    return LazyTensors(metas, rows), dims


def _cut_dimension(
    parameter: Parameter,
    rule: Rule,
    family: Family,
    shape: tuple[int, ...],
    hidden: int,
    ranks: int,
) -> int:
    module = family.module(rule.native)
    fields = {"out": module.out, "in": module.in_}
    for axis in rule.split:
        dim = parameter.axes.index(axis)
        if fields[axis] != "hidden" or shape[dim] * ranks == hidden:
            return dim
    return parameter.axes.index(rule.split[-1])


def _joined(ranks: Sequence[TensorSource], name: str, dim: int | None) -> Rows:
    shards = [rank.rows(name) for rank in ranks]
    if dim is not None:
        return Rows.side_by_side(shards, dim) if dim else Rows.concatenated(shards)
    return Rows.whole(ranks[0].metas[name].shape, partial(_read_copies, shards, name))


def _read_copies(copies: Sequence[Rows], name: str) -> Tensor:
    """What every shard holds the same copy of."""
    shards = [copy.read_all() for copy in copies]
    if not all(torch.equal(shards[0], shard) for shard in shards[1:]):
        raise TensorMismatchError(
            "shards of one model",
            [f"{name}: differs between the shards, which must all hold the same copy"],
            "The files must be all the shards of one checkpoint, and no others.",
        )
    return shards[0]


def cut(source: TensorSource, cut_dims: Mapping[str, int], ranks: int) -> list[TensorSource]:
    """The shards of a whole model; the inverse of :func:`join`.

    Args:
        source: the whole foreign tensors.
        cut_dims: dimension of the cut, for each tensor that is cut.
        ranks: number of shards.
    """
    if ranks == 1:
        return [source]
    shards: list[TensorSource] = []
    for rank in range(ranks):
        metas, rows = {}, {}
        for name, meta in source.metas.items():
            dim = cut_dims.get(name)
            if dim is None:
                metas[name] = meta
                rows[name] = partial(source.rows, name)
                continue
            size = meta.shape[dim] // ranks
            shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
            metas[name] = TensorMeta(shape, meta.dtype)
            rows[name] = partial(_slice, source, name, dim, rank * size, size)
        shards.append(LazyTensors(metas, rows))
    return shards


def _slice(source: TensorSource, name: str, dim: int, start: int, size: int) -> Rows:
    rows = source.rows(name)
    if dim == 0:
        return rows.narrow(start, size)
    return rows.map(lambda some: some.narrow(dim, start, size))
