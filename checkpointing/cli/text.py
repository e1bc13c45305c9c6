"""How commands print sizes and tables."""

from collections.abc import Sequence

from checkpointing.printable import printable


def size_text(nbytes: int) -> str:
    """A number of bytes in decimal units, such as ``269.0 MB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def count_text(count: int, noun: str) -> str:
    """A number and its noun, such as ``1 tensor`` or ``272 tensors``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows in columns of equal width, indented; the first `left` columns are flush left."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
