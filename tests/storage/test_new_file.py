"""Files that several threads write: what readers find in them, and what their parts say of them."""

import ctypes
import errno
import json
import os
import threading
from collections import OrderedDict

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.tensors import LazyTensors, Rows, StateDictSource, TensorMeta, meta_of
from checkpointing.storage import new_file, preallocate, write, write_behind
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.new_file import PlacedTensor
from checkpointing.storage.threads import THREADS_VARIABLE
from checkpointing.storage.write import write_safetensors, write_torch_file, write_torch_object

WRITERS = {"safetensors": write_safetensors, "pt": write_torch_file}
LOADERS = {"safetensors": load_file, "pt": torch.load}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
shapes = st.lists(st.integers(0, 9), max_size=3)
views = st.sampled_from(["whole", "transposed", "every second", "rows of a larger one"])
tensors_of = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(shapes, st.sampled_from(DTYPES), views),
    max_size=5,
)


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch):
    """Ranges and blocks of a few bytes, so that small tensors are written as large ones are."""
    monkeypatch.setattr(new_file, "_RANGE", 200)
    monkeypatch.setattr(new_file, "_BLOCK", 64)


def of_random_bits(shape, dtype):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def make(shape, dtype, view):
    if view == "whole" or not shape:
        return of_random_bits(shape, dtype)
    if view == "transposed":
        return of_random_bits(shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if view == "every second":
        return of_random_bits([*shape[:-1], 2 * shape[-1]], dtype)[..., ::2]
    return of_random_bits([shape[0] + 3, *shape[1:]], dtype)[2 : 2 + shape[0]]


def bits(tensor):
    rows = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return rows.view(torch.uint8).numpy().tobytes()


def storage_bits(tensor):
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def same_bits(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert meta_of(found[name]) == meta_of(tensor), name
        assert bits(found[name]) == bits(tensor), name


def written(path, write_content, threads=1):
    """Writes a file; returns its bytes and its digest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(THREADS_VARIABLE, str(threads))
        with new_file.new_file(path) as file:
            write_content(file)
            digest = file.finish()
    return path.read_bytes(), digest


def written_as(kind, path, source, threads=1, progress=lambda nbytes: None):
    return written(
        path, lambda file: WRITERS[kind](file, source, list(source.metas), progress), threads
    )


def check_parts(content, digest, expected):
    """Every byte is in one part, which has the right checksum and belongs to the right tensor."""
    end, data = 0, {name: b"" for name in expected}
    for part in digest.parts:
        piece = content[end : end + part.size]
        assert part.checksum == xxhash.xxh3_64_hexdigest(piece)
        end += part.size
        if part.tensor:
            data[part.tensor] += piece
    assert end == len(content) == digest.size
    assert data == {name: bits(tensor) for name, tensor in expected.items()}
    assert FileDigest.from_entry(json.loads(json.dumps(digest.to_entry()))) == digest


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=60, deadline=None)
@given(specs=tensors_of)
@example(specs={})
@example(specs={"scalar": ((), torch.bfloat16, "whole"), "none": ((0, 3), torch.int8, "whole")})
@example(specs={"no columns": ((7, 0), torch.float32, "whole"), "a": ((3,), torch.bool, "whole")})
@example(specs={"long": ((9, 9, 9), torch.float64, "transposed"), "b": ((5,), torch.int8, "whole")})
@example(specs={f"{n}.w": ((n % 5, 7), torch.float16, "every second") for n in range(40)})
def test_readers_find_the_same_bits_by_any_number_of_threads(tmp_path_factory, kind, specs):
    tensors = {name: make(*spec) for name, spec in specs.items()}
    path = tmp_path_factory.mktemp("file") / f"t.{kind}"
    source = StateDictSource(tensors)
    done = []
    content, digest = written_as(kind, path, source, 1, done.append)
    assert sum(done) == sum(tensor.nbytes for tensor in tensors.values())
    same_bits(LOADERS[kind](path), tensors)
    check_parts(content, digest, tensors)
    path.unlink()
    done = []
    content_of_3, digest_of_3 = written_as(kind, path, source, 3, done.append)
    assert content_of_3 == content
    assert sum(done) == sum(tensor.nbytes for tensor in tensors.values())
    check_parts(content, digest_of_3, tensors)


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_file_held_before_is_gone(tmp_path, kind):
    path = tmp_path / f"t.{kind}"
    path.write_bytes(b"x" * 10_000)
    tensors = {"a": torch.arange(15.0).reshape(3, 5)}
    content, digest = written_as(kind, path, StateDictSource(tensors))
    assert len(content) < 3000
    check_parts(content, digest, tensors)


@pytest.mark.parametrize("kind", WRITERS)
def test_large_tensors_are_written_by_several_threads_and_small_ones_together(tmp_path, kind):
    tensors = {"large": torch.arange(700.0).reshape(70, 10)}
    tensors |= {f"small.{n}": torch.full((3,), n, dtype=torch.int16) for n in range(50)}
    makers = {}

    def noting(name):
        def read(start, stop):
            makers.setdefault(name, set()).add(threading.get_ident())
            return tensors[name][start:stop]

        return lambda: Rows(len(tensors[name]), 1, read)

    source = LazyTensors(StateDictSource(tensors).metas, {name: noting(name) for name in tensors})
    path = tmp_path / f"t.{kind}"
    content, digest = written_as(kind, path, source, threads=3)
    check_parts(content, digest, tensors)
    assert threading.get_ident() not in set.union(*makers.values())
    # 200 bytes are five rows of 40.
    assert [part.size for part in digest.parts if part.tensor == "large"] == [200] * 14
    same_bits(LOADERS[kind](path), tensors)
    # 33 of 6 bytes go into 200, so there are two jobs of them.
    assert len({frozenset(makers[f"small.{n}"]) for n in range(33)}) == 1


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("rows", "unit"), [(13, 4), (12, 5), (11, 11), (9, 2), (3, 7)])
def test_rows_are_read_in_multiples_of_their_unit(tmp_path, kind, rows, unit):
    """Of which neither a block, a range nor the tensor need be a multiple."""
    tensor = torch.arange(rows * 10.0).reshape(rows, 10)
    seen = []

    def read(start, stop):
        seen.append((start, stop))
        return tensor[start:stop]

    source = LazyTensors({"t": meta_of(tensor)}, {"t": lambda: Rows(rows, unit, read)})
    for threads in (1, 3):
        seen.clear()
        path = tmp_path / f"t.{kind}"
        content, digest = written_as(kind, path, source, threads)
        check_parts(content, digest, {"t": tensor})
        assert all(start % unit == 0 for start, _ in seen)
        assert all(stop % unit == 0 or stop == rows for _, stop in seen)
        assert sorted(seen)[0][0] == 0 and sorted(seen)[-1][1] == rows
        same_bits(LOADERS[kind](path), {"t": tensor})


def test_a_scalar_is_its_only_row(tmp_path):
    scalar = torch.tensor(7.25)
    source = LazyTensors({"s": meta_of(scalar)}, {"s": lambda: Rows.whole((), lambda: scalar)})
    path = tmp_path / "t.safetensors"
    content, digest = written_as("safetensors", path, source)
    check_parts(content, digest, {"s": scalar})


# What a source hands out where a [3, 5] of float32 was announced.
OTHERS = {
    "dtype": torch.ones(3, 5, dtype=torch.bfloat16),
    "dtype of the same size": torch.ones(3, 5, dtype=torch.int32),
    "more columns": torch.ones(3, 6),
    "more rows": torch.ones(4, 5),
    "fewer rows": torch.ones(2, 5),
    "no rows": torch.ones(0, 5),
    "another order": torch.ones(5, 3),
    "flat": torch.ones(15),
    "one dimension more": torch.ones(3, 5, 1),
    "scalar": torch.tensor(1.0),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_not_announced_is_not_written(tmp_path, kind, other, threads):
    tensor, announced = OTHERS[other], TensorMeta((3, 5), torch.float32)
    whole = torch.arange(300.0).reshape(30, 10)
    metas = {"first": meta_of(whole), "a": announced, "last": meta_of(whole)}
    # The source may know how many rows it has, or not.
    for rows in (Rows.of(tensor), Rows.whole((3, 5), lambda: tensor)):
        given = {"first": lambda: Rows.of(whole), "a": lambda rows=rows: rows}
        source = LazyTensors(metas, {**given, "last": given["first"]})
        with pytest.raises(TensorMismatchError, match=r"a: is .* was announced as .* float32"):
            written_as(kind, tmp_path / f"t.{kind}", source, threads)


def placed(name, shape, offset):
    return PlacedTensor(name, TensorMeta(shape, torch.float32), offset)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("size", "head", "second", "problem"),
    [
        (248, 5, 208, "a part at byte 8, but 5 are written"),
        (252, 8, 212, "a part at byte 212, but 208 are written"),
        (244, 8, 204, "a part at byte 204, but 208 are written"),
        (248, 12, 208, "a part at byte 8, but 12 are written"),
        (250, 8, 208, "has 250 bytes, but 248 are written"),
    ],
)
def test_a_gap_and_an_overlap_are_found(tmp_path, size, head, second, problem, threads):
    source = StateDictSource({"a": torch.ones(10, 5), "b": torch.zeros(2, 5)})

    def write_content(file):
        file.set_size(size)
        file.write_tensors(
            [placed("a", (10, 5), 8), placed("b", (2, 5), second)], source, lambda _: None
        )
        file.write(0, bytes(head))

    with pytest.raises(RuntimeError, match=problem):
        written(tmp_path / "t", write_content, threads)


def test_a_file_without_gaps_is_whole(tmp_path):
    """By the same calls as above."""
    tensors = {"a": torch.ones(10, 5), "b": torch.zeros(2, 5)}

    def write_content(file):
        file.set_size(248)
        places = [placed("b", (2, 5), 208), placed("a", (10, 5), 8)]
        file.write_tensors(places, StateDictSource(tensors), lambda _: None)
        file.write(0, bytes(8))

    content, digest = written(tmp_path / "t", write_content)
    assert content == bytes(8) + bits(tensors["a"]) + bits(tensors["b"])
    check_parts(content, digest, tensors)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_data_is_written_in_parts(tmp_path, threads):
    data = os.urandom(1013)
    content, digest = written(tmp_path / "t", lambda file: file.write(0, data, "x"), threads)
    assert content == data
    assert [(part.size, part.tensor) for part in digest.parts] == [(200, "x")] * 5 + [(13, "x")]
    assert [part.checksum for part in digest.parts] == [
        xxhash.xxh3_64_hexdigest(data[start : start + 200]) for start in range(0, 1013, 200)
    ]


def test_no_data_is_a_file_too(tmp_path):
    assert written(tmp_path / "t", lambda file: file.write(0, b""))[0] == b""
    content, digest = written(tmp_path / "t", lambda file: None)
    assert content == b"" and digest.size == 0
    assert FileDigest.from_entry(digest.to_entry()) == digest


def large_storage():
    return torch.arange(1000.0).reshape(10, 100)


SHARED = torch.arange(77.0)
OBJECTS = {
    "plain": {"steps": 3, "names": ["a", ("b", None)], "rate": 1.5},
    "nothing": {},
    "nested": {"state": [{"exp": torch.arange(40.0), "step": torch.tensor(3.0)}], "epochs": 2},
    "ordered": OrderedDict(w=torch.nn.Parameter(torch.arange(60.0).reshape(5, 12))),
    "shared": {"a": SHARED, "b": SHARED, "rows": SHARED[5:9], "n": 4},
    "view of a larger storage": {"v": large_storage()[3:5, ::7], "x": torch.ones(3)},
    "empty": {"e": torch.ones(0, 3), "s": torch.tensor(2, dtype=torch.int8)},
    "many": {str(n): torch.full((n % 7, 3), n, dtype=torch.bfloat16) for n in range(60)},
    "large": {
        "first": torch.arange(400_000.0),
        "text": "x" * (1 << 21),
        "last": torch.ones(3, 1 << 19, dtype=torch.bfloat16),
    },
}


def leaves(content):
    """Tensors in it, by the path to them."""
    if isinstance(content, torch.Tensor):
        yield "", content
    elif isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            for path, tensor in leaves(value):
                yield f"{key}.{path}".removesuffix("."), tensor


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_file_of_torch_save_is_byte_for_byte_its_own(tmp_path, monkeypatch, name, threads):
    # So that a large tensor has several parts, and no more than that.
    monkeypatch.setattr(new_file, "_RANGE", 1 << 18)
    monkeypatch.setattr(new_file, "_BLOCK", 1 << 16)
    path = tmp_path / "archive.pt"
    torch.save(OBJECTS[name], path)
    expected = path.read_bytes()
    content, digest = written(
        tmp_path / "ours.pt", lambda file: write_torch_object(file, OBJECTS[name]), threads
    )
    assert content == expected
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    same_bits(dict(leaves(loaded)), dict(leaves(OBJECTS[name])))
    check_named(content, digest, dict(leaves(OBJECTS[name])))


def check_named(content, digest, tensors):
    """The parts of a name are the bytes of the storage of the tensor of that name."""
    end, data = 0, {}
    for part in digest.parts:
        piece = content[end : end + part.size]
        assert part.checksum == xxhash.xxh3_64_hexdigest(piece)
        end += part.size
        if part.tensor:
            data[part.tensor] = data.get(part.tensor, b"") + piece
    assert end == len(content)
    storages = {
        tensor.untyped_storage().data_ptr(): storage_bits(tensor)
        for tensor in tensors.values()
        if tensor.untyped_storage().nbytes()
    }
    assert sorted(data.values()) == sorted(storages.values())
    for name, piece in data.items():
        assert piece == storage_bits(tensors[name])


def test_data_that_is_not_known_is_not_gathered_without_end(tmp_path, monkeypatch):
    """Such as the storages of a tensor of another class."""
    monkeypatch.setattr(write, "_GATHERED", 500)
    gathered = []
    original = new_file.NewFile.write

    def noting(self, offset, data, tensor=""):
        gathered.append(len(data))
        original(self, offset, data, tensor)

    monkeypatch.setattr(new_file.NewFile, "write", noting)
    content = {"storages": [torch.arange(30.0).untyped_storage() for _ in range(20)]}
    torch.save(content, tmp_path / "archive.pt")
    ours, _ = written(tmp_path / "ours.pt", lambda file: write_torch_object(file, content))
    assert ours == (tmp_path / "archive.pt").read_bytes()
    assert max(gathered) < 2000 and len(gathered) > 5


class Disk:
    """Stands where the system's call was, whose failure cannot be had otherwise."""

    def __init__(self, code):
        self._code = code
        self.calls = []

    def __call__(self, descriptor, start, size, flags):
        self.calls.append((start, size, flags))
        ctypes.set_errno(self._code)
        return -1 if self._code else 0


def write_300_rows(file):
    tensor = torch.arange(3000.0).reshape(300, 10)
    file.set_size(12_000)
    source = StateDictSource({"t": tensor})
    file.write_tensors([placed("t", (300, 10), 0)], source, lambda _: None)


@pytest.fixture
def small_window(monkeypatch):
    monkeypatch.setattr(write_behind, "WINDOW", 1000)
    monkeypatch.setattr(write_behind, "_LEAST", 100)
    monkeypatch.setattr(new_file, "_RANGE", 6000)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_what_the_disk_refused_is_not_lost_where_it_is_told_early(
    tmp_path, monkeypatch, small_window, code, threads
):
    """The system tells it once: an fsync after that succeeds."""
    monkeypatch.setattr(write_behind, "_sync_file_range", lambda: Disk(code))
    with pytest.raises(OSError, match=r"t\.pt") as raised:
        written(tmp_path / "t.pt", write_300_rows, threads)
    assert raised.value.errno == code


@pytest.mark.parametrize("code", [0, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM])
def test_a_system_without_the_hint_is_as_good(tmp_path, monkeypatch, small_window, code):
    disk = Disk(code)
    monkeypatch.setattr(write_behind, "_sync_file_range", lambda: disk)
    content, _ = written(tmp_path / "t", write_300_rows)
    assert content == bits(torch.arange(3000.0))
    # What is sent off lies beside what was sent before, and what is waited for was sent.
    sent = [(start, size) for start, size, flags in disk.calls if flags == 2]
    ends = [start + size for start, size in sent]
    assert all(start in (0, 6000, *ends) for start, _ in sent)
    # A window is 26 rows of 40 bytes, so that the last of a range is smaller, and is sent too.
    assert sum(size for _, size in sent) == 12_000
    assert {(start, size) for start, size, flags in disk.calls if flags != 2} < set(sent)
    monkeypatch.setattr(write_behind, "_sync_file_range", lambda: None)
    assert written(tmp_path / "t", write_300_rows)[0] == content


class Allocator(Disk):
    """Stands where the system's call was that takes room for a file."""

    def __call__(self, descriptor, mode, start, size):
        return super().__call__(descriptor, start, size, mode)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch, code):
    monkeypatch.setattr(preallocate, "_fallocate", lambda: Allocator(code))
    monkeypatch.setattr(os, "pwrite", lambda *arguments: pytest.fail("wrote"))
    with pytest.raises(OSError, match=r"t\.pt") as raised:
        written(tmp_path / "t.pt", write_300_rows)
    assert raised.value.errno == code


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_a_file_system_that_takes_no_room_beforehand_is_as_good(tmp_path, monkeypatch, code):
    allocator = Allocator(code)
    monkeypatch.setattr(preallocate, "_fallocate", lambda: allocator)
    assert written(tmp_path / "t", write_300_rows)[0] == bits(torch.arange(3000.0))
    assert allocator.calls == [(0, 12_000, 0)]
    monkeypatch.setattr(preallocate, "_fallocate", lambda: None)
    assert written(tmp_path / "t", write_300_rows)[0] == bits(torch.arange(3000.0))


def test_room_is_taken_before_the_first_byte(tmp_path):
    with new_file.new_file(tmp_path / "t") as file:
        file.set_size(5_000_003)
        found = (tmp_path / "t").stat()
    assert found.st_size == 5_000_003
    if not found.st_blocks:
        pytest.skip("this file system takes no room beforehand")
    assert found.st_blocks * 512 >= 5_000_003


def test_the_systems_own_hint_is_taken(tmp_path, small_window):
    content, _ = written(tmp_path / "t", write_300_rows, threads=2)
    assert content == bits(torch.arange(3000.0))


def test_a_refused_advice_is_no_error(tmp_path, monkeypatch, small_window):
    def refuse(*arguments):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert written(tmp_path / "t", write_300_rows)[0] == bits(torch.arange(3000.0))


@pytest.mark.parametrize("kind", WRITERS)
def test_what_the_system_did_not_take_at_once_is_written_too(tmp_path, monkeypatch, kind):
    """It may write a part of what it is given, such as before a disk is full."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:7], offset))
    tensors = {"a": torch.arange(150.0).reshape(30, 5), "b": torch.ones(3, dtype=torch.int8)}
    content, digest = written_as(kind, tmp_path / f"t.{kind}", StateDictSource(tensors), 2)
    check_parts(content, digest, tensors)
    same_bits(LOADERS[kind](tmp_path / f"t.{kind}"), tensors)
