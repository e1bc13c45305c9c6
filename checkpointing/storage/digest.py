"""Checksums of files and tensors, taken from what is written while it is written.

XXH3 (https://xxhash.com), 64 bits: it finds damage, and is not meant against forgery. Taken from
memory and not from the file, so that what goes wrong on the way to the disk is found too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_CHUNK = 1 << 22
ALGORITHM = "xxh3_64"


@dataclass(frozen=True)
class FileDigest:
    """What a file must hold.

    Attributes:
        size: in bytes.
        checksum: XXH3-64 of all of it, in hexadecimal.
        tensors: the same of each tensor's data, where the file holds tensors.
    """

    size: int
    checksum: str
    tensors: dict[str, str] = field(default_factory=dict)

    def to_entry(self) -> dict[str, Any]:
        """The file's entry in a manifest."""
        entry: dict[str, Any] = {"size": self.size, ALGORITHM: self.checksum}
        return entry | ({"tensors": self.tensors} if self.tensors else {})

    @classmethod
    def from_entry(cls, entry: object) -> "FileDigest | None":
        """Reads an entry of a manifest; ``None`` if it is none."""
        if not isinstance(entry, dict):
            return None
        size, checksum, tensors = entry.get("size"), entry.get(ALGORITHM), entry.get("tensors", {})
        if not (isinstance(size, int) and isinstance(checksum, str) and isinstance(tensors, dict)):
            return None
        return cls(size, checksum, tensors)


def checksum_of(data: bytes | memoryview) -> str:
    """XXH3-64 of bytes in memory, in hexadecimal."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def digest_of_file(path: Path, progress: Callable[[int], object] = lambda _: None) -> FileDigest:
    """The digest of a file as it lies on the disk, without its tensors.

    Args:
        path: the file.
        progress: called with the number of bytes just read.
    """
    # Imported here: loading a model needs no checksum, and `import checkpointing` stays light.
    import xxhash

    digest, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            progress(count)
    return FileDigest(size, digest.hexdigest())


class DigestingFile:
    """A file that is written from its start to its end, and digested on the way.

    Has the part of a binary file's interface that ``torch.save`` uses.
    """

    def __init__(self, file: IO[bytes]) -> None:
        import xxhash

        self._file = file
        self._digest = xxhash.xxh3_64()
        self._size = 0
        self.tensors: dict[str, str] = {}

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of the data."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        rest = view
        while rest:
            rest = rest[self._file.write(rest) :]
        return len(view)

    def write_tensor(self, name: str, data: memoryview) -> None:
        """Writes a tensor's data, and notes its checksum."""
        self.tensors[name] = checksum_of(data)
        self.write(data)

    def flush(self) -> None:
        """Hands what is buffered to the operating system."""
        self._file.flush()

    def digest(self) -> FileDigest:
        """Of all that was written."""
        return FileDigest(self._size, self._digest.hexdigest(), self.tensors)
