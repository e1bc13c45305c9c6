"""Model-parallel shards: every rank holds a slice of most tensors, and the whole of the norms.

Meta's releases come as one file per rank, and so do Megatron's checkpoints. Column-parallel weights
are cut along their out axis, row-parallel ones along their in axis (Shoeybi et al. 2019).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import BIAS, EXPERT, LAYER, Parameter, Rule
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta, TensorSource

_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut into shards.

    Attributes:
        dim: the dimension of the cut.
        parts: number of equal parts along it that are cut each by itself, so that a shard has a
            piece of all of them, as of gate and up projection: [g0 u0] and [g1 u1].
    """

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class Parallel:
    """Into how many parts a model is cut.

    Attributes:
        tensor: ranks that share the tensors of a layer.
        pipeline: ranks that share the layers.
        expert: ranks that share the experts of a layer.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


ONE_RANK = Parallel()
"""A model that is not cut."""


def pattern_of(name: str) -> str:
    """A tensor's name with places for the numbers of its layer and expert, as rules have them."""
    places = iter((LAYER, EXPERT))
    return _NUMBER.sub(lambda number: next(places, number[0]), name)


def split_axes(family: Family, format: str) -> dict[str, tuple[Parameter, Rule]]:
    """For each foreign tensor that is cut into shards, by its pattern, its parameter and rule."""
    return {
        parameter.foreign_name(rule.foreign): (parameter, rule)
        for rule in family.formats[format]
        if isinstance(rule, Rule)
        for parameter in {*family.module(rule.native).parameters, BIAS}
        if not set(rule.split).isdisjoint(parameter.foreign_axes)
    }


def join(
    family: Family,
    format: str,
    ranks: Sequence[TensorSource],
    hidden: int,
    where: str,
) -> tuple[LazyTensors, dict[str, Cut]]:
    """The whole tensors of a model whose shards are given, in the order of the ranks.

    Args:
        family: the model's family.
        format: the foreign format.
        ranks: the shards.
        hidden: width of the model, which tells along which axis an embedding was cut.
        where: names the checkpoint in errors.

    Returns:
        The whole tensors, and for each tensor that was cut how.

    Raises:
        TensorMismatchError: lists every tensor that the ranks do not hold alike.
    """
    axes = split_axes(family, format)
    cuts = {
        name: _cut_of(*axes[pattern_of(name)], family, format, meta.shape, hidden, len(ranks))
        for name, meta in ranks[0].metas.items()
        if pattern_of(name) in axes and len(ranks) > 1
    }
    return join_cut(ranks, cuts, where), cuts


def join_cut(ranks: Sequence[TensorSource], cuts: Mapping[str, Cut], where: str) -> LazyTensors:
    """The whole tensors of shards, of which it is known how they were cut.

    Args:
        ranks: the shards, in order.
        cuts: for each tensor that was cut, how; of all others every rank must hold the same.
        where: names the checkpoint in errors.

    Raises:
        TensorMismatchError: lists every tensor that the ranks do not hold alike.
    """
    first = ranks[0].metas
    problems = [
        f"{name}: not in every shard"
        for name in dict.fromkeys(name for rank in ranks for name in rank.metas)
        if not all(name in rank.metas for rank in ranks)
    ]
    metas: dict[str, TensorMeta] = {}
    for name, meta in first.items():
        shards = [rank.metas.get(name, meta) for rank in ranks]
        if name in cuts:
            dim = cuts[name].dim
            alike = all(
                len(shard.shape) == len(meta.shape) > dim
                and shard.dtype == meta.dtype
                and shard.shape[dim] % cuts[name].parts == 0
                and (*shard.shape[:dim], *shard.shape[dim + 1 :])
                == (*meta.shape[:dim], *meta.shape[dim + 1 :])
                for shard in shards
            )
            size = sum(shard.shape[dim] for shard in shards) if alike else 0
            metas[name] = TensorMeta((*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.dtype)
        else:
            metas[name] = meta
            alike = all(shard == meta for shard in shards)
        if not alike:
            problems.append(f"{name}: the shards are {', '.join(map(str, shards))}")
    if problems:
        raise TensorMismatchError(
            where, problems, "The files must be all the shards of one checkpoint, and no others."
        )
    rows = {name: partial(_joined, ranks, name, cuts.get(name)) for name in first}
    return LazyTensors(metas, rows)


def _cut_of(
    parameter: Parameter,
    rule: Rule,
    family: Family,
    format: str,
    shape: tuple[int, ...],
    hidden: int,
    ranks: int,
) -> Cut:
    module = family.module(rule.native)
    fields = {"out": module.out, "in": module.in_}
    for axis in rule.split:
        if axis not in parameter.foreign_axes:
            continue
        dim = parameter.foreign_axes.index(axis)
        if fields[axis] != "hidden" or shape[dim] * ranks == hidden:
            break
    return Cut(dim, parts_of(rule, family, format) if axis == rule.along else 1)


def parts_of(rule: Rule, family: Family, format: str) -> int:
    """Number of parts of a rule's foreign module that are cut into shards each by itself.

    In groups, a shard has whole ones, which lie one after the other.
    """
    if rule.part is None or rule.groups:
        return 1
    others = (other for other in family.formats[format] if isinstance(other, Rule))
    return sum(other.foreign == rule.foreign for other in others)


def _joined(ranks: Sequence[TensorSource], name: str, cut: Cut | None) -> Rows:
    shards = [rank.rows(name) for rank in ranks]
    if len(shards) == 1:
        return shards[0]
    if cut is None:
        return Rows.whole(ranks[0].metas[name].shape, partial(_read_copies, shards, name))
    if cut.dim:
        return Rows.side_by_side(shards, cut.dim)
    return Rows.concatenated(
        [
            shard.narrow(part * size, size)
            for part in range(cut.parts)
            for shard in shards
            for size in [shard.count // cut.parts]
        ]
    )


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


def cut(source: TensorSource, cuts: Mapping[str, Cut], ranks: int) -> list[TensorSource]:
    """The shards of a whole model; the inverse of :func:`join`.

    Args:
        source: the whole foreign tensors.
        cuts: for each tensor that is cut, how.
        ranks: number of shards.
    """
    if ranks == 1:
        return [source]
    shards: list[TensorSource] = []
    for rank in range(ranks):
        metas, rows = {}, {}
        for name, meta in source.metas.items():
            one = cuts.get(name)
            if one is None:
                metas[name] = meta
                rows[name] = partial(source.rows, name)
                continue
            size = meta.shape[one.dim] // ranks
            shape = (*meta.shape[: one.dim], size, *meta.shape[one.dim + 1 :])
            metas[name] = TensorMeta(shape, meta.dtype)
            rows[name] = partial(_slice, source, name, one, rank, ranks)
        shards.append(LazyTensors(metas, rows))
    return shards


def _slice(source: TensorSource, name: str, cut: Cut, rank: int, ranks: int) -> Rows:
    rows = source.rows(name)
    part = source.metas[name].shape[cut.dim] // cut.parts
    size = part // ranks
    starts = [number * part + rank * size for number in range(cut.parts)]
    if cut.dim == 0:
        pieces = [rows.narrow(start, size) for start in starts]
        return pieces[0] if len(pieces) == 1 else Rows.concatenated(pieces)
    # Parts lie along the first dimension, as all fused rows do.
    return rows.map(lambda some: some.narrow(cut.dim, starts[0], size))
