"""What a run is: its recipe, its config, and on how many processes; kept in its checkpoints."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpointing.errors import ConfigError

SETTINGS, WORLD_SIZE = "settings", "world_size"
# Of this start rather than of the run.
_OF_THIS_START = frozenset({"resume_from_checkpoint", "resume_override"})
_SECRET = re.compile(r"(?i)(.*_)?(api_?key|secret|password|(access|api|auth|hf|hub)_token)|token")
_NAMES: ContextVar[Mapping[str, str]] = ContextVar("names of the recipe and the config")


@contextmanager
def names_of_run(recipe: str, config: str) -> Iterator[None]:
    """Tells the recipe that runs in the block what it and its config are called.

    Args:
        recipe: its name, without directories of this machine.
        config: the same.
    """
    token = _NAMES.set({"recipe": recipe, "config": config})
    try:
        yield
    finally:
        _NAMES.reset(token)


def run_record(config: DictConfig) -> dict[str, Any]:
    """What a run is, as values that load with ``torch.load(weights_only=True)``.

    Args:
        config: of the recipe.

    Returns:
        ``settings``, the config with interpolations resolved and passwords left out;
        ``world_size``, the number of processes; and ``recipe`` and ``config``, the names of both,
        if ``tune run`` runs it.

    Raises:
        ConfigError: if the config cannot be resolved.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    settings = plain(config)
    return {
        **_NAMES.get({}),
        WORLD_SIZE: torch.distributed.get_world_size() if distributed else 1,
        SETTINGS: {key: value for key, value in settings.items() if key not in _OF_THIS_START},
    }


def plain(config: Any) -> Any:
    """A node of a config as plain values, without passwords.

    Raises:
        ConfigError: if the config cannot be resolved.
    """
    if not OmegaConf.is_config(config):
        return _plain(config)
    try:
        return _plain(OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config cannot be resolved: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _plain(item) for key, item in value.items() if not _SECRET.fullmatch(str(key))
        }
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
