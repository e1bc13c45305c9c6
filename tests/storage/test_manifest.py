import json

import pytest
import torch
import xxhash

from checkpointing.errors import CorruptCheckpointError
from checkpointing.mapping.tensors import StateDictSource
from checkpointing.storage.integrity import check_intact
from checkpointing.storage.manifest import file_digests, read_manifest
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


def parts_of(content, lines):
    """(tensor, bytes) of each line; its checksum and size are those of the bytes."""
    parts, end = [], 0
    for line in lines:
        found, size, *tensor = line.split(" ", 2)
        parts.append((tensor[0] if tensor else None, content[end : end + int(size)]))
        assert found == checksum(parts[-1][1])
        end += int(size)
    assert end == len(content)
    return parts


def tensors_in(parts):
    data = {}
    for name, piece in parts:
        if name is not None:
            data[name] = data.get(name, b"") + piece
    return data


def test_it_lists_every_file_with_its_size_and_the_checksums_of_every_byte(checkpoint):
    manifest = read_manifest(checkpoint)
    assert (manifest["step"], manifest["epoch"]) == (7, 1)
    assert set(manifest["files"]) == {"a.json", "merged/b.safetensors", "c.pt", "d.pt"}
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        assert set(entry) == {"size", "xxh3_64"}
        assert entry["size"] == len(content)
        if name != "a.json":
            parts_of(content, entry["xxh3_64"])


def test_of_a_file_without_tensors_it_lists_the_checksum(checkpoint):
    assert read_manifest(checkpoint)["files"]["a.json"] == {
        "size": 5,
        "xxh3_64": checksum(b"12345"),
    }


def test_it_lists_the_checksum_of_every_tensor(checkpoint):
    files = read_manifest(checkpoint)["files"]
    expected = {
        "w": torch.arange(6.0).numpy().tobytes(),
        "b": torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes(),
    }

    def found(name):
        return tensors_in(parts_of((checkpoint / name).read_bytes(), files[name]["xxh3_64"]))

    assert found("merged/b.safetensors") == expected
    assert found("c.pt") == expected
    assert found("d.pt") == {"states.0.exp": torch.ones(2).numpy().tobytes()}


@pytest.mark.parametrize("name", ["t.safetensors", pytest.param("t.pt", marks=pytest.mark.slow)])
def test_a_large_tensor_has_several_parts(tmp_path, name):
    rows, row = 560_000, torch.arange(251, dtype=torch.uint8)
    large = row.expand(rows, 251)
    writer = CheckpointWriter(tmp_path, lambda _: None)
    writer.tensors(name, StateDictSource({"large": large, "b": torch.ones(3)}))
    writer.manifest({"step": 7})
    content = memoryview((tmp_path / name).read_bytes())
    parts = parts_of(content, read_manifest(tmp_path)["files"][name]["xxh3_64"])
    sizes = [len(piece) for tensor, piece in parts if tensor == "large"]
    # 133 682 rows are 250 bytes less than 32 MiB.
    assert sizes == [133_682 * 251] * 4 + [(rows - 4 * 133_682) * 251]
    expected = bytes(range(251)) * 1000
    start = content.obj.index(expected)
    assert all(
        content[at : at + len(expected)] == expected
        for at in range(start, start + rows * 251, len(expected))
    )


def test_a_tensor_may_have_any_name(tmp_path):
    names = ["a b", "line\nbreak", " leading", "3 4", "ключ"]
    tensors = {name: torch.full((size,), size) for size, name in enumerate(names, 2)}
    writer = CheckpointWriter(tmp_path, lambda _: None)
    writer.tensors("t.safetensors", StateDictSource(tensors))
    writer.manifest({"step": 7})
    content = (tmp_path / "t.safetensors").read_bytes()
    manifest = read_manifest(tmp_path)
    parts = parts_of(content, manifest["files"]["t.safetensors"]["xxh3_64"])
    expected = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    assert tensors_in(parts) == expected
    (digest,) = file_digests(tmp_path, manifest).values()
    assert {part.tensor for part in digest.parts} == {"", *names}


def test_a_manifest_with_one_checksum_for_each_file_is_read_too(checkpoint):
    """Such as those have that list the checksums of tensors beside it."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        entry["xxh3_64"] = checksum((checkpoint / name).read_bytes())
        entry["tensors"] = {"w": checksum(torch.arange(6.0).numpy().tobytes())}
    path.write_text(json.dumps(manifest))
    assert read_manifest(checkpoint) == manifest
    check_intact(checkpoint, file_digests(checkpoint, manifest))
    content = bytearray((checkpoint / "c.pt").read_bytes())
    content[-300] ^= 2
    (checkpoint / "c.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"  - .*/c\.pt: is damaged\n"):
        check_intact(checkpoint, file_digests(checkpoint, manifest))


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
        *(
            ({"files": {"a.json": entry}}, r"does not tell size and checksum of 'a\.json'")
            for entry in (
                {"size": 5, "xxh3_64": 12},
                {"size": "5", "xxh3_64": "12"},
                {"size": -5, "xxh3_64": "12"},
                {"size": 5, "xxh3_64": {"12": 5}},
                {"size": 5, "xxh3_64": []},
                {"size": 5, "xxh3_64": ["12 4"]},
                {"size": 5, "xxh3_64": ["12 4", "13 2 w"]},
                {"size": 5, "xxh3_64": ["12 5", 3]},
                {"size": 5, "xxh3_64": ["12 5", "xy 0"]},
                {"size": 5, "xxh3_64": ["12 -5"]},
                {"size": 5, "xxh3_64": ["12  5"]},
                {"size": 5, "xxh3_64": ["12 5w"]},
                {"size": 5, "xxh3_64": ["12"]},
            )
        ),
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
