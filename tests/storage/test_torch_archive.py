import os
import pickletools
import random
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from struct import pack, unpack
from zipfile import ZipFile
from zlib import crc32

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.serialization import skip_data
from torch.utils.serialization import config

from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import TensorMeta, meta_of
from checkpointing.storage import write as write_module
from checkpointing.storage.read import SAFETENSORS_DTYPES, load_torch_file
from checkpointing.storage.torch_archive import TorchArchive
from checkpointing.storage.torch_file import check_torch_file

GIB = 1 << 30
ID = ".data/serialization_id"
shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from(list(SAFETENSORS_DTYPES))
EVERY_DTYPE = {str(dtype): ((2 + count,), dtype) for count, dtype in enumerate(SAFETENSORS_DTYPES)}


DIRECTORY_FIELDS = (
    *("date_time", "create_version", "create_system", "extract_version"),
    *("internal_attr", "external_attr", "extra", "comment"),
)


def of_random_bits(shape, dtype):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def tensor_bytes(tensor):
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def make_tensors(specs):
    return {name: of_random_bits(shape, dtype) for name, (shape, dtype) in specs.items()}


def archive_of(tensors, name="archive"):
    return TorchArchive({key: meta_of(tensor) for key, tensor in tensors.items()}, name=name)


def crcs_of(tensors):
    return {name: crc32(tensor_bytes(tensor)) for name, tensor in tensors.items()}


def write(path, archive, tensors):
    """Every part of the file at its place, in a random order, from several threads."""
    parts = archive.pieces(crcs_of(tensors))
    parts += [(archive.offsets[name], tensor_bytes(value)) for name, value in tensors.items()]
    random.Random(0).shuffle(parts)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with ThreadPoolExecutor(3) as pool:
        written = list(pool.map(lambda part: os.pwrite(file, part[1], part[0]), parts))
    os.close(file)
    assert written == [len(data) for _, data in parts]


def written(directory, tensors):
    write(directory / "ours.pt", archive_of(tensors), tensors)
    return directory / "ours.pt"


def torch_saved(directory, tensors, name="archive"):
    torch.save(tensors, directory / f"{name}.pt")
    return directory / f"{name}.pt"


def same_bytes(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert meta_of(found[name]) == meta_of(tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert tensor_bytes(found[name]) == tensor_bytes(tensor), name


def data_offsets(path):
    reader = torch._C.PyTorchFileReader(str(path))
    return {name: reader.get_record_offset(name) for name in reader.get_all_records()}


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(st.text(max_size=8), st.tuples(shapes, dtypes), max_size=4),
)
@example(specs={})
@example(specs=EVERY_DTYPE)
@example(specs={"scalar": ((), torch.float32), "none": ((0, 3), torch.bfloat16)})
def test_every_reader_finds_the_tensors(tmp_path_factory, specs):
    tensors = make_tensors(specs)
    path = written(tmp_path_factory.mktemp("file"), tensors)
    same_bytes(torch.load(path, weights_only=True), tensors)
    same_bytes(torch.load(path, weights_only=True, mmap=True), tensors)
    same_bytes(load_torch_file(path), tensors)
    assert check_torch_file(path).is_zip
    with ZipFile(path) as file:
        assert file.testzip() is None


def test_copies_share_their_data_as_tied_weights_do_in_torch_save(tmp_path):
    own = make_tensors({"a": ((3, 5), torch.bfloat16), "b": ((7,), torch.float32)})
    tied = {**own, "c": own["a"].detach(), "d": own["b"].detach()}
    metas = {name: meta_of(tensor) for name, tensor in tied.items()}
    archive = TorchArchive(metas, {"c": "a", "d": "b"})
    assert set(archive.offsets) == {"a", "b"}
    write(tmp_path / "ours.pt", archive, own)
    theirs = torch_saved(tmp_path, tied)
    same_bytes(torch.load(tmp_path / "ours.pt", weights_only=True), tied)
    with ZipFile(tmp_path / "ours.pt") as found, ZipFile(theirs) as expected:
        assert found.namelist() == expected.namelist()
        for name in ("archive/data.pkl", "archive/data/0", "archive/data/1"):
            assert found.read(name) == expected.read(name)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(st.text(max_size=8), st.tuples(shapes, dtypes), max_size=4),
)
@example(specs={})
@example(specs=EVERY_DTYPE)
@example(specs={f"layers.{i}.w": ((i % 3, 5), torch.bfloat16) for i in range(1100)})
def test_entries_and_offsets_are_those_of_torch_save(tmp_path_factory, specs):
    directory = tmp_path_factory.mktemp("files")
    tensors = make_tensors(specs)
    ours, theirs = written(directory, tensors), torch_saved(directory, tensors)
    with ZipFile(ours) as found, ZipFile(theirs) as expected:
        assert found.namelist() == expected.namelist()
        for name in expected.namelist():
            if not name.endswith(ID):
                assert found.read(name) == expected.read(name), name
    assert data_offsets(ours) == data_offsets(theirs)


def test_the_pickle_is_the_one_of_torch_save(tmp_path):
    tensors = make_tensors(EVERY_DTYPE | {"ключ": ((), torch.int16), "e": ((3, 0), torch.int8)})
    with ZipFile(written(tmp_path, tensors)) as ours:
        found = list(pickletools.genops(ours.read("archive/data.pkl")))
    with ZipFile(torch_saved(tmp_path, tensors)) as theirs:
        expected = list(pickletools.genops(theirs.read("archive/data.pkl")))
    assert [(op.name, value) for op, value, _ in found] == [
        (op.name, value) for op, value, _ in expected
    ]


def test_apart_from_descriptors_the_bytes_are_those_of_torch_save(tmp_path):
    """Of each entry: header, padding and data; all of torch.save's file but the directory."""
    tensors = make_tensors({"a": ((2, 3), torch.float32), "b": ((7,), torch.bfloat16)})
    path, archive = tmp_path / "ours.pt", archive_of(tensors, "weights.00")
    write(path, archive, tensors)
    theirs = torch_saved(tmp_path, tensors, "weights.00")
    offsets = data_offsets(theirs)
    ours_bytes, theirs_bytes = path.read_bytes(), theirs.read_bytes()
    with ZipFile(path) as found, ZipFile(theirs) as expected:
        for ours_info, info in zip(found.infolist(), expected.infolist(), strict=True):
            name = info.filename
            head, ours_head = info.header_offset, ours_info.header_offset
            data = offsets[name.removeprefix("weights.00/")]
            header = bytearray(theirs_bytes[head : head + 30])
            header[6:8] = (0x0800).to_bytes(2, "little")
            header[14:18] = ours_info.CRC.to_bytes(4, "little")
            header[18:26] = info.file_size.to_bytes(4, "little") * 2
            header[28:30] = (data - ours_head - 30 - len(name)).to_bytes(2, "little")
            assert ours_bytes[ours_head : ours_head + 30] == header
            padding = data - ours_head - 30 - len(name) - 4
            extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            assert ours_bytes[ours_head + 30 : data] == name.encode() + extra
            assert data % 64 == 0
            assert ours_info.CRC == info.CRC or name.endswith(ID)
            for field in DIRECTORY_FIELDS:
                assert getattr(ours_info, field) == getattr(info, field)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(st.text(max_size=8), st.tuples(shapes, dtypes), max_size=4),
    name=st.text("aé.-", min_size=1, max_size=70),
)
def test_pieces_and_tensors_cover_the_file_once(specs, name):
    tensors = make_tensors(specs)
    archive = archive_of(tensors, name)
    pieces = archive.pieces(crcs_of(tensors))
    assert [offset for offset, _ in pieces] == sorted({offset for offset, _ in pieces})
    parts = [(offset, len(data)) for offset, data in pieces]
    parts += [(archive.offsets[key], meta_of(tensor).nbytes) for key, tensor in tensors.items()]
    end = 0
    for offset, length in sorted(parts):
        assert offset == end
        end += length
    assert end == archive.size
    assert all(offset % 64 == 0 for offset in archive.offsets.values())


def test_the_pieces_tell_contents_apart_and_are_the_same_for_the_same():
    def id_of(tensors):
        pieces = archive_of(tensors).pieces(crcs_of(tensors))
        (digits,) = (data[-40:] for _, data in pieces if ID.encode() in data[:70])
        assert digits.isdigit()
        return digits

    tensors = {"a": torch.arange(3.0), "b": torch.arange(5.0)}
    again = {"a": torch.arange(3.0), "b": torch.arange(5.0)}
    assert id_of(tensors) == id_of(again)
    assert id_of(tensors) != id_of(again | {"b": torch.arange(1.0, 6.0)})
    assert id_of(tensors) != id_of({"a": torch.arange(3.0), "c": torch.arange(5.0)})


def test_shapes_that_are_one_object_are_laid_out_as_equal_ones():
    shape = (3, 5)
    shared = TorchArchive({name: TensorMeta(shape, torch.int8) for name in "ab"})
    equal = TorchArchive({name: TensorMeta(tuple([3, 5]), torch.int8) for name in "ab"})
    assert shared.pieces({"a": 1, "b": 2}) == equal.pieces({"a": 1, "b": 2})


@pytest.mark.parametrize("tensor", ["a", "b"])
def test_a_changed_bit_is_found_by_its_crc(tmp_path, tensor):
    tensors = {"a": torch.arange(3.0), "b": torch.arange(5.0)}
    path, archive = tmp_path / "t.pt", archive_of(tensors)
    write(path, archive, tensors)
    content = bytearray(path.read_bytes())
    content[archive.offsets[tensor] + 2] ^= 16
    path.write_bytes(content)
    with ZipFile(path) as file:
        assert file.testzip() == f"archive/data/{'ab'.index(tensor)}"


@pytest.mark.skipif(shutil.which("unzip") is None, reason="needs unzip")
def test_unzip_accepts_it(tmp_path):
    path = written(tmp_path, make_tensors(EVERY_DTYPE | {"none": ((0,), torch.int8)}))
    done = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "No errors detected" in done.stdout, done.stdout + done.stderr


def test_torch_computes_the_right_offsets(tmp_path):
    tensors = make_tensors(EVERY_DTYPE | {"none": ((0, 3), torch.int8), "z": ((17,), torch.int8)})
    path = written(tmp_path, tensors)
    with config.patch({"load.calculate_storage_offsets": True}):
        same_bytes(torch.load(path, mmap=True), tensors)
    offsets = archive_of(tensors).offsets
    for name, tensor in torch.load(path, map_location="meta").items():
        assert tensor.untyped_storage()._checkpoint_offset == offsets[name]


LARGE = {
    "first": TensorMeta((3,), torch.float32),
    "entry beyond 4 GiB": TensorMeta((2 * GIB + 5,), torch.int16),
    "behind it": TensorMeta((7,), torch.bfloat16),
    "empty": TensorMeta((0, 2), torch.int64),
    "scalar": TensorMeta((), torch.int64),
    "last": TensorMeta((2, 11), torch.uint8),
}
FOUR_GIB = 1 << 32


def bytes_of_sizes(*sizes):
    names = "abcdefghijk"[: len(sizes)]
    return {name: TensorMeta((size,), torch.uint8) for name, size in zip(names, sizes, strict=True)}


# By the offset at which the data of the first tensor begins.
EDGES = {
    "large": lambda start: LARGE,
    "largest size in 32 bits": lambda start: bytes_of_sizes(FOUR_GIB - 2, 3),
    "smallest size in 64 bits": lambda start: bytes_of_sizes(FOUR_GIB - 1, 3),
    "offsets around 4 GiB": lambda start: bytes_of_sizes(FOUR_GIB - 2000, *range(60, 70)),
} | {
    # The header of the second tensor is here or there of 4 GiB, with a descriptor of torch.save
    # before it or without.
    f"first ends {less} before 4 GiB": (
        lambda start, less=less: bytes_of_sizes(FOUR_GIB - less - start, 5)
    )
    for less in (0, 1, 2, 15, 16, 17, 18, 24, 25)
}


def write_sparse(path, archive, metas, values):
    """A file whose tensors are zero, with wrong CRCs, where no value is given."""
    with path.open("wb") as file:
        for offset, data in archive.pieces(dict.fromkeys(metas, 0)):
            file.seek(offset)
            file.write(data)
        for offset, data in values:
            file.seek(offset)
            file.write(data)
    assert path.stat().st_size == archive.size
    assert path.stat().st_blocks * 512 < 1 << 20, "the file system has no sparse files"


def saved_without_data(path, metas):
    tensors = {}
    for name, meta in metas.items():
        if meta.nbytes < GIB:
            tensors[name] = torch.empty(meta.shape, dtype=meta.dtype)
        else:
            (size,) = meta.shape
            sparse = str(path.with_suffix(".data"))
            tensors[name] = torch.from_file(sparse, shared=True, size=size, dtype=meta.dtype)
    with skip_data():
        torch.save(tensors, path)
    return path


def test_values_behind_4_gib_are_read(tmp_path):
    path, archive = tmp_path / "large.pt", TorchArchive(LARGE)
    offsets = archive.offsets
    behind = torch.arange(7).to(torch.bfloat16)
    last = torch.arange(22, dtype=torch.uint8).reshape(2, 11)
    write_sparse(
        path,
        archive,
        LARGE,
        [
            (offsets["entry beyond 4 GiB"] + 2 * (2 * GIB + 4), b"\x39\x30"),
            (offsets["behind it"], tensor_bytes(behind)),
            (offsets["scalar"], b"\x07" + b"\0" * 7),
            (offsets["last"], tensor_bytes(last)),
        ],
    )
    assert offsets["last"] > 4 * GIB
    for loaded in (torch.load(path, weights_only=True, mmap=True), load_torch_file(path)):
        assert {name: meta_of(tensor) for name, tensor in loaded.items()} == LARGE
        assert loaded["entry beyond 4 GiB"][-3:].tolist() == [0, 0, 0x3039]
        assert torch.equal(loaded["behind it"], behind)
        assert loaded["scalar"] == 7
        assert torch.equal(loaded["last"], last)
    with config.patch({"load.calculate_storage_offsets": True}):
        assert torch.equal(torch.load(path, mmap=True)["last"], last)


def zip64(*numbers):
    """The field for what 32 bits do not hold (APPNOTE 4.5.3)."""
    large = [number for number in numbers if number >= 0xFFFFFFFF]
    return pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""


def entries_front_to_back(path):
    """(name, size, offset of the data) of each entry, without the directory (APPNOTE 4.3.7)."""
    position = 0
    with path.open("rb") as file:
        while True:
            file.seek(position)
            signature, flags, size, stored, name, extra = unpack("<4s2xH10xIIHH", file.read(30))
            if signature != b"PK\3\4":
                assert signature == b"PK\1\2"
                return
            assert flags == 0x0800 and size == stored
            path_in_file, fields = file.read(name), file.read(extra)
            if size == 0xFFFFFFFF:
                assert fields[:4] == pack("<HH", 1, 16) and fields[4:12] == fields[12:20]
                (size,) = unpack("<Q", fields[4:12])
                fields = fields[20:]
            assert fields == b"FB" + pack("<H", len(fields) - 4) + b"Z" * (len(fields) - 4)
            position += 30 + name + extra
            yield path_in_file.decode(), size, position
            position += size


# Names of many lengths: a header that is a few bytes longer may move no data, or all by 64 bytes.
@pytest.mark.parametrize("name", ["n" * length for length in range(4, 68, 4)], ids=len)
@pytest.mark.parametrize("edge", EDGES)
def test_large_files_are_laid_out_as_torch_save_does(tmp_path, edge, name):
    start = TorchArchive(bytes_of_sizes(FOUR_GIB, 5), name=name).offsets["a"]
    metas = EDGES[edge](start)
    archive, ours = TorchArchive(metas, name=name), tmp_path / "ours.pt"
    write_sparse(ours, archive, metas, [])
    theirs = saved_without_data(tmp_path / f"{name}.pt", metas)
    offsets = data_offsets(theirs)
    assert data_offsets(ours) == offsets
    for key, tensor in torch.load(ours, map_location="meta").items():
        assert tensor.untyped_storage()._checkpoint_offset == archive.offsets[key]
    entries = list(entries_front_to_back(ours))
    with ZipFile(ours) as found, ZipFile(theirs) as expected:
        assert found.read(f"{name}/data.pkl") == expected.read(f"{name}/data.pkl")
        for entry, info, their_info in zip(
            entries, found.infolist(), expected.infolist(), strict=True
        ):
            path, size, data = entry
            assert path == info.filename == their_info.filename
            assert size == info.file_size == info.compress_size == their_info.file_size
            assert data == offsets[path.removeprefix(f"{name}/")]
            assert info.extra == zip64(size, size, info.header_offset)


@pytest.mark.slow
def test_more_entries_than_16_bits_count(tmp_path):
    archive = TorchArchive({f"t{i}": TensorMeta((1,), torch.uint8) for i in range(66_000)})
    content = bytearray(archive.size)
    values = {name: bytes([i % 251]) for i, name in enumerate(archive.offsets)}
    for offset, data in archive.pieces({name: crc32(value) for name, value in values.items()}):
        content[offset : offset + len(data)] = data
    for name, value in values.items():
        content[archive.offsets[name]] = value[0]
    path = tmp_path / "t.pt"
    path.write_bytes(content)
    loaded = load_torch_file(path)
    assert {name: bytes(tensor.tolist()) for name, tensor in loaded.items()} == values
    with ZipFile(path) as file:
        assert len(file.namelist()) == 66_000 + 6
        assert file.testzip() is None


@pytest.mark.slow
def test_the_crcs_of_a_large_file_are_checked_by_all(tmp_path):
    path, archive = tmp_path / "large.pt", TorchArchive(LARGE)
    write_sparse(path, archive, LARGE, [])
    crcs = {}
    for name, meta in LARGE.items():
        crcs[name] = 0
        for start in range(0, meta.nbytes, GIB):
            crcs[name] = crc32(bytes(min(GIB, meta.nbytes - start)), crcs[name])
    with path.open("r+b") as file:
        for offset, data in archive.pieces(crcs):
            file.seek(offset)
            file.write(data)
    with ZipFile(path) as file:
        assert file.testzip() is None
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tqq", path], check=False).returncode == 0


def test_plain_data_with_tensors_in_it_is_pickled_as_torch_save_does(tmp_path):
    content = {
        "state": [{"exp": torch.arange(15.0).reshape(3, 5), "step": torch.tensor(3)}, (1, None)],
        "a.b": torch.ones(7),
        "a": {"b": torch.arange(2, dtype=torch.int8)},
        "kinds": Counter({5: 2}),
    }
    archive, tensors = write_module.archive_of(content), write_module.tensors_by_name(content)
    assert list(tensors) == ["state.0.exp", "state.0.step", "a.b", "a.b'"]
    write(tmp_path / "ours.pt", archive, tensors)
    theirs = torch_saved(tmp_path, content)
    with ZipFile(tmp_path / "ours.pt") as found, ZipFile(theirs) as expected:
        for entry in ("data.pkl", *(f"data/{number}" for number in range(4))):
            assert found.read(f"archive/{entry}") == expected.read(f"archive/{entry}")
    assert repr(torch.load(tmp_path / "ours.pt", weights_only=True)) == repr(content)


def test_a_tensor_that_has_no_name_is_refused():
    with pytest.raises(ConfigError, match=r"shape \[3\] cannot be saved beside"):
        write_module.archive_of({"set": {torch.ones(3)}})
