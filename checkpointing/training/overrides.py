"""Overrides of a config from the command line: `key=value`, `+key=value` and `~key`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpointing.errors import ConfigError
from checkpointing.nearest import hint
from checkpointing.training.components import COMPONENT, is_component, locate, misfits


@dataclass(frozen=True)
class Override:
    """One change of a config.

    Attributes:
        text: as it was written.
        action: ``set`` a key that must be known, ``add`` any key, or ``delete`` a key.
        key: dotted, such as ``optimizer.lr``.
        value: ``None`` for ``delete``.
    """

    text: str
    action: Literal["set", "add", "delete"]
    key: str
    value: Any = None


def parse_override(text: str) -> Override:
    """Reads one override. The value is YAML, with numbers such as 3e-4 read as floats.

    Only the first ``=`` separates key and value.

    Raises:
        ConfigError: if the text is none of the three forms, or the value is not YAML.
    """
    if text.startswith("~"):
        key = text[1:]
        if not _is_key(key):
            raise ConfigError(f"{text!r}: write ~key to delete a key from the config")
        return Override(text, "delete", key)
    key, equals, value = text.partition("=")
    action: Literal["set", "add"] = "add" if key.startswith("+") else "set"
    key = key.removeprefix("+")
    if not equals or not _is_key(key):
        raise ConfigError(
            f"{text!r} is not an override; write key=value, +key=value for a new key, "
            "or ~key to delete one"
        )
    return Override(text, action, key, _parse_value(text, value))


def apply_overrides(
    config: DictConfig, texts: Sequence[str], known_keys: Collection[str] | None
) -> None:
    """Changes a config in place. The order of the overrides does not matter, except for two of
    the same key: the later one counts.

    Args:
        config: the config.
        texts: overrides as written on the command line.
        known_keys: the keys that the recipe reads, dotted where nested; ``None`` if it does not
            declare them.

    Raises:
        ConfigError: if an override is malformed or names an unknown key.
    """
    overrides = [parse_override(text) for text in texts]
    # Components first, so that an argument is checked against the class that will get it.
    for override in sorted(overrides, key=lambda each: not _names_component(config, each)):
        try:
            _apply(config, override, known_keys)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override.text}: {error}") from error


def _apply(config: DictConfig, override: Override, known_keys: Collection[str] | None) -> None:
    node: DictConfig | ListConfig = config
    where = ""
    below_component = False
    *path, name = override.key.split(".")
    for part in path:
        _check(override, node, where, part, known_keys, below_component)
        below_component = below_component or is_component(node)
        inner = node[_index(node, part)] if part in _names(node) else None
        if inner is None:
            node[part] = {}
            inner = node[part]
        where = f"{where}.{part}" if where else part
        if not isinstance(inner, DictConfig | ListConfig):
            raise ConfigError(f"{override.text}: {where} is {inner!r}, which has no keys inside")
        node = inner
    _check(override, node, where, name, known_keys, below_component)
    if override.action == "delete":
        del node[_index(node, name)]
    elif isinstance(node, ListConfig):
        node[int(name)] = override.value
    elif name in node and isinstance(override.value, str) and is_component(node[name]):
        # A bare name given to a component replaces its class and keeps its arguments.
        node[name][COMPONENT] = override.value
    else:
        OmegaConf.update(node, name, override.value, force_add=True)


def _check(
    override: Override,
    node: DictConfig | ListConfig,
    where: str,
    name: str,
    known_keys: Collection[str] | None,
    below_component: bool,
) -> None:
    """Checks that a key is in the node, or that the recipe or component takes it."""
    names = _names(node)
    if name in names:
        return
    place = f"{override.text}: unknown key {name!r} in {where or 'the config'}"
    if override.action == "delete" or isinstance(node, ListConfig):
        raise ConfigError(f"{place}; {hint(name, names)}")
    if override.action == "add" or (where and name == COMPONENT):
        return
    if is_component(node):
        problems = misfits(locate(node[COMPONENT]), [name])
        if problems:
            raise ConfigError(f"{override.text}: {node[COMPONENT]} {problems[0]}")
        return
    declared = children(known_keys or (), where)
    # Nobody declares the keys of a mapping that is a component's argument.
    if name in declared or (below_component and not declared):
        return
    new = "" if declared else f"; to add a new key, write +{override.text}"
    raise ConfigError(f"{place}; {hint(name, [*names, *declared])}{new}")


def children(keys: Iterable[str], prefix: str) -> set[str]:
    """The names right below a prefix in dotted keys; the first parts if the prefix is empty."""
    start = f"{prefix}." if prefix else ""
    return {key[len(start) :].split(".")[0] for key in keys if key.startswith(start)}


def _names(node: DictConfig | ListConfig) -> list[str]:
    if isinstance(node, ListConfig):
        return [str(index) for index in range(len(node))]
    return [str(key) for key in node]


def _index(node: DictConfig | ListConfig, name: str) -> Any:
    return int(name) if isinstance(node, ListConfig) else name


def _names_component(config: DictConfig, override: Override) -> bool:
    if override.key.rpartition(".")[2] == COMPONENT:
        return True
    node = OmegaConf.select(config, override.key, throw_on_resolution_failure=False)
    return isinstance(override.value, str) and is_component(node)


def _is_key(key: str) -> bool:
    return all(key.split(".")) and not any(character in key for character in "=~+ []")


def _parse_value(text: str, value: str) -> Any:
    try:
        # OmegaConf's own reader: it takes 3e-4 for a number, which YAML 1.1 does not.
        parsed = OmegaConf.from_dotlist([f"value={value}"])
        return OmegaConf.to_container(parsed)["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{text!r}: the value cannot be read ({first}); put it in quotes: "
            f"{text.partition('=')[0]}='\"…\"'"
        ) from error
