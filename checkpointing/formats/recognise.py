"""What a model's config file must say: its family, and numbers that are numbers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.families import FAMILIES, MODEL_TYPES
from checkpointing.families.classifier import SUFFIX as CLASSIFIER
from checkpointing.mapping.family import Family
from checkpointing.nearest import hint

# torchtune's name for a classifier of any family.
REWARD = "REWARD"


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
    if (named, config_says) == (REWARD, None):
        raise ConfigError(
            f"{config_file}: does not say which model_type it is, and REWARD stands for several; "
            f"give one of {', '.join(name for name in FAMILIES if name.endswith(CLASSIFIER))}"
        )
    if named == REWARD:
        named = config_says = f"{str(config_says).removesuffix(CLASSIFIER)}{CLASSIFIER}"
    elif named is not None and config_says == named + CLASSIFIER:
        named = config_says  # LLAMA3 is right of a Llama 3 with any head
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


def refuse_multimodal(config_file: Path, config: Mapping[str, Any]) -> None:
    """Refuses a model that also sees or hears, unless it is a family of its own.

    Args:
        config_file: for errors.
        config: its content.

    Raises:
        ConfigError: names the model, and what to use instead.
    """
    parts = [key for key in ("text_config", "vision_config", "audio_config") if key in config]
    model_type = config.get("model_type")
    if not parts or model_type in FAMILIES:
        return
    text_type = (config.get("text_config") or {}).get("model_type")
    text_only = "take a release of it that is text only"
    if text_type in FAMILIES and (loader := FAMILIES[text_type].hf_class):
        remedy = f"load its text model by itself with transformers' {loader}, and save that"
    elif text_type in FAMILIES:
        remedy = (
            f"{text_only}, or save its text model, which is a {text_type}, by itself: load it with "
            "transformers' AutoModelForImageTextToText, make an AutoModelForCausalLM from its "
            "text_config, and save that with the model.language_model and the lm_head of the first"
        )
    else:
        remedy = f"{text_only}, if there is one; supported are {', '.join(sorted(FAMILIES))}"
    raise ConfigError(
        f"{config_file}: model_type {model_type!r} is a multimodal model ({', '.join(parts)}), "
        f"which is not supported; {remedy}"
    )


def _family_of(model_type: str) -> str:
    if model_type in FAMILIES:
        return model_type
    if model_type.upper() == REWARD:
        return REWARD
    family = MODEL_TYPES.get(model_type.upper())
    if family is None:
        raise ConfigError(f"model_type: {model_type!r} is unknown, {hint(model_type, MODEL_TYPES)}")
    return family


# A plan lists every module of every layer, and every expert: what a config claims must be bounded.
_MOST = 2**31 - 1
_MOST_LAYERS = 1000
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "num_global_layers")
# Natively a tensor holds all experts of a layer; no model has nearly as many.
_EXPERTS_PER_TENSOR = 256
_EXPERTS_AT_LEAST = 10_000


def check_counts(path: Path, layers: int, experts: int, tensors: int) -> None:
    """Checks that so many tensors can be those of so many experts.

    Raises:
        ConfigError: if there are far too few.
    """
    if layers * experts > _EXPERTS_PER_TENSOR * tensors + _EXPERTS_AT_LEAST:
        raise ConfigError(
            f"{path}: says that there are {layers} layers of {experts} experts, and the weights "
            f"are {tensors} tensors; the file is of another model, or damaged"
        )


def size_field(
    path: Path, values: Mapping[str, Any], key: str, otherwise: int | None = None
) -> int:
    """A size in a config file; where it is missing or null, the other value.

    Raises:
        ConfigError: if it is no positive whole number, or larger than that of any model.
    """
    value = values.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{path}: {key} is {value!r}, but must be a positive whole number")
    most = _MOST_LAYERS if key in _LAYERS else _MOST
    if value > most:
        raise ConfigError(f"{path}: {key} is {value}, but must be at most {most}")
    return value


def number_field(
    path: Path, values: Mapping[str, Any], key: str, otherwise: float | None = None
) -> float:
    """A positive number in a config file; where it is missing or null, the other value.

    Raises:
        ConfigError: if it is no positive number.
    """
    value = values.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{path}: {key} is {value!r}, but must be a positive number")
    return value
