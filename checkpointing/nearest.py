"""Help with a name that does not exist: the nearest one that does."""

import difflib
from collections.abc import Iterable

_LISTED = 12


def hint(name: str, known: Iterable[str]) -> str:
    """A sentence for an error message: the nearest known name, or else what names there are.

    Case and the order of the candidates do not matter.

    Args:
        name: what was written.
        known: what could have been meant.
    """
    names = sorted(set(known))
    if not names:
        return "there are none to choose from"
    folded = {candidate.casefold(): candidate for candidate in reversed(names)}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    listed = ", ".join(names[:_LISTED])
    more = len(names) - _LISTED
    return f"there are {listed}" + (f" and {more} more" if more > 0 else "")
