"""Compare two models, or two adapters, tensor by tensor.

A and B may be in different formats: tensors are compared in native names and layout, bit for bit.
Of adapters, native or PEFT's, the hyper-parameters are compared too; two PEFT adapters keep PEFT's
names unless --base is given. The exit code is 0 if all is the same, and 1 if not.

examples:
  tune diff SmolLM2-135M-Instruct out/smollm2_135M_full/epoch_0
  tune diff out/smollm2_135M_lora/epoch_0 peft_adapter --base SmolLM2-135M-Instruct
"""

import argparse
from typing import TYPE_CHECKING

from checkpointing.cli.text import count_text, table
from checkpointing.printable import printable
from checkpointing.storage.location import path_or_url

if TYPE_CHECKING:
    from checkpointing.compare import Difference

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune diff`."""
    parser.add_argument(
        "a", metavar="A", type=path_or_url, help="directory of a model or an adapter"
    )
    parser.add_argument("b", metavar="B", type=path_or_url, help="the same, in any format")
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=path_or_url,
        help="base of a PEFT adapter, if it is not where the adapter says",
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="such as LLAMA3_2 or mistral, where no config file names the family",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"show all that differs, not the first {_SHOWN}"
    )


def execute(args: argparse.Namespace) -> int:
    """Prints what differs, the largest difference first."""
    from checkpointing.comparable import open_pair
    from checkpointing.compare import differences

    pair = open_pair(args.a, args.b, args.model_type, args.base)
    for note in pair.notes:
        print(f"note: {printable(note)}")
    if pair.settings:
        print(f"other hyper-parameters: {len(pair.settings)}")
        rows = [(each.name, each.a, each.b) for each in pair.settings]
        _print([("", "A", "B"), *rows], 3, args.all)
    found = differences(pair.a, pair.b)
    total = len(pair.a.metas.keys() | pair.b.metas.keys())
    print(f"same, bit for bit: {total - len(found)} of {count_text(total, 'tensor')}")
    for title, group in (
        ("only in A", [each for each in found if each.b is None]),
        ("only in B", [each for each in found if each.a is None]),
    ):
        if group:
            print(f"{title}: {count_text(len(group), 'tensor')}")
            _print([(each.name, str(each.a or each.b)) for each in group], 2, args.all)
    shapes = [each for each in found if each.a and each.b and each.relative is None]
    if shapes:
        print(f"other shape: {count_text(len(shapes), 'tensor')}")
        _print([(each.name, f"{each.a} in A, {each.b} in B") for each in shapes], 2, args.all)
    measured = [each for each in found if each.relative is not None]
    if measured:
        print(f"other values or dtype: {count_text(len(measured), 'tensor')}")
        header = ("", "max |A-B|", "‖A-B‖/‖A‖", "")
        _print([header, *map(_row, measured)], 1, args.all)
    return int(bool(found or pair.settings))


def _row(difference: "Difference") -> tuple[str, str, str, str]:
    a, b = difference.a, difference.b
    dtypes = ""
    if a is not None and b is not None and a.dtype != b.dtype:
        dtypes = " / ".join(str(meta.dtype).removeprefix("torch.") for meta in (a, b))
    return (
        difference.name,
        f"{difference.largest:.3g}",
        f"{difference.relative:.3g}",
        dtypes,
    )


def _print(rows: list[tuple[str, ...]], left: int, everything: bool) -> None:
    hidden = 0 if everything else max(0, len(rows) - _SHOWN - 1)
    print(table(rows[: len(rows) - hidden], left))
    if hidden:
        print(f"  ... and {hidden} more (--all shows them)")
