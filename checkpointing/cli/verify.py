"""Check that a checkpoint is still what was saved: no bit changed, no file missing.

Of a checkpoint that `tune` wrote every byte is compared with its checksum, and what is damaged is
named, to the tensor. Of another model, which has no checksums, headers, names, shapes and index are
checked. The exit code is 0 if all is well, and 1 if not.

examples:
  tune verify out/smollm2_135M_lora/epoch_0
  tune verify out/smollm2_135M_lora/epoch_* --json
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.cli.text import count_text, size_text
from checkpointing.printable import printable, printable_lines
from checkpointing.storage.location import path_or_url

if TYPE_CHECKING:
    from checkpointing.verify import Verification


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune verify`."""
    parser.add_argument(
        "directories", metavar="DIR", type=path_or_url, nargs="+", help="directory of a checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="such as LLAMA3_2 or mistral, where no config file names the family",
    )


def execute(args: argparse.Namespace) -> int:
    """Prints what is wrong."""
    from checkpointing.errors import CorruptCheckpointError
    from checkpointing.verify import Verification, verify

    found = {}
    for directory in args.directories:
        try:
            found[directory] = verify(directory, args.model_type)
        except CorruptCheckpointError as error:
            found[directory] = Verification(0, 0, True, (str(error),))
    if args.json:
        facts = {str(where): dataclasses.asdict(each) for where, each in found.items()}
        print(json.dumps(facts, indent=2))
    else:
        for directory, each in found.items():
            print("\n".join(_lines(directory, each)))
    return int(any(each.problems for each in found.values()))


def _lines(directory: Path | str, found: "Verification") -> list[str]:
    amount = f"{count_text(found.files, 'file')}, {size_text(found.nbytes)}"
    if found.problems:
        problems = [f"  - {printable_lines(problem)}" for problem in found.problems]
        return [f"{printable(str(directory))}: DAMAGED", *problems]
    if found.has_checksums:
        return [f"{printable(str(directory))}: intact ({amount}, every byte as it was saved)"]
    return [
        f"{printable(str(directory))}: well-formed ({amount}; there are no checksums, so only "
        "headers, names and shapes were checked)"
    ]
