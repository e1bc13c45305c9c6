"""Reading files into the page cache: what is not there is read, what is there is not."""

import errno
import mmap
import os

import pytest

from checkpointing.storage import read_ahead as module
from checkpointing.storage.read_ahead import read_ahead
from tests.benchmarks.durable import chill, resident_pages

MIB = 1 << 20


@pytest.fixture
def files(tmp_path):
    """Two files that are on the disk and not in memory."""
    paths = []
    for name, size in (("a", 9 * MIB + 5), ("b", 3 * MIB), ("empty", 0)):
        path = tmp_path / name
        path.write_bytes(os.urandom(size))
        paths.append(path)
    chill(tmp_path)
    return paths


def in_memory(path):
    """Share of the pages that need no disk."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    return resident_pages(path) / pages


@pytest.fixture
def noted(monkeypatch):
    """What was read, of more than a byte."""
    reads = []
    real = os.preadv

    def preadv(descriptor, buffers, offset, *flags):
        count = real(descriptor, buffers, offset, *flags)
        if len(buffers[0]) > 1:
            reads.append((os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2], offset))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return reads


def test_all_of_the_files_is_in_memory_afterwards(files, noted):
    assert in_memory(files[0]) == 0
    progress = []
    read_ahead(files, progress.append)
    # What follows may be there already, since the system reads on by itself.
    assert {("a", 0), ("b", 0)} <= set(noted)
    assert sum(progress) == 12 * MIB + 5
    assert in_memory(files[0]) > 0.7 and in_memory(files[1]) == 1
    noted.clear()
    read_ahead(files, progress.append)
    assert noted == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_the_system_cannot_tell_nothing_is_read(files, monkeypatch, code):
    def refuse(descriptor, buffers, offset, *flags):
        assert flags, "read"
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", refuse)
    progress = []
    read_ahead(files, progress.append)
    assert sum(progress) == 12 * MIB + 5


def test_what_does_not_fit_into_memory_is_not_read(files, noted, monkeypatch):
    monkeypatch.setattr(module, "fits_in_memory", lambda nbytes: nbytes < 12 * MIB + 5)
    read_ahead(files, lambda nbytes: None)
    assert noted == []


def test_a_file_that_cannot_be_read_is_left_to_who_uses_it(files, noted, tmp_path):
    read_ahead([tmp_path / "none", *files], lambda nbytes: None)
    assert noted == []
