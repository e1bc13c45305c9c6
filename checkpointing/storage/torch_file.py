"""Files of ``torch.save``: what they claim, checked before torch reads them.

Layout: an archive of zip, of which no entry is compressed, with ``NAME/data.pkl`` and a storage in
each ``NAME/data/KEY``; before torch 1.6 five pickles, of which the fourth is the content, and the
storages' data (``torch/serialization.py``).
"""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from checkpointing.storage.pickle_check import Limits, check_pickles

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLES_BEFORE_ZIP = 5
_ENCRYPTED = 1


@dataclass(frozen=True)
class TorchFile:
    """A file that was found to be what ``torch.save`` writes of plain data.

    Attributes:
        is_zip: it is an archive, of which the storages can be mapped into memory.
        globals: dotted names of the classes and functions that it asks for.
    """

    is_zip: bool
    globals: set[str]


def check_torch_file(path: Path) -> TorchFile:
    """Checks that a file claims no more data than it holds, and asks for no code.

    Raises:
        Exception: of any kind, if it is not what ``torch.save`` writes of plain data.
    """
    with path.open("rb") as file:
        return check_torch_stream(file, path.stat().st_size)


def check_torch_stream(stream: IO[bytes], total: int) -> TorchFile:
    """As :func:`check_torch_file`, for what a stream holds.

    Args:
        stream: at its start, and can be sought in.
        total: its size in bytes.

    Raises:
        Exception: of any kind, as :func:`check_torch_file`.
    """
    is_zip = stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    if not is_zip:
        stream.seek(0)
        limits = Limits(total, records=None)
        return TorchFile(False, check_pickles(stream, _PICKLES_BEFORE_ZIP, limits))
    with ZipFile(stream) as archive:
        records = stored_records(archive, total)
        pickles = [name for name in records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it holds {len(pickles)} pickles, not one")
        storages = pickles[0].removesuffix(".pkl") + "/"
        sizes = {
            name.removeprefix(storages): record.file_size
            for name, record in records.items()
            if name.startswith(storages)
        }
        limits = Limits(total, sizes)
        return TorchFile(True, check_pickles(BytesIO(archive.read(pickles[0])), 1, limits))


def stored_records(archive: ZipFile, total: int) -> dict[str, ZipInfo]:
    """The entries of an archive by their names, checked to be what ``torch.save`` writes.

    Args:
        archive: to look into.
        total: size of the file in bytes.

    Raises:
        ValueError: if an entry is there twice, compressed, or larger than the file.
    """
    infos = archive.infolist()
    # torch looks names up without regard to case.
    if len({info.filename.lower() for info in infos}) != len(infos) or archive.comment:
        raise ValueError("its archive has an entry twice, or a comment")
    for info in infos:
        stored = info.compress_type == ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{info.filename} in it is compressed, torch.save compresses nothing")
    if sum(info.file_size for info in infos) > total:
        raise ValueError("its archive claims more than it holds")
    return {info.filename: info for info in infos}
