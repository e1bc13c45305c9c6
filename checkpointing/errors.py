"""Errors. Every one says what is wrong, where, and what to do."""

import re
from collections.abc import Sequence
from itertools import product
from math import prod

from checkpointing.printable import printable, printable_lines

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class CheckpointingError(Exception):
    """Base class of all errors that this package raises on purpose."""

    def __str__(self) -> str:
        # Names in a message may come from a file, and a terminal obeys what they hold.
        return printable_lines(super().__str__())


class CheckpointNotFoundError(CheckpointingError, FileNotFoundError):
    """A checkpoint, or a file that it must hold, is not there."""


class CorruptCheckpointError(CheckpointingError, ValueError):
    """A file of a checkpoint is damaged, truncated, or not what its name says."""


class UnsafePathError(CheckpointingError, ValueError):
    """A file names a path outside the directory it belongs to."""


class ConfigError(CheckpointingError, ValueError):
    """A config (of a model, an adapter or a recipe) is wrong or contradicts another."""


class WriteError(CheckpointingError, OSError):
    """The system refuses to write, rename or remove what must be for a checkpoint."""


class OutOfSpaceError(WriteError):
    """The disk, or a quota, has no room for what is to be written."""


class OutOfMemoryError(CheckpointingError, MemoryError):
    """The system, or a limit of the process, has no room to map a file into memory."""


class RemoteError(CheckpointingError, OSError):
    """A place that a URL names cannot be reached, or refuses access."""


class RankLostError(CheckpointingError, RuntimeError):
    """Another process of the job has ended, or hangs, without which this one cannot go on."""


class TensorMismatchError(CheckpointingError, ValueError):
    """Tensors do not fit the model: all problems found, together.

    Attributes:
        problems: one line each, with the tensor's name.
    """

    def __init__(self, subject: str, problems: Sequence[str], remedy: str) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {printable(problem)}" for problem in _fold_layers(problems))
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__(f"{printable(subject)}: {count}\n{lines}\n{remedy}")


def _fold_layers(problems: Sequence[str]) -> list[str]:
    """Says once what is the same in several layers, and in several experts of theirs."""
    folded: dict[str, list[tuple[str, ...]]] = {}
    for problem in problems:
        name, colon, rest = problem.partition(":")
        numbers = tuple(_NUMBER.findall(name))
        folded.setdefault(f"{_NUMBER.sub('*', name)}{colon}{rest}", []).append(numbers)
    lines = []
    for pattern, found in folded.items():
        columns = [list(dict.fromkeys(column)) for column in zip(*found, strict=True)]
        is_whole = prod(map(len, columns)) == len(found) and list(product(*columns)) == found
        if len(found) == 1 or not is_whole:
            lines += [_filled(pattern, numbers) for numbers in found]
        else:
            names = " and ".join(", ".join(column) for column in columns)
            lines.append(f"{pattern} (* is {names})")
    return lines


def _filled(pattern: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
