"""Run a recipe with a config.

examples:
  tune run lora_finetune_single_device --config smollm2/135M_lora_single_device
  tune run lora_finetune_single_device --config my_config.yaml optimizer.lr=1e-4 batch_size=8
  tune run my_recipe.py --config my_config.yaml 'model.lora_attn_modules=[q_proj,v_proj]'
  tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_1/8B_lora_distributed

overrides:
  key=value      a value is YAML; nested keys are written a.b=value
  node=Class     another class for a component, such as optimizer=torch.optim.SGD
  ~key           delete a key (put it in quotes in zsh)
  +key=value     add a key that is neither in the config nor known to the recipe
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpointing.cli.catalog import Entry, find_config, find_recipe, recipe_of, recipes
from checkpointing.cli.errors import UsageError
from checkpointing.cli.launch import add_options, launch, launch_options
from checkpointing.cli.recipe_file import Recipe, load_recipe
from checkpointing.cli.worker import INTERRUPTED, as_worker, is_worker, was_restarted
from checkpointing.errors import CheckpointNotFoundError
from checkpointing.storage.location import is_remote

_RESUME = "resume_from_checkpoint"
_DISTRIBUTED, _SINGLE = "_distributed", "_single_device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune run`."""
    parser.usage = (
        "tune run [--nproc_per_node N ...] RECIPE --config CONFIG [key=value ...] [~key ...]"
    )
    parser.add_argument("recipe", metavar="RECIPE", help="name, or path of a .py file")
    parser.add_argument(
        "--config", metavar="CONFIG", required=True, help="name, or path of a .yaml file"
    )
    add_options(parser)
    parser.set_defaults(overrides=[])


def execute(args: argparse.Namespace) -> int:
    """Imports the recipe and calls its ``main`` with the config, in one process or in many."""
    if is_worker():
        return as_worker(lambda: _run(args, []), args.debug)
    return _run(args, launch_options(args))


def _run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """Runs the recipe.

    Args:
        args: of the command.
        options: of the launcher; none: in this process.
    """
    from checkpointing.training.config import load_config

    recipe, config = find_recipe(args.recipe), find_config(args.config)
    _check_pair(recipe, config)
    if not is_worker():
        _check_processes(recipe, config, options)
    module = load_recipe(recipe)
    cfg = load_config(config.path, args.overrides, known_keys=module.config_keys)
    _check_downloaded(cfg, args.config)
    if not options:
        return _run_here(args, recipe, config, module, cfg)
    # What is wrong with the command was told above, once and not by every process.
    again = ["--debug"] if args.debug else []
    ending = launch(options, [*again, *_command(args)], args.debug)
    if ending.text is not None:
        print(ending.text, file=sys.stderr)
    if ending.code > 128:
        start = f"{signal.Signals(ending.code - 128).name}: " if ending.text is None else ""
        print(f"\n{start}{_how_to_go_on(cfg, args, options)}", file=sys.stderr)
    return ending.code


def _run_here(
    args: argparse.Namespace, recipe: Entry, config: Entry, module: Recipe, cfg: Any
) -> int:
    from omegaconf import OmegaConf

    from checkpointing.training.run_record import names_of_run
    from checkpointing.training.signals import StoppedBySignal

    if was_restarted() and _has_checkpoint(cfg):
        OmegaConf.update(cfg, _RESUME, True, force_add=True)
    try:
        with names_of_run(recipe.name, config.name):
            module.main(cfg)
    except StoppedBySignal as stop:
        if not is_worker():
            print(f"\n{stop.signal.name}: {_how_to_go_on(cfg, args)}", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        if not is_worker():
            print(f"\n{_how_to_go_on(cfg, args)}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _command(args: argparse.Namespace, overrides: Sequence[str] | None = None) -> list[str]:
    given = args.overrides if overrides is None else overrides
    return ["run", args.recipe, "--config", args.config, *given]


def _check_pair(recipe: Entry, config: Entry) -> None:
    """Checks that a shipped config is for the shipped recipe that it is run with."""
    owner = recipe_of(config.name)
    if recipe.shipped and config.shipped and owner is not None and owner.name != recipe.name:
        raise UsageError(
            f"the config {config.name} is for the recipe {owner.name}, not {recipe.name}; "
            f"run it with: tune run {owner.name} --config {config.name}"
        )


def _check_processes(recipe: Entry, config: Entry, options: Sequence[str]) -> None:
    """Checks that a shipped recipe for many processes is run so, and another one is not."""
    if not recipe.shipped:
        return
    if recipe.name.endswith(_DISTRIBUTED) and not options and "WORLD_SIZE" not in os.environ:
        raise UsageError(
            f"the recipe {recipe.name} trains in several processes; say in how many: "
            f"tune run --nproc_per_node <NUMBER> {recipe.name} --config {config.name}"
        )
    if recipe.name.endswith(_SINGLE) and options:
        other = recipe.name.replace(_SINGLE, _DISTRIBUTED)
        known = any(each.name == other for each in recipes())
        hint = f"; for several there is {other} (`tune ls` shows its configs)" if known else ""
        raise UsageError(
            f"the recipe {recipe.name} trains in one process: leave out {shlex.join(options)}{hint}"
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


def _how_to_go_on(cfg: Any, args: argparse.Namespace, options: Sequence[str] = ()) -> str:
    key = f"{_RESUME}="
    overrides = [each for each in args.overrides if not each.removeprefix("+").startswith(key)]
    name, *rest = _command(args, overrides)
    command = ["tune", name, *options, *rest]
    if not _has_checkpoint(cfg):
        return f"interrupted before the first checkpoint; start again with: {shlex.join(command)}"
    command.append(f"{key}True")
    return f"interrupted; go on from the last checkpoint with: {shlex.join(command)}"


def _has_checkpoint(cfg: Any) -> bool:
    """Whether the run has saved one."""
    from checkpointing.storage.mirror import place_for

    output_dir = _selected(cfg, "output_dir")
    place = place_for(output_dir, "write") if is_remote(output_dir) else output_dir
    return isinstance(place, str | Path) and any(Path(place).glob("[!.]*/manifest.json"))


def _selected(cfg: Any, key: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None
