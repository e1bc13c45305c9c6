"""Checksums of files and tensors, taken from what is written while it is written.

XXH3 (https://xxhash.com), 64 bits: it finds damage, and is not meant against forgery. Taken from
memory and not from the file, so that what goes wrong on the way to the disk is found too.

A file is digested in parts that follow one another without a gap, each a tensor, a range of a large
one, or what lies between tensors. So every byte is read once for the checksums of a file and of its
tensors, and by several threads.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ALGORITHM = "xxh3_64"
_LINE = re.compile(r"(?P<checksum>[0-9a-f]+) (?P<size>[0-9]{1,19})(?: (?P<tensor>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A range of a file.

    Attributes:
        size: in bytes.
        checksum: XXH3-64 of it, in hexadecimal.
        tensor: the tensor whose data it is, or a range of; empty for what is around tensors.
    """

    size: int
    checksum: str
    tensor: str = ""


@dataclass(frozen=True)
class FileDigest:
    """What a file must hold, from its start to its end."""

    parts: tuple[Part, ...]

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return sum(part.size for part in self.parts)

    def to_entry(self) -> dict[str, Any]:
        """The file's entry in a manifest: the checksum of all of it, or a line for each part."""
        lines = [
            f"{part.checksum} {part.size}" + (f" {part.tensor}" if part.tensor else "")
            for part in self.parts
        ]
        whole = len(self.parts) == 1 and not self.parts[0].tensor
        return {"size": self.size, ALGORITHM: self.parts[0].checksum if whole else lines}

    @classmethod
    def from_entry(cls, entry: object) -> "FileDigest | None":
        """Reads an entry of a manifest; ``None`` if it is none."""
        if not isinstance(entry, dict):
            return None
        size, checksums = entry.get("size"), entry.get(ALGORITHM)
        if isinstance(size, int) and size >= 0 and isinstance(checksums, str):
            return cls((Part(size, checksums),))
        if not isinstance(checksums, list):
            return None
        lines = [_LINE.fullmatch(line) if isinstance(line, str) else None for line in checksums]
        parts = [Part(int(m["size"]), m["checksum"], m["tensor"] or "") for m in lines if m]
        digest = cls(tuple(parts))
        return digest if len(parts) == len(lines) and digest.size == size else None


class Digest:
    """XXH3-64 of data that comes piece by piece."""

    def __init__(self) -> None:
        # Imported here: loading a model needs no checksum, and `import checkpointing` stays light.
        import xxhash

        self._digest = xxhash.xxh3_64()

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next piece."""
        self._digest.update(data)

    def checksum(self) -> str:
        """Of all pieces, in hexadecimal."""
        return str(self._digest.hexdigest())


def checksum_of(pieces: Iterable[bytes | memoryview]) -> str:
    """XXH3-64 of pieces that follow one another, in hexadecimal."""
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.checksum()
