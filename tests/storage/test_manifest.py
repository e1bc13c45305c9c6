import json

import pytest
import torch
import xxhash

from checkpointing.errors import CorruptCheckpointError
from checkpointing.mapping.tensors import StateDictSource
from checkpointing.storage.manifest import read_manifest
from checkpointing.storage.writer import CheckpointWriter


def checksum(data):
    return xxhash.xxh3_64_hexdigest(data)


@pytest.fixture
def checkpoint(tmp_path):
    writer = CheckpointWriter(tmp_path, lambda _: None)
    writer.text("a.json", "12345")
    tensors = StateDictSource({"w": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)})
    writer.within("merged").tensors("b.safetensors", tensors)
    writer.tensors("c.pt", tensors)
    writer.torch_object("d.pt", {"step": 3, "states": [{"exp": torch.ones(2)}], "none": None})
    writer.manifest({"step": 7, "epoch": 1})
    return tmp_path


def test_it_lists_every_file_with_the_size_and_checksum_that_lie_on_the_disk(checkpoint):
    manifest = read_manifest(checkpoint)
    assert (manifest["step"], manifest["epoch"]) == (7, 1)
    assert set(manifest["files"]) == {"a.json", "merged/b.safetensors", "c.pt", "d.pt"}
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        assert (entry["size"], entry["xxh3_64"]) == (len(content), checksum(content))


def test_it_lists_the_checksum_of_every_tensor(checkpoint):
    files = read_manifest(checkpoint)["files"]
    expected = {
        "w": checksum(torch.arange(6.0).numpy().tobytes()),
        "b": checksum(torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()),
    }
    assert files["merged/b.safetensors"]["tensors"] == expected
    assert files["c.pt"]["tensors"] == expected
    assert files["d.pt"]["tensors"] == {"states.0.exp": checksum(torch.ones(2).numpy().tobytes())}
    assert "tensors" not in files["a.json"]


def test_a_missing_and_a_truncated_file_are_named(checkpoint):
    (checkpoint / "a.json").write_bytes(b"1234")
    with pytest.raises(CorruptCheckpointError, match=r"a\.json: has 4 bytes, .* says 5"):
        read_manifest(checkpoint)
    (checkpoint / "a.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"a\.json: is missing"):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": None}, "lists no files"),
        ({"files": {"../outside": {"size": 1, "xxh3_64": "0"}}}, "outside of the checkpoint"),
        ({"files": {"a.json": {"size": 5}}}, r"does not tell size and checksum of 'a\.json'"),
        ({"files": {"a.json": 5}}, r"does not tell size and checksum of 'a\.json'"),
    ],
)
def test_a_manifest_that_is_none_is_refused(checkpoint, change, message):
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CorruptCheckpointError, match=message):
        read_manifest(checkpoint)


def test_a_directory_without_a_manifest_has_none(tmp_path):
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
    manifest = {"step": 1, "files": {name: {"size": 5, "xxh3_64": checksum(b"12345")}}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpointError, match="outside of the checkpoint"):
        read_manifest(checkpoint)
