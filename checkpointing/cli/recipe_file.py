"""Recipes are Python files; a run imports one and calls its `main`."""

import importlib.util
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.cli.catalog import Entry
from checkpointing.cli.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """A recipe's file, imported.

    Attributes:
        main: what runs it, given its config.
        config_keys: the keys that it reads, dotted where nested (its ``CONFIG_KEYS``); ``None`` if
            it does not declare them.
    """

    main: Callable[[Any], Any]
    config_keys: Collection[str] | None


def load_recipe(entry: Entry) -> Recipe:
    """Imports a recipe's file.

    Modules beside a recipe of the user's own, and in the working directory, can be imported by it
    and named as components.

    Raises:
        UsageError: if the file has no function ``main``.
    """
    if not entry.shipped:
        sys.path.insert(0, str(entry.path.resolve().parent))
    make_working_directory_importable()
    name = f"tune_recipe_{entry.name}"
    spec = importlib.util.spec_from_file_location(name, entry.path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{entry.path} cannot be imported as Python; a recipe ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Registered as an import would, so that its classes can be pickled and its types resolved.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    main = getattr(module, "main", None)
    if not callable(main):
        raise UsageError(f"{entry.path} has no function main(cfg), which a recipe starts with")
    return Recipe(main, getattr(module, "CONFIG_KEYS", None))


def make_working_directory_importable() -> None:
    """Lets a config name components in modules of the working directory."""
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
