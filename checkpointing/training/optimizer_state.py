"""Putting a saved state into an optimizer, whose parameters may lie in shards."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import is_dtensor
from checkpointing.storage.local_part import copy_part


def load_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], dtypes: Sequence[torch.dtype] = ()
) -> None:
    """Restores an optimizer's state, but keeps the settings that it was made with.

    Args:
        optimizer: that was just made.
        saved: the state.
        dtypes: of the parameters, in the order of the groups, when it was saved. Where they are the
            same now the state keeps its own; else torch casts it to those of the parameters.

    Raises:
        ConfigError: if the state is of another number of parameters or groups.
    """
    settings = [dict(group) for group in optimizer.param_groups]
    arguments = inspect.signature(type(optimizer)).parameters
    saved = {**saved, "state": _sharded(saved["state"], optimizer)}
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        raise ConfigError(
            f"the saved optimizer state does not fit this run: {error}; use the same optimizer "
            "and trained modules as the run that saved it"
        ) from error
    for group, made_with in zip(optimizer.param_groups, settings, strict=True):
        # Only arguments: some optimizers keep counters of theirs in the groups too.
        group.update({key: made_with[key] for key in arguments if key in made_with})
        # A schedule takes it for what it scales, where it is there.
        group.pop("initial_lr", None)
    for number, (parameter, dtype) in enumerate(
        zip(parameters_of(optimizer), dtypes, strict=False)
    ):
        # torch casts all that it loads, though some of it never was of the parameter's dtype.
        for key, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter][key]
            is_plain = type(value) is Tensor or is_dtensor(value)
            if is_plain and loaded.dtype != value.dtype and parameter.dtype == dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _sharded(state: Mapping[int, Any], optimizer: Optimizer) -> dict[int, Any]:
    """A saved state, of which this process keeps its part where a parameter lies in shards."""
    parameters = dict(enumerate(parameters_of(optimizer)))
    return {
        number: {
            key: _part_like(parameters.get(number), value, f"optimizer.state.{number}.{key}")
            for key, value in values.items()
        }
        for number, values in state.items()
    }


def _part_like(parameter: Tensor | None, value: Any, name: str) -> Any:
    if not is_dtensor(parameter) or type(value) is not Tensor or value.shape != parameter.shape:
        return value
    part = torch.empty_like(parameter, dtype=value.dtype)
    copy_part(part, value, name)
    return part


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups, by which a state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
