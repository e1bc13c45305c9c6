"""States that ``torch.distributed.checkpoint`` saves and loads: nested, each value with a name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from checkpointing.errors import ConfigError
from checkpointing.resume import check_recipe_state


def flattened(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a state by the names that they have in a checkpoint, keys joined by dots.

    Raises:
        ConfigError: if two have the same name.
    """
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(dict(state_dict))
    except ValueError as error:
        raise ConfigError(
            f"state_dict: two values have one name once the keys are joined by dots ({error}); "
            "rename one of the keys"
        ) from error
    return planner.state_dict


def check_saveable(name: str, value: Any) -> None:
    """Checks that a value can be saved and read again without running code.

    Raises:
        ConfigError: if not; names the value.
    """
    if not isinstance(value, Tensor):
        if _holds_shards(value):
            raise ConfigError(
                f"state_dict: {name} is a {type(value).__name__} with a DTensor in it; put it into "
                "a dictionary or a list, of which each tensor is saved by itself"
            )
        check_recipe_state({name: value})
        return
    if has_summands(value):
        raise ConfigError(
            f"state_dict: {name} is a DTensor of which each process has a summand; "
            "redistribute it to shards or copies first"
        )
    own = local_part(value)
    plain = type(own) in (Tensor, torch.nn.Parameter)
    if not plain or own.layout != torch.strided or own.is_quantized or own.is_meta:
        raise ConfigError(
            f"state_dict: {name} is a {type(own).__name__} ({own.layout}, on {own.device}), and a "
            "distributed checkpoint holds dense tensors alone; turn it into such tensors first"
        )


def _holds_shards(content: Any) -> bool:
    if isinstance(content, Mapping):
        return any(map(_holds_shards, content.values()))
    if isinstance(content, list | tuple | set):
        return any(map(_holds_shards, content))
    return isinstance(content, DTensor)


def local_part(value: Tensor) -> Tensor:
    """What this process has of a tensor."""
    if not isinstance(value, DTensor):
        return value.detach()
    own = value.to_local().detach()
    # What a collective has not finished yet.
    return own.wait() if hasattr(own, "wait") else own


def has_summands(value: Tensor) -> bool:
    """Whether a tensor is the sum of what the processes have, which is no part of it."""
    return isinstance(value, DTensor) and any(cut.is_partial() for cut in value.placements)
