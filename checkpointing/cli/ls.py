"""List the recipes and their configs."""

import argparse

from checkpointing.cli.catalog import configs, recipe_of, recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`tune ls` takes none."""


def execute(args: argparse.Namespace) -> int:
    """Prints every recipe with its configs below, each with one line of description."""
    by_recipe: dict[str | None, list[tuple[str, str]]] = {}
    for config in configs():
        owner = recipe_of(config.name)
        row = (f"  {config.name}", config.summary())
        by_recipe.setdefault(owner.name if owner else None, []).append(row)
    rows: list[tuple[str, str]] = []
    for recipe in recipes():
        rows += [(recipe.name, recipe.summary()), *by_recipe.get(recipe.name, []), ("", "")]
    if None in by_recipe:
        rows += [("other configs", ""), *by_recipe[None], ("", "")]
    width = max((len(name) for name, _ in rows), default=0)
    for name, summary in rows[:-1]:
        print(f"{name:{width}}  {summary}".rstrip())
    return 0
