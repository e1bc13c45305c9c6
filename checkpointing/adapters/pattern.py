"""Regular expressions from files, matched in bounded time.

Python's matcher goes back and tries again, and a short expression can make it do so for years. Here
all ways to match are followed at once (Thompson 1968): whether a name matches does not depend on
the order in which they are tried. The set of positions that a part of the expression can lead to is
one whole number, with a bit for each position in the name.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from re import _parser as parser  # type: ignore[attr-defined]  # re.compile keeps no tree
from typing import Any

from checkpointing.errors import ConfigError

# Steps of a match; a pattern of 2,000 characters takes a few thousand.
_MOST_STEPS = 20_000
_UNBOUNDED = int(parser.MAXREPEAT)

_CATEGORIES = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}
_ANCHORS = ("BEGINNING", "BEGINNING_STRING", "END", "END_STRING", "BOUNDARY", "NON_BOUNDARY")


class Pattern:
    """A regular expression as Python reads it.

    It may have all but what cannot be followed so: references to groups, conditions on groups,
    atomic groups, possessive repeats and flags.

    Raises:
        ConfigError: if it is no regular expression, or has one of these.
    """

    def __init__(self, expression: str) -> None:
        self._expression = expression
        try:
            self._tree = parser.parse(expression)
            _check(self._tree)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{expression!r} is no regular expression that is matched here ({error})"
            ) from error
        if self._tree.state.flags & ~re.UNICODE:
            raise ConfigError(
                f"{expression!r}: flags are not supported; write the expression without them"
            )

    def matches_all(self, name: str) -> bool:
        """Whether the whole name matches, as in ``re.fullmatch``.

        Raises:
            ConfigError: if that takes too many steps.
        """
        return bool(self._ends(name) >> len(name) & 1)

    def matches_start(self, name: str) -> bool:
        """Whether the name begins with a match, as in ``re.match``.

        Raises:
            ConfigError: if that takes too many steps.
        """
        return bool(self._ends(name))

    def _ends(self, name: str) -> int:
        try:
            return _Match(name).sequence(self._tree, 1)
        except (_TooManySteps, RecursionError):
            raise ConfigError(
                f"{self._expression!r}: takes too long to match; write it more simply"
            ) from None


@lru_cache(maxsize=4096)
def pattern(expression: str) -> Pattern:
    """The pattern of an expression, which is kept.

    Raises:
        ConfigError: if it is no regular expression that is matched here.
    """
    return Pattern(expression)


class _TooManySteps(Exception):
    pass


def _check(tree: Sequence[Any]) -> None:
    """Refuses what is not followed here, wherever in the expression it stands."""
    for op, argument in tree:
        match str(op):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                pass
            case "AT" if str(argument).removeprefix("AT_") in _ANCHORS:
                pass
            case "BRANCH":
                for branch in argument[1]:
                    _check(branch)
            case "SUBPATTERN":
                _, added, removed, inner = argument
                if added or removed:
                    raise re.error("flags are not supported")
                _check(inner)
            case "MAX_REPEAT" | "MIN_REPEAT":
                _check(argument[2])
            case "ASSERT" | "ASSERT_NOT":
                shortest, longest = argument[1].getwidth()
                if argument[0] < 0 and shortest != longest:
                    raise re.error("a look-behind must have a fixed width")
                _check(argument[1])
            case name:
                raise re.error(f"{name.lower()} is not supported")


class _Match:
    """The matching of one name; every method takes positions and gives those it leads to."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one_line = "\n" not in name
        self._all = (1 << len(name) + 1) - 1
        self._steps = 0
        self._masks: dict[object, int] = {}

    def sequence(self, tree: Sequence[Any], positions: int) -> int:
        for op, argument in tree:
            if not positions:
                break
            positions = self._one(str(op), argument, positions)
        return positions

    def _one(self, op: str, argument: Any, positions: int) -> int:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooManySteps
        match op:
            case "LITERAL":
                return (positions & self._mask(argument, lambda char: ord(char) == argument)) << 1
            case "NOT_LITERAL":
                return (
                    positions & self._mask((op, argument), lambda char: ord(char) != argument)
                ) << 1
            case "ANY":
                return (positions & self._mask(op, lambda char: char != "\n")) << 1
            case "IN":
                return (positions & self._mask(id(argument), lambda c: _is_in(argument, c))) << 1
            case "AT":
                return positions & self._anchor(str(argument).removeprefix("AT_"))
            case "BRANCH":
                found = 0
                for branch in argument[1]:
                    found |= self.sequence(branch, positions)
                return found
            case "SUBPATTERN":
                return self.sequence(argument[3], positions)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(positions, *argument)
            case _:
                return self._look(positions, op == "ASSERT", *argument)

    def _repeat(self, positions: int, least: int, most: int, inner: Sequence[Any]) -> int:
        for _ in range(least):
            before, positions = positions, self.sequence(inner, positions)
            if positions in (0, before):
                break
        is_any = len(inner) == 1 and str(inner[0][0]) == "ANY" and most == _UNBOUNDED
        if is_any and self._one_line:
            # All that follows the first; most expressions have several of these.
            return self._all & -(positions & -positions) if positions else 0
        reached = new = positions
        count = least
        while new and (count < most or most == _UNBOUNDED):
            new = self.sequence(inner, new) & ~reached
            reached |= new
            count += 1
        return reached

    def _look(self, positions: int, wanted: bool, direction: int, inner: Any) -> int:
        """Those positions from which, or up to which, there is a match, or there is none."""
        width = inner.getwidth()[0] if direction < 0 else 0
        found = 0
        for position in range(len(self._name) + 1):
            if not positions >> position & 1:
                continue
            if direction > 0:
                matches = self.sequence(inner, 1 << position) != 0
            else:
                ends = self.sequence(inner, 1 << position - width) if position >= width else 0
                matches = bool(ends >> position & 1)
            if matches == wanted:
                found |= 1 << position
        return found

    def _mask(self, key: object, holds: Callable[[str], bool]) -> int:
        """The positions at which a character is one of some."""
        if key not in self._masks:
            self._masks[key] = sum(1 << i for i, char in enumerate(self._name) if holds(char))
        return self._masks[key]

    def _anchor(self, kind: str) -> int:
        name = self._name
        end = 1 << len(name)
        match kind:
            case "BEGINNING" | "BEGINNING_STRING":
                return 1
            case "END_STRING":
                return end
            case "END":
                return end | (end >> 1 if name.endswith("\n") else 0)
        is_word = [False, *map(_CATEGORIES["CATEGORY_WORD"], name), False]
        edges = sum(1 << i for i in range(len(name) + 1) if is_word[i] != is_word[i + 1])
        return edges if kind == "BOUNDARY" else self._all & ~edges


def _is_in(items: Sequence[Any], char: str) -> bool:
    """Whether a character is in a class such as ``[^a-z_]`` or ``\\d``."""
    negated = str(items[0][0]) == "NEGATE"
    for op, argument in items[1:] if negated else items:
        match str(op):
            case "LITERAL":
                found = ord(char) == argument
            case "RANGE":
                found = argument[0] <= ord(char) <= argument[1]
            case _:
                kind = str(argument)
                opposite = "_NOT_" in kind
                found = _CATEGORIES[kind.replace("_NOT_", "_")](char) != opposite
        if found:
            return not negated
    return negated
