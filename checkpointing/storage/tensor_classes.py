"""Tensor classes besides torch's own that a recipe state may hold: torchao's optimizer states."""

import importlib
import math
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import ConfigError

# The states of torchao's low-bit optimizers, and the module of each below one of the packages.
_MODULES = {
    "OptimState8bit": "subclass_8bit",
    "OptimState4bit": "subclass_4bit",
    "OptimStateFp8": "subclass_fp8",
}
# Where torchao has them, and where its releases before 0.11 had them, as old files say.
_PACKAGE = "torchao.optim"
_PACKAGES = (_PACKAGE, "torchao.prototype.low_bit_optim")


def loads_without_code(tensor: Tensor) -> bool:
    """Whether a saved tensor can be read with ``weights_only=True`` by :func:`safe_classes`."""
    kind = type(tensor)
    if kind not in (Tensor, torch.nn.Parameter):
        return is_known_class(_path(kind))
    # A tensor that claims more elements than it has is not read again.
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    return dense and stored_bytes(tensor) <= tensor.untyped_storage().nbytes()


def is_known_class(path: str) -> bool:
    """Whether a dotted path is that of a tensor class besides torch's own."""
    return _class_name(path) is not None


def stored_bytes(tensor: Tensor) -> int:
    """Size of a tensor's data; of a quantised one that of the tensors which it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return math.prod(tensor.shape) * tensor.element_size()


def safe_classes(
    paths: Iterable[str], where: object
) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """The classes that a file may ask for, as ``torch.serialization.safe_globals`` takes them.

    Args:
        paths: dotted names of classes or functions in a file. Only those of torchao's optimizer
            states give a class, whichever release of torchao saved them.
        where: the file, for errors.

    Raises:
        ConfigError: if torchao is not installed, or has none of the classes any more.
    """
    classes: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    for path in paths:
        name = _class_name(path)
        if name is not None:
            found = _find(name, path, where)
            classes.append(found if _path(found) == path else (found, path))
    return classes


def _class_name(path: str) -> str | None:
    """Name of the known class that a dotted path leads to in some release of torchao."""
    module, _, name = path.rpartition(".")
    known = {f"{package}.{_MODULES.get(name)}" for package in _PACKAGES}
    return name if name in _MODULES and module in known else None


def _find(name: str, path: str, where: object) -> type:
    module = f"{_PACKAGE}.{_MODULES[name]}"
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        try:
            has = f"torchao {metadata.version('torchao')} has no {module}.{name} ({error})"
        except metadata.PackageNotFoundError:
            has = "torchao is not installed"
        raise ConfigError(
            f"{where}: holds the state of a torchao optimizer ({path}), and {has}; "
            "install the torchao that the run was trained with, or torchao 0.18"
        ) from error


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
