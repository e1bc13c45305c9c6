"""Plain values of a recipe's config, checked."""

import random
from collections.abc import Mapping
from typing import Any

import torch

from checkpointing.errors import ConfigError
from checkpointing.nearest import hint
from checkpointing.training.options import TrainingOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def get_dtype(name: str) -> torch.dtype:
    """The dtype that ``fp32`` or ``bf16`` names.

    Raises:
        ConfigError: for another name.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype={name}: {hint(str(name), DTYPES)}")
    return DTYPES[name]


def get_device(name: str) -> torch.device:
    """The device that ``cpu``, ``cuda``, ``cuda:1`` … names.

    Raises:
        ConfigError: if this machine does not have it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device={name} cannot be used here ({str(error).splitlines()[0]}); set device=cpu"
        ) from error
    return device


def get_seed(config: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """The seed of a run: the config's, else that of the run that is resumed, else a random one.

    Args:
        config: of the recipe.
        state: as a checkpointer loaded it.
    """
    given = config.get("seed")
    if given is not None:
        return int(given)
    if "seed" in state:
        return int(state["seed"])
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed={seed} was chosen at random")
    return seed


def training_options(config: Mapping[str, Any], seed: int) -> TrainingOptions:
    """The part of a recipe's config that the training loop reads; what is left out is default.

    Raises:
        ConfigError: if a value is not possible.
    """
    names = TrainingOptions.__dataclass_fields__.keys() - {"seed"}
    given = {name: config[name] for name in names if config.get(name) is not None}
    return TrainingOptions(seed=seed, **given)


def require(config: Mapping[str, Any], *keys: str) -> None:
    """Makes sure that a recipe's config has what the recipe cannot do without.

    Raises:
        ConfigError: with all keys that are missing.
    """
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ConfigError(f"missing from the config: {', '.join(missing)}")
