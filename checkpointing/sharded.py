"""Saving weights of which each process of a job has a part: what must hold before."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import (
    LazyTensors,
    TensorSource,
    as_source,
    is_dtensor,
    is_sharded,
)
from checkpointing.storage.ranks import Ranks, all_ranks


def ranks_that_save(model: Any) -> Ranks:
    """All processes of the job, if each has a part of the weights; else this one alone.

    Args:
        model: the weights of a state dict, if it has any.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Ranks()
    if isinstance(model, Mapping) and not isinstance(model, LazyTensors):
        shared = any(map(is_dtensor, model.values()))
    else:
        shared = model is not None and is_sharded(model)
    return all_ranks() if shared else Ranks()


def check_alike(ranks: Ranks, model: Any, arguments: Mapping[str, Any]) -> None:
    """Checks that all processes save the same, so that each can rely on what the others do.

    Args:
        ranks: the processes.
        model: the weights.
        arguments: of the save, by name.

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
                "save_checkpoint: all ranks must be given the same, but "
                + ", ".join(
                    f"{name} is {given[name]!r} on rank 0 and {other.get(name)!r} on rank {rank}"
                    for name in differing
                )
            )
    tensors = _described(as_source(model))
    digest = hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()
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
    raise TensorMismatchError(
        "saving a model in shards",
        problems,
        "All ranks must save the state dict of the same model, cut in the same way.",
    )


def _described(model: TensorSource) -> dict[str, str]:
    described = {}
    for name, meta in model.metas.items():
        shards = model.rows(name).shards
        cut = "" if shards is None else f", held in {len(shards.held)} ranges of rows"
        described[name] = f"{meta}{cut}"
    return described


def check_whole(state: Any, path: str) -> None:
    """Checks that what is saved beside the weights does not lie in shards.

    Args:
        state: plain data and tensors.
        path: to the state, for errors.

    Raises:
        ConfigError: if it does; says what.
    """
    if is_dtensor(state):
        raise ConfigError(
            f"state_dict: {path} is a DTensor, of which this process has a part; only the model's "
            "weights can be saved so. Gather it first: with full_tensor(), or with "
            "get_optimizer_state_dict and full_state_dict=True "
            "(torch.distributed.checkpoint.state_dict)"
        )
    if isinstance(state, Mapping) and not isinstance(state, LazyTensors):
        for key, value in state.items():
            check_whole(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            check_whole(value, f"{path}.{number}" if path else str(number))
