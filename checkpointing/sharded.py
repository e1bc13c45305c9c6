"""Saving a state of which each process of a job has a part: what must hold before."""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import (
    StateDictSource,
    TensorSource,
    as_source,
    is_dtensor,
    is_sharded,
)
from checkpointing.save_plan import ADAPTER_KEY, MODEL_KEY
from checkpointing.storage.ranks import Ranks, all_ranks
from checkpointing.storage.write import tensors_by_name


def ranks_that_save(state: Mapping[str, Any]) -> Ranks:
    """All processes of the job, if each has a part of what is saved; else this one alone.

    Args:
        state: a state dict.
    """
    return _ranks_if(map(is_sharded, _sources(state).values()), "saving a checkpoint")


def ranks_that_load(parameters: Mapping[str, Tensor]) -> Ranks:
    """All processes of the job, if each has a part of what is loaded into; else this one alone."""
    return _ranks_if(map(is_dtensor, parameters.values()), "loading a checkpoint")


def _ranks_if(in_shards: Iterable[bool], doing: str) -> Ranks:
    is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return all_ranks(doing) if is_one_of_many and any(in_shards) else Ranks()


def gathering(ranks: Ranks) -> AbstractContextManager[None]:
    """Within it a process that waits for a tensor to be gathered notices if another one is gone."""
    if ranks.count == 1:
        return nullcontext()
    # Imported here: it takes long, and only who has tensors in shards needs it.
    from checkpointing.mapping.dtensors import gathering_by

    return gathering_by(ranks.wait_for)


def check_alike(
    ranks: Ranks,
    state: Mapping[str, Any],
    arguments: Mapping[str, Any],
    function: str = "save_checkpoint",
) -> None:
    """Checks that all processes save, or stream, the same, so that each can rely on the others.

    Args:
        ranks: the processes.
        state: a state dict. All weights must be the same, and what lies in shards beside them.
        arguments: of the save, by name.
        function: which was called, for errors.

    Raises:
        ConfigError: if the arguments differ; says which.
        TensorMismatchError: lists the tensors that are not the same in all processes.
    """
    if ranks.count == 1:
        return
    given, *others = ranks.exchange(dict(arguments))
    for rank, other in enumerate(others, start=1):
        differing = [name for name in given if given[name] != other.get(name)]
        if differing:
            raise ConfigError(
                f"{function}: all ranks must be given the same, but "
                + ", ".join(
                    f"{name} is {given[name]!r} on rank 0 and {other.get(name)!r} on rank {rank}"
                    for name in differing
                )
            )
    tensors = _described(state)
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()
    if len(set(ranks.exchange(digest))) == 1:
        return
    first, *rest = ranks.exchange(tensors)
    problems = [
        f"{name}: {first.get(name, 'not there')} on rank 0, {other.get(name, 'not there')} "
        f"on rank {rank}"
        for rank, other in enumerate(rest, start=1)
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    in_order = [list(one) for one in (first, *rest)]
    problems = problems or [
        f"{name}: comes where {other[place]} does on rank {rank}"
        for rank, other in enumerate(in_order)
        for place, name in enumerate(in_order[0])
        if other[place] != name
    ]
    raise TensorMismatchError(
        f"{function} of a model in shards",
        problems,
        "All ranks must have the same model, cut in the same way.",
    )


def _described(state: Mapping[str, Any]) -> dict[str, str]:
    described = {}
    for key, source in _sources(state).items():
        for name, meta in source.metas.items():
            shards = source.rows(name).shards
            cut = "" if shards is None else f", held in {len(shards.held)} ranges of rows"
            described[f"{key}.{name}" if key else name] = f"{meta}{cut}"
    return described


def _sources(state: Mapping[str, Any]) -> dict[str, TensorSource]:
    """The weights by their key, and all that lies in shards beside them by none."""
    sources = {key: as_source(state[key]) for key in (MODEL_KEY, ADAPTER_KEY) if key in state}
    beside = tensors_by_name({key: state[key] for key in state if key not in sources})
    in_shards = {name: tensor for name, tensor in beside.items() if is_dtensor(tensor)}
    return {**sources, "": StateDictSource(in_shards)}
