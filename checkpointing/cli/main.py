"""The `tune` command."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from checkpointing.cli import (
    cat,
    convert,
    cp,
    diff,
    download,
    export,
    inspect,
    ls,
    merge,
    parity,
    push,
    run,
    validate,
    verify,
)
from checkpointing.errors import CheckpointingError

INTERRUPTED = 130
_COMMANDS = (
    download,
    ls,
    cp,
    cat,
    validate,
    run,
    parity,
    inspect,
    verify,
    convert,
    merge,
    diff,
    export,
    push,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one `tune` command.

    Args:
        argv: arguments without the program's name; those of the process if left out.

    Returns:
        The exit code: 0 for success, 1 for an error that was reported, 130 after Ctrl-C. A command
        line that cannot be read exits with 2, as argparse does.
    """
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    unknown = rest if "overrides" not in args else [each for each in rest if each.startswith("-")]
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = rest
    try:
        return int(args.command(args))
    except CheckpointingError as error:
        if args.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing more may be flushed to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; overrides of `tune run` are left to the caller."""
    parser = argparse.ArgumentParser(
        prog="tune",
        description="Fine-tune language models from recipes, and look after their checkpoints.",
        allow_abbrev=False,
    )
    debug = os.environ.get("TUNE_DEBUG", "0") not in ("", "0")
    parser.add_argument("--debug", action="store_true", default=debug, help=_DEBUG_HELP)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary, _, details = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=f"{summary}\n{details}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP
        )
        module.add_arguments(command)
        command.set_defaults(command=module.execute, parser=command)
    return parser


_DEBUG_HELP = "show the traceback of an error (also: TUNE_DEBUG=1)"
