"""Errors. Every one says what is wrong, where, and what to do."""

import re
from collections.abc import Sequence


class CheckpointingError(Exception):
    """Base class of all errors that this package raises on purpose."""


class CheckpointNotFoundError(CheckpointingError, FileNotFoundError):
    """A checkpoint, or a file that it must hold, is not there."""


class CorruptCheckpointError(CheckpointingError, ValueError):
    """A file of a checkpoint is damaged, truncated, or not what its name says."""


class UnsafePathError(CheckpointingError, ValueError):
    """A file names a path outside the directory it belongs to."""


class ConfigError(CheckpointingError, ValueError):
    """A config (of a model, an adapter or a recipe) is wrong or contradicts another."""


class OutOfSpaceError(CheckpointingError, OSError):
    """The disk has no room for what is about to be written."""


class TensorMismatchError(CheckpointingError, ValueError):
    """Tensors do not fit the model: all problems found, together.

    Attributes:
        problems: one line each, with the tensor's name.
    """

    def __init__(self, subject: str, problems: Sequence[str], remedy: str) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in _fold_layers(problems))
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__(f"{subject}: {count}\n{lines}\n{remedy}")


def _fold_layers(problems: Sequence[str]) -> list[str]:
    """Says once what is the same in several layers."""
    layers: dict[str, list[str]] = {}
    for problem in problems:
        match = re.search(r"(?<=\.)\d+(?=\.)", problem.partition(":")[0])
        pattern = (
            problem if match is None else f"{problem[: match.start()]}*{problem[match.end() :]}"
        )
        layers.setdefault(pattern, []).append("" if match is None else match[0])
    return [
        pattern.replace("*", numbers[0], 1)
        if len(numbers) == 1
        else f"{pattern} (* is {', '.join(numbers)})"
        for pattern, numbers in layers.items()
    ]
