"""Rewards that can be checked by a rule; copy one to write your own.

All are called with lists of equal length: the prompts and the completions as text, without the
token that ends a completion, and the row of the dataset that each prompt is from.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any


def matches_answer(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    key: str = "answer",
) -> list[float]:
    """1 if the last number of a completion is that of the row, else 0.

    Args:
        key: of the row, where the right answer is.
    """
    wanted = [_last_number(str(row[key])) for row in rows]
    found = map(_last_number, completions)
    return [float(a is not None and a == b) for a, b in zip(found, wanted, strict=True)]


def near_length(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    words: int = 20,
) -> list[float]:
    """1 for completions of just so many words, less for shorter and longer ones, 0 for none."""
    lengths = [len(completion.split()) for completion in completions]
    return [min(length, words) / max(length, words) for length in lengths]


def has_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    pattern: str,
) -> list[float]:
    """1 if the whole completion matches a regular expression (``.`` is any character), else 0."""
    wanted = re.compile(pattern, re.DOTALL)
    return [float(wanted.fullmatch(completion) is not None) for completion in completions]


def _last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None
