"""What a model's config file must say: its family, and numbers that are numbers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.families import FAMILIES, MODEL_TYPES
from checkpointing.mapping.family import Family
from checkpointing.nearest import hint


def recognise(config_file: Path, config_says: str | None, model_type: str | None) -> Family:
    """The family that the config file and the recipe's ``model_type`` agree on.

    Args:
        config_file: for errors.
        config_says: ``model_type`` in the config file, if it has one.
        model_type: torchtune's ModelType name, or a family's own name.

    Raises:
        ConfigError: if they contradict each other, or neither names a known family.
    """
    named = None if model_type is None else _family_of(model_type)
    if config_says is not None and config_says not in FAMILIES:
        raise ConfigError(
            f"{config_file}: model_type {config_says!r} is not supported"
            f"{f' and contradicts model_type={model_type}' if model_type else ''}; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    if named is None and config_says is None:
        raise ConfigError(
            f"{config_file}: does not say which model_type it is; give the checkpointer's "
            f"model_type, one of {', '.join(MODEL_TYPES)}"
        )
    if named is not None and config_says is not None and named != config_says:
        raise ConfigError(
            f"{config_file}: says model_type {config_says!r}, but the recipe's model_type "
            f"{model_type} means {named!r}; correct or remove the recipe's"
        )
    return FAMILIES[named or config_says or ""]


def _family_of(model_type: str) -> str:
    if model_type in FAMILIES:
        return model_type
    family = MODEL_TYPES.get(model_type.upper())
    if family is None:
        raise ConfigError(f"model_type: {model_type!r} is unknown, {hint(model_type, MODEL_TYPES)}")
    return family


def size_field(
    path: Path, values: Mapping[str, Any], key: str, otherwise: int | None = None
) -> int:
    """A size in a config file; where it is missing or null, the other value.

    Raises:
        ConfigError: if it is no positive whole number.
    """
    value = values.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{path}: {key} is {value!r}, but must be a positive whole number")
    return value


def number_field(path: Path, values: Mapping[str, Any], key: str, otherwise: float) -> float:
    """A positive number in a config file; where it is missing or null, the other value.

    Raises:
        ConfigError: if it is no positive number.
    """
    value = values.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{path}: {key} is {value!r}, but must be a positive number")
    return value
