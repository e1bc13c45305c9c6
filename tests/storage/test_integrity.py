"""Damage is found wherever it lies in a file, by any number of threads."""

import errno
import os
import shutil

import pytest
import torch
import xxhash

from checkpointing.errors import CorruptCheckpointError
from checkpointing.mapping.tensors import StateDictSource
from checkpointing.storage import integrity, new_file
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.integrity import check_intact, damage, damaged_part
from checkpointing.storage.manifest import file_digests, load_manifest
from checkpointing.storage.threads import THREADS_VARIABLE
from checkpointing.storage.writer import CheckpointWriter

TENSORS = {
    "layers.0.w": torch.arange(700.0).reshape(7, 100),
    "b": torch.arange(15, dtype=torch.int8).reshape(3, 5),
    "empty": torch.ones(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "c": torch.arange(900.0).reshape(300, 3),
}
NAMES = ("w.safetensors", "w.pt", "state.pt", "config.json")


@pytest.fixture(params=["1", "3"], autouse=True)
def threads(request, monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory of files that are written in ranges of 512 bytes."""
    directory = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_file, "_RANGE", 512)
        writer = CheckpointWriter(directory, lambda _: None)
        for name in NAMES[:2]:
            writer.tensors(name, StateDictSource(TENSORS))
        writer.torch_object("state.pt", {"optimizer": {"exp": torch.arange(999.0)}, "steps": 7})
        writer.text("config.json", '{"a": 3}')
        writer.manifest({"step": 7})
    return directory


@pytest.fixture
def directory(whole, tmp_path, monkeypatch):
    # Of one file several jobs, of which each reads several times.
    monkeypatch.setattr(integrity, "_RANGE", 300)
    monkeypatch.setattr(integrity, "_BLOCK", 100)
    return shutil.copytree(whole, tmp_path / "checkpoint")


def digests_of(directory):
    return file_digests(directory, load_manifest(directory))


def flip(path, byte, bit=4):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def starts(digest):
    start = 0
    for part in digest.parts:
        yield start, part
        start += part.size


def test_what_is_whole_is_found_whole_and_every_byte_is_counted(directory):
    read = []
    digests = digests_of(directory)
    assert damage(directory, digests, read.append) == []
    assert sum(read) == sum((directory / name).stat().st_size for name in NAMES)
    check_intact(directory, digests)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_in_each_part_is_found_and_named(directory, name):
    path, digest = directory / name, digests_of(directory)[name]
    assert len(digest.parts) > (9 if "config" not in name else 0)
    tensors = any(part.tensor for part in digest.parts)
    around = ": what it holds beside the data of tensors" if tensors else ""
    for start, part in starts(digest):
        for byte in {start, start + part.size // 2, start + part.size - 1} if part.size else ():
            flip(path, byte)
            where = f": the data of {part.tensor}" if part.tensor else around
            assert damaged_part(path, digest) == f"{path}: is damaged{where}"
            flip(path, byte)
    assert damaged_part(path, digest) is None


def test_every_tensor_that_is_damaged_is_named_once_in_the_order_of_the_file(directory):
    digest = digests_of(directory)["w.safetensors"]
    path = directory / "w.safetensors"
    for start, part in starts(digest):
        if part.tensor in ("layers.0.w", "c") and part.size:
            flip(path, start)
    assert damaged_part(path, digest) == f"{path}: is damaged: the data of layers.0.w, c"


def test_a_damaged_header_is_not_a_damaged_tensor(directory):
    path = directory / "w.safetensors"
    content = path.read_bytes()
    # A digit of a shape: the file is well-formed JSON still.
    path.write_bytes(content.replace(b"[7,100]", b"[6,100]"))
    assert damaged_part(path, digests_of(directory)["w.safetensors"]) == (
        f"{path}: is damaged: what it holds beside the data of tensors"
    )
    path.write_bytes(bytes(len(content)))
    # All tensors but those that are zero, or have no data, are damaged too.
    found = damaged_part(path, digests_of(directory)["w.safetensors"])
    assert found == f"{path}: is damaged: the data of layers.0.w, b, scalar, c"


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_and_a_longer_file_are_found_by_their_size(directory, name):
    path, digest = directory / name, digests_of(directory)[name]
    size = path.stat().st_size
    for other in (size - 1, size + 1, 0):
        os.truncate(path, other)
        assert damaged_part(path, digest) == (
            f"{path}: has {other} bytes, the manifest says {size} bytes"
        )
    path.unlink()
    assert damaged_part(path, digest) == f"{path}: is missing, the manifest says {size} bytes"


def test_a_file_that_is_truncated_while_it_is_read_is_found(directory, monkeypatch):
    path, digest = directory / "w.safetensors", digests_of(directory)["w.safetensors"]
    size = path.stat().st_size

    def cut(nbytes):
        os.truncate(path, size - 1)

    assert damaged_part(path, digest, cut) == f"{path}: is damaged: the data of c"


def test_all_damaged_files_are_named_in_one_error(directory):
    flip(directory / "w.pt", 3000)
    os.truncate(directory / "config.json", 4)
    with pytest.raises(CorruptCheckpointError) as raised:
        check_intact(directory, digests_of(directory))
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{directory}: is not what was saved"
    assert [line for line in lines if line.startswith("  - ")] == [
        f"  - {directory / 'config.json'}: has 4 bytes, the manifest says 8 bytes",
        f"  - {directory / 'w.pt'}: is damaged: the data of layers.0.w",
    ]


def test_a_checksum_of_the_whole_file_is_enough(directory):
    """As older manifests have it."""
    path = directory / "w.pt"
    content = path.read_bytes()
    checksum = xxhash.xxh3_64_hexdigest(content)
    digest = FileDigest.from_entry({"size": len(content), "xxh3_64": checksum})
    assert damaged_part(path, digest) is None
    flip(path, len(content) // 2)
    assert damaged_part(path, digest) == f"{path}: is damaged"


def test_an_error_of_the_disk_names_the_file(directory, monkeypatch):
    def refuse(descriptor, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(OSError, match=r"w\.pt") as raised:
        damaged_part(directory / "w.pt", digests_of(directory)["w.pt"])
    assert raised.value.errno == errno.EIO
