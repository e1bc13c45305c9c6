import json

import pytest
import xxhash

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.manifest import read_manifest, write_manifest


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "a.bin").write_bytes(b"12345")
    (tmp_path / "merged" / "b.bin").write_bytes(b"x" * (5 << 20))
    write_manifest(tmp_path, {"step": 7, "epoch": 1})
    return tmp_path


def test_it_lists_every_file_with_size_and_checksum(checkpoint):
    manifest = read_manifest(checkpoint)
    assert (manifest["step"], manifest["epoch"]) == (7, 1)
    assert manifest["files"] == {
        "a.bin": {"size": 5, "xxh3_64": xxhash.xxh3_64_hexdigest(b"12345")},
        "merged/b.bin": {"size": 5 << 20, "xxh3_64": xxhash.xxh3_64_hexdigest(b"x" * (5 << 20))},
    }


def test_a_missing_and_a_truncated_file_are_named(checkpoint):
    (checkpoint / "a.bin").write_bytes(b"1234")
    with pytest.raises(CorruptCheckpointError, match=r"a\.bin: has 4 bytes, .* says 5"):
        read_manifest(checkpoint)
    (checkpoint / "a.bin").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"a\.bin: is missing"):
        read_manifest(checkpoint)


def test_a_directory_without_a_manifest_is_none_of_ours(tmp_path):
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', "{}", '{"files": {"a": 1}}'])
def test_a_damaged_manifest_is_an_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpointError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "merged/../../secret"])
def test_a_manifest_that_points_outside_is_refused(tmp_path, name):
    checkpoint = tmp_path / "epoch_0"
    (checkpoint / "merged").mkdir(parents=True)
    (tmp_path / "secret").write_text("12345")
    manifest = {"step": 1, "files": {name: {"size": 5}}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpointError, match="outside of the checkpoint"):
        read_manifest(checkpoint)
