"""Convert a model to another format, bit for bit, or an adapter to PEFT's or Megatron's form.

The format of SRC is recognised. No model is built; tensors are converted one at a time. Config,
tokenizer and licence come along; a config file that the target needs and SRC lacks is made. Either
may be a URL, such as s3://bucket/model.

The conversion of a model that was cut short goes on when it is started again, from the weight files
that it had finished.

An adapter needs its base, which is where its manifest or adapter_config.json says, or --base.

examples:
  tune convert out/full/epoch_0 out/meta --to meta
  tune convert Llama-3.2-1B/original out/hf --to hf --model-type LLAMA3_2 --dry-run
  tune convert out/lora/epoch_0 out/peft --to peft --adapter-form exact
  tune convert peft-adapter out/native --to tune --base Llama-3.2-1B
  tune convert Qwen3-30B-A3B out/megatron --to megatron --tensor-parallel 2 --expert-parallel 8
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.cli.text import count_text, size_text, table
from checkpointing.printable import printable
from checkpointing.storage.location import path_or_url

if TYPE_CHECKING:
    from checkpointing.convert import ModelToWrite
    from checkpointing.mapping.model_parallel import Parallel
    from checkpointing.mapping.tensors import TensorSource

_SHOWN = 3
_RANKS = {
    "tensor": "the tensors of a layer",
    "pipeline": "the layers",
    "expert": "the experts of a layer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune convert`."""
    parser.add_argument(
        "source", metavar="SRC", type=path_or_url, help="directory of a model, or an adapter"
    )
    parser.add_argument("destination", metavar="DST", type=path_or_url, help="directory to write")
    parser.add_argument(
        "--to",
        choices=("hf", "meta", "megatron", "tune", "peft"),
        required=True,
        help="format of DST: of a model hf, meta, megatron or tune; of an adapter peft, tune or "
        "megatron",
    )
    add_common_arguments(parser)
    add_rank_arguments(parser)
    parser.add_argument(
        "--base", metavar="DIR", type=path_or_url, help="the adapter's base, in any format"
    )
    parser.add_argument(
        "--adapter-form",
        choices=("portable", "exact"),
        help="of a PEFT adapter: as inference engines read it (portable, if left out), or with its "
        "own ranks and scales",
    )
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


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that tell for how many of Megatron's ranks a model is written."""
    for kind, what in _RANKS.items():
        parser.add_argument(
            f"--{kind}-parallel",
            metavar="N",
            type=int,
            default=1,
            help=f"of megatron: ranks that share {what}, 1 if left out",
        )


def execute(args: argparse.Namespace) -> int:
    """Writes DST, or with --dry-run prints what it would hold."""
    from checkpointing.convert_adapter import is_adapter
    from checkpointing.errors import ConfigError
    from checkpointing.storage.mirror import local

    args.source_here = local(args.source)
    if args.to == "peft" or (args.to in ("tune", "megatron") and is_adapter(args.source_here)):
        return _convert_adapter(args)
    if args.base is not None or args.adapter_form is not None:
        raise ConfigError(
            "--base and --adapter-form are for adapters, which are converted --to peft, tune or "
            "megatron; to fold an adapter into its base use `tune merge`"
        )
    return _convert_model(args)


def _convert_model(args: argparse.Namespace) -> int:
    from checkpointing.convert import check_destination, plan_conversion, resume_notes

    check_destination(args.destination, (args.source,), args.overwrite)
    plan = plan_conversion(
        args.source_here, args.to, args.model_type, args.max_shard_size, ranks(args)
    )
    config = [] if plan.config_text is None else [plan.config_text[0]]
    others = [*config, *(path.name for path in plan.side_files)]
    notes = (*plan.notes, *resume_notes(plan, args.destination))
    _print_plan(args, plan.facts, plan.tensors, notes, (plan.weight_files, others))
    if not args.dry_run:
        write(plan, args.destination, args.overwrite)
        print(f"wrote {args.destination}")
    return 0


def ranks(args: argparse.Namespace) -> "Parallel":
    """The number of ranks that the arguments name; one for a command that has no such arguments."""
    from checkpointing.mapping.model_parallel import Parallel

    return Parallel(**{kind: getattr(args, f"{kind}_parallel", 1) for kind in _RANKS})


def write(plan: "ModelToWrite", destination: Path | str, overwrite: bool) -> None:
    """Writes a planned model; after Ctrl-C it says what stays of it."""
    from checkpointing.convert import write_model

    try:
        write_model(plan, destination, overwrite)
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            print(printable(note), file=sys.stderr)
        raise


def _convert_adapter(args: argparse.Namespace) -> int:
    from checkpointing.convert import check_destination
    from checkpointing.convert_adapter import plan_adapter_conversion, write_adapter

    check_destination(args.destination, (args.source,), args.overwrite)
    form = args.adapter_form or "portable"
    plan = plan_adapter_conversion(
        args.source_here, args.to, args.base, form, args.model_type, ranks(args)
    )
    files = plan.files, plan.other_files
    _print_plan(args, plan.facts, plan.tensors, plan.notes, files)
    if not args.dry_run:
        write_adapter(plan, args.destination, args.overwrite)
        print(f"wrote {args.destination}")
    return 0


def _print_plan(
    args: argparse.Namespace,
    facts: Mapping[str, Any],
    tensors: "TensorSource",
    notes: Sequence[str],
    files: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Prints what is written: the files with tensors, and the others."""
    weight_files, others = files
    nbytes = sum(meta.nbytes for meta in tensors.metas.values())
    print(f"{args.source} ({facts['converted_from']['format']}) -> {args.destination} ({args.to})")
    count = count_text(len(tensors.metas), "tensor")
    print(f"{count}, {size_text(nbytes)}, in {count_text(len(weight_files), 'file')}")
    for note in notes:
        print(f"note: {printable(note)}")
    if not args.dry_run:
        return
    print("files: " + printable(", ".join([*weight_files, *others])))
    rows = [(name, str(meta)) for name, meta in tensors.metas.items()]
    if len(rows) > 2 * _SHOWN:
        rows = [*rows[:_SHOWN], ("...", ""), *rows[-_SHOWN:]]
    print(table(rows, left=2))
    print("nothing was written")
