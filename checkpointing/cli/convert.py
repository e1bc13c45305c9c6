"""Convert a model to another format, bit for bit.

The format of SRC is recognised. No model is built; tensors are converted one at a time. Config,
tokenizer and licence come along; a config file that the target needs and SRC lacks is made.

examples:
  tune convert out/full/epoch_0 out/meta --to meta
  tune convert Llama-3.2-1B/original out/hf --to hf --model-type LLAMA3_2 --dry-run
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.cli.text import count_text, size_text, table

if TYPE_CHECKING:
    from checkpointing.convert import ModelToWrite

_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune convert`."""
    parser.add_argument("source", metavar="SRC", type=Path, help="directory of a model")
    parser.add_argument("destination", metavar="DST", type=Path, help="directory to write")
    parser.add_argument("--to", choices=("hf", "meta", "tune"), required=True, help="format of DST")
    add_common_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be written, and write nothing"
    )


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of all commands that write a model."""
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="such as LLAMA3_2 or mistral, where no config file names the family",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="largest weight file (hf and tune), 5GB if left out",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the directory if it was written by tune before",
    )


def execute(args: argparse.Namespace) -> int:
    """Writes DST, or with --dry-run prints what it would hold."""
    from checkpointing.convert import check_destination, plan_conversion, write_model

    check_destination(args.destination, (args.source,), args.overwrite)
    plan = plan_conversion(args.source, args.to, args.model_type, args.max_shard_size)
    before = plan.facts["converted_from"]["format"]
    print(f"{args.source} ({before}) -> {args.destination} ({args.to})")
    tensors = count_text(len(plan.tensors.metas), "tensor")
    files = count_text(len(plan.weight_files), "file")
    print(f"{tensors}, {size_text(plan.nbytes)}, in {files}")
    for note in plan.notes:
        print(f"note: {note}")
    if args.dry_run:
        _print_plan(plan)
        return 0
    write_model(plan, args.destination, args.overwrite)
    print(f"wrote {args.destination}")
    return 0


def _print_plan(plan: "ModelToWrite") -> None:
    config = [] if plan.config_text is None else [plan.config_text[0]]
    files = [*plan.weight_files, *config, *(path.name for path in plan.side_files)]
    print("files: " + ", ".join(files))
    rows = [(name, str(meta)) for name, meta in plan.tensors.metas.items()]
    if len(rows) > 2 * _SHOWN:
        rows = [*rows[:_SHOWN], ("...", ""), *rows[-_SHOWN:]]
    print(table(rows, left=2))
    print("nothing was written")
