"""Check a config without running it.

Every component must exist and take its arguments, every reference must resolve, and the recipe
must know every key. All problems are listed together.

examples:
  tune validate smollm2/135M_lora_single_device
  tune validate my_config.yaml optimizer.lr=1e-4 --recipe my_recipe.py
"""

import argparse

from checkpointing.cli.catalog import find_config, find_recipe, recipe_of
from checkpointing.cli.recipe_file import load_recipe, make_working_directory_importable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune validate`."""
    parser.usage = "tune validate CONFIG [--recipe RECIPE] [key=value ...] [~key ...]"
    parser.add_argument("config", metavar="CONFIG", help="name, or path of a .yaml file")
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="recipe that the config is for; a name such as X_lora_single_device tells it",
    )
    parser.set_defaults(overrides=[])


def execute(args: argparse.Namespace) -> int:
    """Loads the config as a run would, and checks it."""
    from checkpointing.training.config import load_config, validate

    config = find_config(args.config)
    recipe = find_recipe(args.recipe) if args.recipe else recipe_of(config.name)
    make_working_directory_importable()
    known_keys = load_recipe(recipe).config_keys if recipe else None
    validate(load_config(config.path, args.overrides, known_keys=known_keys))
    purpose = f"for {recipe.name}" if recipe else "no recipe known, so its keys were not checked"
    print(f"{args.config} is well-formed ({purpose})")
    return 0
