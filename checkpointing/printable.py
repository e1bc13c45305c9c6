"""Text that came from a file, made fit for a terminal and a log."""


def printable(text: str) -> str:
    """The text with what is no visible character written as an escape, as ``repr`` does.

    A name in a file may hold line breaks, which forge lines, control sequences, which a terminal
    obeys, marks that reverse the order of reading, and lone surrogates, which cannot be printed.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """The same of each line of a text of several."""
    return "\n".join(map(printable, text.split("\n")))
