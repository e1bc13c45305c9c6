"""A Megatron model as its ranks save it: tensor, pipeline and expert parallel.

Of a tensor-parallel group each rank has a slice of most tensors; a stage of a pipeline has some of
the layers, and an expert-parallel rank some of the experts, both counted from 0 within it. A stage
may hold several chunks of layers, one from each round through the pipeline (Megatron-LM,
``megatron/training/checkpointing.py`` and ``megatron/core/parallel_state.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.families.megatron import MEGATRON_PARTS
from checkpointing.formats.megatron_names import (
    count,
    expert_of,
    in_layer,
    layer_of,
    of_expert,
)
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.model_parallel import Cut, Parallel, cut, join_cut, parts_of, pattern_of
from checkpointing.mapping.padding import padded, vocabulary_tensors
from checkpointing.mapping.rules import BIAS, Rule
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta, TensorSource
from checkpointing.mapping.ties import tied_names

_ALL_SHARDS = "The files must be all the shards of one checkpoint, and no others."
_FIRST_STAGE = "embedding."


@dataclass(frozen=True, order=True)
class Rank:
    """Which part of a model a file holds.

    Attributes:
        pipeline: number of the stage.
        expert: number of the expert-parallel rank.
        tensor: number of the tensor-parallel rank.
    """

    pipeline: int
    expert: int
    tensor: int


def ranks_of(parallel: Parallel) -> list[Rank]:
    """All ranks, in order."""
    return [
        Rank(pipeline, expert, tensor)
        for pipeline in range(parallel.pipeline)
        for expert in range(parallel.expert)
        for tensor in range(parallel.tensor)
    ]


def check_parallel(parallel: Parallel, dims: Dims) -> None:
    """Checks that a model can be cut into so many parts.

    Raises:
        ConfigError: lists the sizes that cannot be divided.
    """
    sizes = [
        (parallel.tensor, "tensor", {"heads": dims.heads, "key-value heads": dims.kv_heads}),
        (parallel.tensor, "tensor", {"feed-forward width": dims.ffn, "hidden size": dims.hidden}),
        (parallel.tensor, "tensor", {"width of an expert": dims.expert_ffn}),
        (parallel.pipeline, "pipeline", {"layers": dims.layers}),
    ]
    if parallel.expert != 1:
        sizes.append((parallel.expert, "expert", {"experts": dims.experts or 1}))
    problems = [
        f"{kind}-parallel {parts} does not divide {name} ({size})"
        for parts, kind, named in sizes
        for name, size in named.items()
        if parts < 1 or size % parts
    ]
    if problems:
        raise ConfigError(
            f"Megatron's shards: {', '.join(problems)}; give numbers that divide the model's"
        )


def cuts(family: Family) -> dict[str, Cut]:
    """How each tensor of a family is cut among tensor-parallel ranks, by its pattern."""
    found = {}
    for rule in family.formats["megatron"]:
        if not isinstance(rule, Rule):
            continue
        along = rule.split[0] if rule.split else ""
        parts = parts_of(rule, family, "megatron") if along == rule.along else 1
        for parameter in {*family.module(rule.native).parameters, BIAS}:
            if along in parameter.foreign_axes:
                dim = parameter.foreign_axes.index(along)
                found[parameter.foreign_name(rule.foreign)] = Cut(dim, parts)
        found |= _adapter_cuts(f"{rule.foreign}.adapter.", along, parts)
    return found


def _adapter_cuts(adapter: str, along: str, parts: int) -> dict[str, Cut]:
    """How an adapter is cut (Megatron-Bridge, ``peft/utils.py``, ``peft/dora_layers.py``).

    Of a module that is cut along its in axis, A is cut along that, else along the rank. B is always
    cut along its out axis, also where the module is not.
    """
    own_parts = [f"{name}." for names in MEGATRON_PARTS.values() for name in names]
    found = {f"{adapter}{part}linear_out.weight": Cut(0) for part in own_parts}
    found |= {
        f"{adapter}{part}linear_in.weight": Cut(int(along == "in")) for part in ("", *own_parts)
    }
    found[f"{adapter}linear_out.weight"] = Cut(0, parts)
    if along == "out":
        found[f"{adapter}weight_magnitude"] = Cut(0, parts)
    return found


def whole_model(
    files: Mapping[Rank, Sequence[TensorSource]],
    cuts: Mapping[str, Cut],
    expert_ffn: int,
    where: str,
    layers: int = 0,
) -> LazyTensors:
    """The whole tensors of a model, or of an adapter, of which every rank's are given.

    Args:
        files: for each rank the chunks of layers that it has, by the rules' names.
        cuts: from :func:`cuts`.
        expert_ffn: width of an expert, which tells whether experts are cut as well.
        where: names the checkpoint in errors.
        layers: number of layers in every chunk, if some of them may have no tensors.

    Raises:
        TensorMismatchError: lists every tensor that the ranks do not hold alike, or that stands in
            several stages.
    """
    metas: dict[str, TensorMeta] = {}
    rows: dict[str, Callable[[], Rows]] = {}
    before = 0
    for chunk in range(max(map(len, files.values()))):
        for stage in sorted({rank.pipeline for rank in files}):
            parts = {
                rank: sources[chunk] for rank, sources in files.items() if rank.pipeline == stage
            }
            own = _whole_stage(parts, cuts, expert_ffn, where)
            for name, meta in own.metas.items():
                layer = layer_of(name)
                new = name if layer is None else in_layer(name, before + layer)
                if new in metas:
                    raise TensorMismatchError(
                        where, [f"{new}: stands in several stages of the pipeline"], _ALL_SHARDS
                    )
                metas[new], rows[new] = meta, partial(own.rows, name)
            before += layers or count(map(layer_of, own.metas))
    return LazyTensors(metas, rows)


def _whole_stage(
    files: Mapping[Rank, TensorSource], cuts: Mapping[str, Cut], expert_ffn: int, where: str
) -> LazyTensors:
    """The tensors of a stage, with experts counted through all ranks."""
    by_tensor: dict[int, list[TensorSource]] = {}
    by_expert: dict[int, list[TensorSource]] = {}
    for rank in sorted(files):
        by_tensor.setdefault(rank.tensor, []).append(_part(files[rank], of_experts=False))
        by_expert.setdefault(rank.expert, []).append(_part(files[rank], of_experts=True))
    # Every expert-parallel rank has a copy of what is no expert's.
    problems = [
        f"{name}: not the same in the shards of different experts"
        for copies in by_tensor.values()
        for other in copies[1:]
        for name in other.metas.keys() | copies[0].metas.keys()
        if other.metas.get(name) != copies[0].metas.get(name)
    ]
    if problems:
        raise TensorMismatchError(where, problems, _ALL_SHARDS)
    shared = [copies[0] for _, copies in sorted(by_tensor.items())]
    whole = _joined(shared, cuts, where)
    metas, rows = dict(whole.metas), {name: partial(whole.rows, name) for name in whole.metas}
    experts = 0
    for _, shards in sorted(by_expert.items()):
        # Copies, unless experts are cut as the other tensors are.
        own = _joined(shards[:1] if _are_whole(shards[0], expert_ffn) else shards, cuts, where)
        for name, meta in own.metas.items():
            new = of_expert(name, experts + (expert_of(name) or 0))
            metas[new], rows[new] = meta, partial(own.rows, name)
        experts += count(map(expert_of, own.metas))
    return LazyTensors(metas, rows)


def _part(source: TensorSource, of_experts: bool) -> LazyTensors:
    names = [name for name in source.metas if (expert_of(name) is not None) == of_experts]
    return LazyTensors(
        {name: source.metas[name] for name in names},
        {name: partial(source.rows, name) for name in names},
    )


def _joined(shards: Sequence[TensorSource], cuts: Mapping[str, Cut], where: str) -> LazyTensors:
    many = len(shards) > 1
    names = shards[0].metas
    own = {name: cuts[pattern_of(name)] for name in names if many and pattern_of(name) in cuts}
    return join_cut(shards, own, where)


def _are_whole(source: TensorSource, expert_ffn: int) -> bool:
    """Whether these shards of experts, or of adapters on them, are not cut."""
    for name, meta in source.metas.items():
        if name.endswith(("linear_fc1.weight", "linear_fc1.adapter.linear_out.weight")):
            return meta.shape[:1] == (2 * expert_ffn,)
        if name.endswith(("linear_fc2.weight", "linear_fc2.adapter.linear_in.weight")):
            return meta.shape[-1:] == (expert_ffn,)
    return False


def shards(
    source: TensorSource, family: Family, dims: Dims, parallel: Parallel, vocab_multiple: int
) -> dict[Rank, TensorSource]:
    """The tensors of each rank; the inverse of :func:`whole_model`.

    Args:
        source: whole tensors of a model, or of an adapter, by the rules' names.
        family: the model's.
        dims: the model's.
        parallel: into how many parts it is cut.
        vocab_multiple: of each tensor-parallel rank's rows of the vocabulary, which is filled up.
    """
    names = [name for name in vocabulary_tensors(family, "megatron") if name in source.metas]
    source = padded(source, names, vocab_multiple * parallel.tensor)
    how = cuts(family)
    found: dict[Rank, TensorSource] = {}
    for stage in range(parallel.pipeline):
        for expert in range(parallel.expert):
            own = _of_rank(source, family, dims, parallel, Rank(stage, expert, 0))
            of_names = {n: how[pattern_of(n)] for n in own.metas if pattern_of(n) in how}
            for tensor, shard in enumerate(cut(own, of_names, parallel.tensor)):
                found[Rank(stage, expert, tensor)] = shard
    return found


def _of_rank(
    source: TensorSource, family: Family, dims: Dims, parallel: Parallel, rank: Rank
) -> LazyTensors:
    """What tensor-parallel ranks share, with layers and experts counted from 0."""
    layers, experts = dims.layers // parallel.pipeline, dims.experts // parallel.expert
    last = rank.pipeline == parallel.pipeline - 1
    metas: dict[str, TensorMeta] = {}
    rows: dict[str, Callable[[], Rows]] = {}
    for name, meta in source.metas.items():
        layer, expert = layer_of(name), expert_of(name)
        new = name
        if layer is None:
            here = rank.pipeline == 0 if name.startswith(_FIRST_STAGE) else last
        else:
            here = layer // layers == rank.pipeline
            new = in_layer(new, layer % layers)
        if expert is not None:
            here = here and expert // experts == rank.expert
            new = of_expert(new, expert % experts)
        if here:
            metas[new], rows[new] = meta, partial(source.rows, name)
    head, embedding = tied_names(family, "megatron")
    # A last stage that is not the first has the embedding over again, for the output.
    if last and parallel.pipeline > 1 and embedding in source.metas and head not in source.metas:
        metas[head], rows[head] = source.metas[embedding], partial(source.rows, embedding)
    return LazyTensors(metas, rows)
