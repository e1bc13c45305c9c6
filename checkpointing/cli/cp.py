"""Copy a recipe or config, to make it your own.

examples:
  tune cp lora_finetune_single_device my_recipe.py
  tune cp smollm2/135M_lora_single_device my_config.yaml
"""

import argparse
import shutil

from checkpointing.cli.catalog import Entry, configs, recipes
from checkpointing.cli.errors import UsageError
from checkpointing.nearest import hint
from checkpointing.storage.location import path_on_this_machine, path_or_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune cp`."""
    parser.add_argument("name", metavar="NAME", help="recipe or config, as `tune ls` shows it")
    parser.add_argument("destination", metavar="DEST", type=path_or_url, help="file or directory")
    parser.add_argument(
        "-n", "--no-clobber", action="store_true", help="do not overwrite an existing file"
    )
    parser.add_argument(
        "--make-parents", action="store_true", help="make the directories that DEST lies in"
    )


def execute(args: argparse.Namespace) -> int:
    """Copies the file, with .py or .yaml added to the destination where it lacks it."""
    source = _source(args.name)
    destination = path_on_this_machine(args.destination)
    if destination.is_dir():
        destination = destination / source.path.name
    suffixes = (".py",) if source.path.suffix == ".py" else (".yaml", ".yml")
    if destination.suffix not in suffixes:
        destination = destination.with_name(destination.name + suffixes[0])
    if args.no_clobber and destination.exists():
        print(f"{destination} is there already and was not overwritten")
        return 0
    try:
        if args.make_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
        elif not destination.parent.is_dir():
            raise UsageError(
                f"{destination.parent} is no directory; make it, or add --make-parents"
            )
        shutil.copyfile(source.path, destination)
    except OSError as error:
        raise UsageError(f"{destination}: cannot be written: {error.strerror}") from error
    print(f"copied {args.name} to {destination}")
    return 0


def _source(name: str) -> Entry:
    entries = [*recipes(), *configs()]
    for entry in entries:
        if entry.name == name:
            return entry
    near = hint(name, [entry.name for entry in entries])
    raise UsageError(f"there is no recipe or config {name!r}; {near} (`tune ls` shows all)")
