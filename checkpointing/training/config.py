"""Recipe configs: read, changed from the command line, checked, and turned into objects.

OmegaConf does the merging and the interpolation.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpointing.errors import ConfigError
from checkpointing.nearest import hint
from checkpointing.storage.mirror import local
from checkpointing.training.components import (
    COMPONENT,
    instantiate,
    is_component,
    locate,
    misfits,
)
from checkpointing.training.overrides import apply_overrides, children

__all__ = ["instantiate", "load_config", "validate"]


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    known_keys: Collection[str] | None = None,
) -> DictConfig:
    """Reads a config file and applies overrides to it.

    Args:
        path: a YAML file, or its URL, whose top level is a mapping.
        overrides: ``key=value`` (nested ``a.b=v``, lists ``k=[a,b]``), ``~key`` to delete, and
            ``+key=value`` for a key that is neither in the file nor declared. A bare class name
            given to a component (``optimizer=torch.optim.SGD``) replaces its class only.
        known_keys: the keys that the recipe reads (its ``CONFIG_KEYS``), dotted where nested;
            ``None`` if it does not declare them.

    Raises:
        ConfigError: if the file is not there or is not such YAML, or a key is unknown.
    """
    config = _read(local(path))
    apply_overrides(config, overrides, known_keys)
    problems = _unknown(config, known_keys or (), "")
    if problems:
        raise ConfigError(f"{path}: " + f"\n{path}: ".join(problems))
    return config


def validate(config: DictConfig) -> None:
    """Checks that all interpolations resolve, all components exist, and take their arguments.

    Arguments that miss are not reported: a recipe passes some itself, such as the parameters to
    the optimizer.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    problems = [*_unresolved(config, ""), *_component_problems(config, "")]
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the config has {count}\n{lines}")


def _read(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"{path}: the config cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: the config is not valid YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: the top level of a config is key: value lines, not a list")
    return config


def _unknown(node: DictConfig, known_keys: Collection[str], path: str) -> list[str]:
    """Keys that the recipe does not declare, one line each."""
    declared = children(known_keys, path)
    if not declared:
        return []
    problems = []
    for key in map(str, node):
        full = f"{path}.{key}" if path else key
        if key not in declared:
            problems.append(f"the recipe has no key {full!r}; {hint(key, declared)}")
            continue
        inner = _literal(node, key)
        if isinstance(inner, DictConfig) and not is_component(inner):
            problems += _unknown(inner, known_keys, full)
    return problems


def _keys(node: Any) -> list[Any]:
    """Keys of a mapping or indices of a list; none for a value."""
    if isinstance(node, DictConfig):
        return list(node)
    return list(range(len(node))) if isinstance(node, ListConfig) else []


def _literal(node: Any, key: Any) -> Any:
    """What stands at a key itself; ``None`` where it refers to another place or is missing."""
    if OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key):
        return None
    return node[key]


def _unresolved(node: Any, path: str) -> list[str]:
    """Values that are mandatory (``???``) or refer to what is not there, one line each."""
    problems = []
    for key in _keys(node):
        full = f"{path}.{key}" if path else str(key)
        try:
            _ = node[key]
        except OmegaConfBaseException as error:
            problems.append(f"{full}: {str(error).splitlines()[0]}")
            continue
        problems += _unresolved(_literal(node, key), full)
    return problems


def _component_problems(node: Any, path: str) -> list[str]:
    """Components that do not exist or do not take their arguments, one line each."""
    problems = _misfits(node, path) if is_component(node) else []
    for key in _keys(node):
        full = f"{path}.{key}" if path else str(key)
        problems += _component_problems(_literal(node, key), full)
    return problems


def _misfits(node: DictConfig, path: str) -> list[str]:
    try:
        name = node[COMPONENT]
        component = locate(name)
    except (ConfigError, OmegaConfBaseException) as error:
        return [f"{path}: {error}"]
    arguments = [str(key) for key in node if key != COMPONENT]
    return [f"{path}: {name} {problem}" for problem in misfits(component, arguments)]
