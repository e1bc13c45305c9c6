"""The recipes and configs that come with the package, found as files.

A config belongs to a recipe by its name: `smollm2/135M_lora_single_device` to
`lora_finetune_single_device`, without the `_finetune`. QLoRA, which is a setting of LoRA, has the
recipe of LoRA.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from checkpointing.cli.errors import UsageError
from checkpointing.nearest import hint
from checkpointing.storage.location import is_remote

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Entry:
    """A recipe or a config.

    Attributes:
        name: as a user writes it, without the suffix.
        path: the file.
        shipped: it came with the package, and was not given by its path.
    """

    name: str
    path: Path
    shipped: bool = True

    def summary(self) -> str:
        """One line that says what it is: the first of its docstring or of its comments."""
        text = self.path.read_text(encoding="utf-8")
        if self.path.suffix == ".py":
            return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        first = text.partition("\n")[0]
        return first.lstrip("# ") if first.startswith("#") else ""


def recipes() -> list[Entry]:
    """All shipped recipes, by name."""
    root = _root("recipes")
    paths = sorted(path for path in root.glob("*.py") if not path.name.startswith("_"))
    return [Entry(path.stem, path) for path in paths]


def configs() -> list[Entry]:
    """All shipped configs, by name."""
    root = _root("configs")
    return [
        Entry(path.relative_to(root).with_suffix("").as_posix(), path)
        for path in sorted(root.rglob("*.yaml"))
    ]


def recipe_of(config_name: str) -> Entry | None:
    """The shipped recipe that a config is for, by the names; ``None`` if no name fits."""
    stem = config_name.rpartition("/")[2].replace("qlora_", "lora_")
    kinds = {recipe.name.replace("_finetune", ""): recipe for recipe in recipes()}
    fitting = [kind for kind in kinds if f"_{stem}".endswith(f"_{kind}")]
    # `grpo_lora_single_device` also ends in what is that of `lora_finetune_single_device`.
    return kinds[max(fitting, key=len)] if fitting else None


def find_recipe(name: str) -> Entry:
    """A shipped recipe by its name, or any by its path, which ends in ``.py``.

    Raises:
        UsageError: if there is none.
    """
    return _find(name, recipes(), "recipe", (".py",))


def find_config(name: str) -> Entry:
    """A shipped config by its name, or any by its path, which ends in ``.yaml`` or ``.yml``.

    Raises:
        UsageError: if there is none.
    """
    return _find(name, configs(), "config", (".yaml", ".yml"))


def _find(name: str, shipped: list[Entry], what: str, suffixes: tuple[str, ...]) -> Entry:
    for entry in shipped:
        if entry.name == name:
            return entry
    path = Path(name)
    known = [entry.name for entry in shipped]
    if path.suffix not in suffixes:
        raise UsageError(
            f"there is no {what} {name!r}; {hint(name, known)} "
            f"(`tune ls` shows all; a {what} of your own is given by its path, "
            f"ending in {suffixes[0]})"
        )
    if is_remote(name):
        from checkpointing.storage.mirror import local

        path = local(name)
    if not path.is_file():
        near = hint(path.with_suffix("").as_posix(), known)
        raise UsageError(f"the {what} file {name} does not exist; of the shipped ones, {near}")
    return Entry(path.stem, path, shipped=False)


def _root(kind: str) -> Path:
    # A wheel has them inside the package, a checkout at the root of the repository.
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind
