"""Components: config nodes that name a class or function in `_component_`, and its arguments."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpointing.errors import ConfigError
from checkpointing.nearest import hint

COMPONENT = "_component_"


def is_component(node: Any) -> bool:
    """Whether a config node names a class or function to call."""
    return isinstance(node, Mapping | DictConfig) and COMPONENT in node


def locate(path: str) -> Any:
    """Imports the class or function that a dotted path names, such as ``torch.optim.AdamW``.

    Raises:
        ConfigError: if a package on the way is not installed, a name on the way does not exist
            (with the nearest one that does), or the path leads to something that is not callable.
    """
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{COMPONENT}: {path!r} is not the dotted path of a class or function; "
            "write it as in torch.optim.AdamW"
        )
    found: Any = _import(parts[0], path)
    if found is None:
        raise ConfigError(
            f"{path}: the package {parts[0]!r} is not installed; "
            f"install it (pip install {parts[0]}) or correct the name"
        )
    for end, part in enumerate(parts[1:], start=2):
        inner = _attribute(found, part, path)
        if inner is None and isinstance(found, ModuleType):
            inner = _import(".".join(parts[:end]), path)
        if inner is None:
            raise ConfigError(
                f"{path}: {'.'.join(parts[: end - 1])} has no {part!r}; {hint(part, _names(found))}"
            )
        found = inner
    if not callable(found):
        raise ConfigError(f"{path}: is a {type(found).__name__}, not a class or function")
    return found


def signature(component: Any) -> inspect.Signature | None:
    """The signature of a class or function; ``None`` if it has none that Python can tell."""
    try:
        return inspect.signature(component)
    except (TypeError, ValueError):
        return None


def misfits(component: Any, names: Sequence[str]) -> list[str]:
    """Problems with argument names that a class or function does not take, one line each."""
    sign = signature(component)
    if sign is None:
        return []
    parameters = sign.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [parameter.name for parameter in parameters if parameter.kind in by_name]
    return [f"has no argument {name!r}; {hint(name, known)}" for name in names if name not in known]


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the class or function that a config node names, with the node's keys as arguments.

    Nodes inside the node that name a component themselves are called first. Interpolations are
    resolved, and lists and mappings become plain ones.

    Args:
        node: a config node with `_component_`; ``None`` gives ``None``.
        args: positional arguments before those of the node.
        kwargs: arguments that go before those of the same name in the node.

    Raises:
        ConfigError: if the component does not exist or the arguments do not fit it.
    """
    if node is None:
        return None
    if not is_component(node):
        raise ConfigError(
            f"this config node has no {COMPONENT}: {_short(node)}; name a class there"
        )
    return _call(_plain(node), args, kwargs)


def _call(node: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    path = node[COMPONENT]
    component = locate(path)
    own = {key: value for key, value in node.items() if key != COMPONENT and key not in kwargs}
    problems = misfits(component, [*own, *kwargs])
    sign = signature(component)
    if sign is not None and not problems:
        problems = _unbound(sign, args, {**own, **kwargs})
    if problems:
        raise ConfigError(f"{path}: " + f"\n{path}: ".join(problems))
    return component(*args, **{key: _build(value) for key, value in own.items()}, **kwargs)


def _build(value: Any) -> Any:
    """A config value with the components in it called."""
    if is_component(value):
        return _call(value, (), {})
    if isinstance(value, Mapping):
        return {key: _build(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_build(item) for item in value]
    return value


def _unbound(sign: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What keeps a call from fitting a signature: arguments that miss, or come twice."""
    try:
        given = sign.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        return [str(error)]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        f"the required argument {parameter.name!r} is missing; add it to the config"
        for parameter in sign.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in variadic
        and parameter.name not in given
    ]


def _plain(node: Any) -> Any:
    if not OmegaConf.is_config(node):
        return node
    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config cannot be resolved: {error}") from error


def _short(node: Any) -> str:
    text = str(node)
    return text if len(text) <= 80 else text[:77] + "..."


def _import(name: str, path: str) -> ModuleType | None:
    """A module; ``None`` if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise ConfigError(
            f"{path}: {name} needs the package {error.name!r}, which is not installed "
            f"(pip install {error.name})"
        ) from error
    except ImportError as error:
        raise ConfigError(f"{path}: {name} cannot be imported: {error}") from error


def _attribute(owner: Any, name: str, path: str) -> Any:
    try:
        return getattr(owner, name, None)
    except ImportError as error:
        raise ConfigError(f"{path}: cannot be imported: {error}") from error


def _names(owner: Any) -> list[str]:
    """What could stand after the owner's name and a dot."""
    inner = pkgutil.iter_modules(owner.__path__) if hasattr(owner, "__path__") else ()
    names = [*dir(owner), *(module.name for module in inner)]
    return [name for name in names if not name.startswith("_")]
