"""Print a config.

examples:
  tune cat smollm2/135M_lora_single_device
  tune cat smollm2/135M_lora_single_device --sort
"""

import argparse

from checkpointing.cli.catalog import find_config, recipes
from checkpointing.cli.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune cat`."""
    parser.add_argument("config", metavar="CONFIG", help="name, or path of a .yaml file")
    parser.add_argument("--sort", action="store_true", help="sort the keys; leaves out comments")


def execute(args: argparse.Namespace) -> int:
    """Prints the file as it is, or its keys in order."""
    if args.config in [recipe.name for recipe in recipes()]:
        raise UsageError(f"{args.config} is a recipe, not a config; `tune ls` shows its configs")
    path = find_config(args.config).path
    if not args.sort:
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    print(_sorted(path.read_text(encoding="utf-8"), str(path)), end="")
    return 0


def _sorted(text: str, where: str) -> str:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_yaml(OmegaConf.create(text), sort_keys=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{where}: the config is not valid YAML: {error}") from error
