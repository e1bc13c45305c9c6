"""Run a recipe with a config.

examples:
  tune run lora_finetune_single_device --config smollm2/135M_lora_single_device
  tune run lora_finetune_single_device --config my_config.yaml optimizer.lr=1e-4 batch_size=8
  tune run my_recipe.py --config my_config.yaml 'model.lora_attn_modules=[q_proj,v_proj]'

overrides:
  key=value      a value is YAML; nested keys are written a.b=value
  node=Class     another class for a component, such as optimizer=torch.optim.SGD
  ~key           delete a key (put it in quotes in zsh)
  +key=value     add a key that is neither in the config nor known to the recipe
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from checkpointing.cli.catalog import Entry, find_config, find_recipe, recipe_of
from checkpointing.cli.errors import UsageError
from checkpointing.cli.recipe_file import load_recipe
from checkpointing.errors import CheckpointNotFoundError
from checkpointing.storage.location import is_remote

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune run`."""
    parser.usage = "tune run RECIPE --config CONFIG [key=value ...] [~key ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="name, or path of a .py file")
    parser.add_argument(
        "--config", metavar="CONFIG", required=True, help="name, or path of a .yaml file"
    )
    parser.set_defaults(overrides=[])


def execute(args: argparse.Namespace) -> int:
    """Imports the recipe and calls its ``main`` with the config."""
    from checkpointing.training.config import load_config
    from checkpointing.training.run_record import names_of_run
    from checkpointing.training.signals import StoppedBySignal

    recipe, config = find_recipe(args.recipe), find_config(args.config)
    _check_pair(recipe, config)
    module = load_recipe(recipe)
    cfg = load_config(config.path, args.overrides, known_keys=module.config_keys)
    _check_downloaded(cfg, args.config)
    try:
        with names_of_run(recipe.name, config.name):
            module.main(cfg)
    except StoppedBySignal as stop:
        print(f"\n{stop.signal.name}: {_how_to_go_on(cfg, args)}", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        print(f"\n{_how_to_go_on(cfg, args)}", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _check_pair(recipe: Entry, config: Entry) -> None:
    """Checks that a shipped config is for the shipped recipe that it is run with."""
    owner = recipe_of(config.name)
    if recipe.shipped and config.shipped and owner is not None and owner.name != recipe.name:
        raise UsageError(
            f"the config {config.name} is for the recipe {owner.name}, not {recipe.name}; "
            f"run it with: tune run {owner.name} --config {config.name}"
        )


def _check_downloaded(cfg: Any, config: str) -> None:
    directory = _selected(cfg, "checkpointer.checkpoint_dir")
    if is_remote(directory):
        return  # The checkpointer says what is not there.
    if isinstance(directory, str) and not Path(directory).is_dir():
        raise CheckpointNotFoundError(
            f"checkpointer.checkpoint_dir: there is no directory {directory}; download the model "
            f"as the first lines of the config say (tune cat {config}), or name another directory "
            "with checkpointer.checkpoint_dir=…"
        )


def _how_to_go_on(cfg: Any, args: argparse.Namespace) -> str:
    from checkpointing.storage.mirror import place_for

    key = "resume_from_checkpoint="
    overrides = [each for each in args.overrides if not each.removeprefix("+").startswith(key)]
    command = ["tune", "run", args.recipe, "--config", args.config, *overrides]
    output_dir = _selected(cfg, "output_dir")
    place = place_for(output_dir, "write") if is_remote(output_dir) else output_dir
    saved = isinstance(place, str | Path) and any(Path(place).glob("[!.]*/manifest.json"))
    if not saved:
        return f"interrupted before the first checkpoint; start again with: {shlex.join(command)}"
    command.append(f"{key}True")
    return f"interrupted; go on from the last checkpoint with: {shlex.join(command)}"


def _selected(cfg: Any, key: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None
