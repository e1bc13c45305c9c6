"""Fold an adapter into its base, and tell what rounding left of it.

BASE is a model in any format, ADAPTER a checkpoint of an adapter run or a PEFT adapter. OUT is a
whole model in the format of BASE or of --to. Each weight is computed in fp32 and rounded once to
BASE's dtype. After QLoRA, BASE is first rounded to NF4 in the dtype of the run, as it was in
training. With W the base weight, U the adapter's update of it and M the merged weight as
stored, the report says which share of the elements of W that U changes did change, how large M - W
is beside U, and how large the rounding error M - W - U is beside U; of large weights one row in
32 is looked at. A merge that was cut short goes
on when it is started again, from the weight files that it had finished.

example:
  tune merge SmolLM2-135M-Instruct out/smollm2_135M_lora/epoch_0 out/merged
"""

import argparse
from typing import TYPE_CHECKING

from checkpointing.cli.convert import (
    add_common_arguments,
    add_rank_arguments,
    ranks,
    write,
)
from checkpointing.cli.text import size_text, table
from checkpointing.printable import printable
from checkpointing.storage.location import path_or_url

if TYPE_CHECKING:
    from checkpointing.merge import Merge, Survival


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune merge`."""
    parser.add_argument(
        "base", metavar="BASE", type=path_or_url, help="directory of the base model"
    )
    parser.add_argument(
        "adapter", metavar="ADAPTER", type=path_or_url, help="checkpoint with an adapter"
    )
    parser.add_argument("out", metavar="OUT", type=path_or_url, help="directory to write")
    parser.add_argument(
        "--to",
        choices=("hf", "meta", "megatron", "tune"),
        help="format of OUT; that of BASE if left out",
    )
    parser.add_argument(
        "--original-base",
        action="store_true",
        help="merge into BASE as it is, though the adapter was trained on BASE in NF4 (QLoRA)",
    )
    add_common_arguments(parser)
    add_rank_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Writes the merged model and prints the report."""
    from checkpointing.convert import check_destination, resume_notes
    from checkpointing.merge import plan_merge

    check_destination(args.out, (args.base, args.adapter), args.overwrite)
    merge = plan_merge(
        args.base,
        args.adapter,
        args.to,
        args.model_type,
        args.max_shard_size,
        args.original_base,
        ranks(args),
    )
    for note in (*merge.plan.notes, *resume_notes(merge.plan, args.out)):
        print(f"note: {printable(note)}")
    write(merge.plan, args.out, args.overwrite)
    print(f"wrote {args.out} ({merge.plan.format.name}, {size_text(merge.plan.nbytes)})")
    print(_report(merge))
    return 0


def _report(merge: "Merge") -> str:
    from checkpointing.merge import Survival, by_kind

    dtypes = {str(dtype).removeprefix("torch.") for dtype in merge.merged.dtypes}
    rows = [("", "modules", "changed elements", "‖M-W‖/‖U‖", "‖M-W-U‖/‖U‖")]
    for kind, (count, one) in by_kind(merge.merged.survival).items():
        rows.append(_row(kind, count, one))
    total = sum(merge.merged.survival.values(), Survival())
    rows.append(_row("total", len(merge.merged.survival), total))
    return f"what rounding to {', '.join(sorted(dtypes))} left of the update:\n{table(rows)}"


def _row(name: str, count: int, one: "Survival") -> tuple[str, str, str, str, str]:
    return (
        name,
        str(count),
        f"{one.changed_share:.2%}",
        f"{one.kept_norm:.2%}",
        f"{one.lost_norm:.2%}",
    )
