import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import StateDictSource, TensorMeta
from checkpointing.storage import writer
from checkpointing.storage.integrity import check_intact
from checkpointing.storage.manifest import file_digests, read_manifest
from checkpointing.storage.read import SAFETENSORS_DTYPES, SafetensorsSource
from checkpointing.storage.write import parse_size, plan_shards
from checkpointing.storage.writer import CheckpointWriter
from tests.tiny import assert_same_tensors

shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from(list(SAFETENSORS_DTYPES))


def write(path, source, progress=lambda _: None):
    CheckpointWriter(path.parent, progress).tensors(path.name, source)


def same_bytes(found, expected):
    # Bytes, since not every dtype can be compared, and a NaN is no other.
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        flat = found[name].contiguous().flatten().view(torch.uint8)
        assert torch.equal(flat, tensor.contiguous().flatten().view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(shapes, dtypes), max_size=4)
)
def test_the_safetensors_library_reads_what_is_written(tmp_path_factory, specs):
    specs.pop("__metadata__", None)
    tensors = {}
    for name, (shape, dtype) in specs.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    path = tmp_path_factory.mktemp("file") / "t.safetensors"
    done = []
    write(path, StateDictSource(tensors), done.append)
    same_bytes(load_file(path), tensors)
    source = SafetensorsSource(path)
    same_bytes({name: source.read(name) for name in source.metas}, tensors)
    assert source.metas == StateDictSource(tensors).metas
    assert sum(done) == sum(tensor.nbytes for tensor in tensors.values())


def test_the_file_is_byte_for_byte_the_libraries_own_for_one_tensor(tmp_path):
    tensors = {"a.weight": torch.arange(15.0).reshape(3, 5)}
    path = tmp_path / "t.safetensors"
    write(path, StateDictSource(tensors))
    assert path.read_bytes() == save(tensors, {"format": "pt"})


def test_the_data_starts_at_a_multiple_of_eight_bytes(tmp_path):
    for name in ("a", "ab", "abc", "abcdefgh"):
        source = StateDictSource({name: torch.ones(3)})
        write(tmp_path / "t.safetensors", source)
        content = (tmp_path / "t.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        assert length % 8 == 0 and len(content) == 8 + length + 12
        assert json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("name", ["t.safetensors", "t.pt"])
def test_a_view_is_written_without_the_storage_that_it_shares(tmp_path, name):
    big = torch.randn(1000, 64)
    views = {"rows": big[3:5], "columns": big[:4, ::2], "transposed": big[:7].T, "whole": big[9]}
    path = tmp_path / name
    write(path, StateDictSource(views))
    assert path.stat().st_size < 10_000
    loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    assert_same_tensors(loaded, views)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    limit=st.integers(1, 120),
)
def test_shards_keep_the_order_and_are_as_few_as_the_order_allows(sizes, limit):
    metas = {str(i): TensorMeta((size,), torch.uint8) for i, size in enumerate(sizes)}
    shards = plan_shards(metas, limit)
    assert [name for shard in shards for name in shard] == list(metas)
    total = [sum(sizes[int(name)] for name in shard) for shard in shards]
    for shard, filled in zip(shards, total, strict=True):
        assert shard and (filled <= limit or len(shard) == 1)
    for i in range(len(shards) - 1):
        assert total[i] + sizes[int(shards[i + 1][0])] > limit


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("200MB", 2 * 10**8),
        ("1.5kb", 1500),
        ("2GiB", 2 * 2**30),
        ("7", 7),
        (123, 123),
        ("3 TB", 3 * 10**12),
    ],
)
def test_a_shard_size_reads_as_bytes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "0GB", "five"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size(text)


def test_a_tensor_that_is_not_what_was_announced_is_never_written(tmp_path):
    source = StateDictSource({"a": torch.ones(3, 5)})
    source.metas["a"] = TensorMeta((3, 5), torch.bfloat16)
    with pytest.raises(TensorMismatchError, match=r"a: is \[3, 5\] float32, .* \[3, 5\] bfloat16"):
        write(tmp_path / "t.safetensors", source)


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 2999])
def test_a_copied_file_is_the_same(tmp_path, monkeypatch, size):
    """Read in pieces, which a large tokenizer is larger than."""
    monkeypatch.setattr(writer, "_CHUNK", 500)
    content = bytes(number * number % 251 for number in range(size))
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "out").mkdir()
    copying = CheckpointWriter(tmp_path / "out", lambda _: None)
    copying.copy(tmp_path / "tokenizer.model")
    copying.manifest({"step": 7})
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == content
    check_intact(tmp_path / "out", file_digests(tmp_path / "out", read_manifest(tmp_path / "out")))
