"""Our reader of ``.safetensors`` files beside the library's."""

import gc
import json
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.safetensors_file import SafetensorsSource
from checkpointing.storage.safetensors_header import SAFETENSORS_DTYPES
from tests.hostile.mutations import safetensors_files

_FIELDS = {"dtype", "shape", "data_offsets"}
_VALID = save(
    {
        "b.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
        "a": torch.arange(7, dtype=torch.int64),
        'é \\ " \n': torch.ones(2, 0, dtype=torch.bfloat16),
        "c": torch.tensor(1.5, dtype=torch.float16),
    },
    {"format": "pt", "[{": 'a "b"'},
)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def as_bytes(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def library(path):
    """What the library reads: shape, dtype and bytes by name; ``None`` if it refuses something."""
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, RuntimeError, ValueError, OverflowError, KeyError):
        return None
    if any(tensor.dtype not in SAFETENSORS_DTYPES for tensor in tensors.values()):
        return None
    return {name: (t.shape, t.dtype, as_bytes(t)) for name, t in tensors.items()}


def ours(path):
    try:
        source = SafetensorsSource(path)
    except CorruptCheckpointError as error:
        assert path.name in str(error)
        return None
    tensors = {name: source.read(name) for name in source.metas}
    for name, tensor in tensors.items():
        meta = source.metas[name]
        assert (tensor.shape, tensor.dtype) == (torch.Size(meta.shape), meta.dtype)
    return {name: (t.shape, t.dtype, as_bytes(t)) for name, t in tensors.items()}


def forbidden(content):
    """Whether the header is one that the library reads though the format forbids or has it not."""
    text = content[8 : 8 + int.from_bytes(content[:8], "little")]
    twice = []

    def note(pairs):
        names = [name for name, _ in pairs]
        twice.extend(name for name in names if names.count(name) > 1)
        return dict(pairs)

    header = json.loads(text, object_pairs_hook=note)
    header.pop("__metadata__", None)
    return (
        not text.startswith(b"{")
        or bool(twice)
        or any(
            not isinstance(value, dict) or set(value) != _FIELDS or type(value["dtype"]) is not str
            for value in header.values()
        )
    )


def check(path, content):
    path.write_bytes(content)
    found, expected = ours(path), library(path)
    if found is None and expected is not None:
        assert forbidden(content), content
    else:
        assert found == expected


@settings(max_examples=400, deadline=None)
@given(content=safetensors_files(_VALID))
def test_a_damaged_file_is_read_just_where_the_library_reads_it(tmp_path_factory, content):
    check(tmp_path_factory.mktemp("file") / "t.safetensors", content)


spaces = st.text(" \t\r\n", max_size=2)
dtypes = st.sampled_from([*SAFETENSORS_DTYPES.values(), "F8_E8M0", "C64", "U16"])
names = st.text(max_size=4) | st.sampled_from(["a", "b", "__metadata__", "\\", "é", "\ud800"])
sizes = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "I32": 4, "BOOL": 1, "U8": 1, "I8": 1}


@st.composite
def headers(draw):
    """A header that is valid, or nearly so, however it is spelled."""
    space = lambda: draw(spaces)  # noqa: E731
    pieces, end = [], 0
    for _ in range(draw(st.integers(0, 4))):
        name = json.dumps(draw(names), ensure_ascii=draw(st.booleans()))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(dtypes)
        nbytes = torch.Size(shape).numel() * sizes.get(dtype, 1 if "F8" in dtype else 2)
        slip = draw(st.sampled_from([0] * 12 + [1, -1]))
        fields = [
            f'"dtype"{space()}:{space()}"{dtype}"',
            f'"shape"{space()}:{space()}[{f"{space()},".join(map(str, shape))}{space()}]',
            f'"data_offsets":[{space()}{end + slip},{end + slip + nbytes}]',
        ]
        end += nbytes
        order = draw(st.permutations(fields))
        pieces.append(f"{name}{space()}:{{{space()}{','.join(order)}{space()}}}")
    if draw(st.booleans()):
        text = json.dumps(draw(st.dictionaries(st.text(max_size=3), st.text(max_size=5))))
        value = draw(st.sampled_from([text, "null", "{}", "[]", '{"a":1}']))
        pieces.insert(draw(st.integers(0, len(pieces))), f'{space()}"__metadata__":{value}')
    shuffled = draw(st.permutations(pieces))
    text = f"{{{space()}{f'{space()},{space()}'.join(shuffled)}}}{space()}"
    data = draw(st.binary(min_size=end, max_size=end))
    return packed(text.encode(errors="surrogatepass"), data)


def _one(text, data=bytes(4)):
    return packed(text.encode(), data)


@settings(max_examples=400, deadline=None)
@given(content=headers())
@example(content=packed(b"{}"))
@example(content=packed(b"{ } \n"))
@example(content=packed(b" {}"))
@example(content=packed(b"{,}"))
@example(content=packed(b'{"\\u005f_metadata__":{"a":"b"}}'))
@example(content=packed(b'{"__metadata__":{"a":"\\ud800"}}'))
@example(content=packed(b'{"__metadata__":{"a":"b",}}'))
@example(content=packed(b'{"__metadata__":null,"__metadata__":null}'))
@example(content=packed(b'{"a\\q":%s}' % json.dumps(entry([], 0, 4)).encode(), bytes(4)))
@example(content=packed(b'{"a\n":%s}' % json.dumps(entry([], 0, 4)).encode(), bytes(4)))
@example(content=packed(b'{"a\xff":%s}' % json.dumps(entry([], 0, 4)).encode(), bytes(4)))
@example(content=packed({"a": entry([1], 0, 4)}, bytes(8)))
@example(content=packed({"a": entry([1], 0, 4)}, bytes(3)))
@example(content=packed({"a": entry([1], 4, 8)}, bytes(8)))
@example(content=packed({"a": entry([2**63 - 1, 0, 2], 0, 0)}))
@example(content=packed({"a": entry([2**62, 4, 0], 0, 0)}))
@example(content=packed({"a": entry([2**64, 0], 0, 0)}))
@example(content=packed({"a": entry([0, 2**63 - 1], 0, 0), "b": entry([1], 0, 4)}, bytes(4)))
@example(content=packed({"a": entry([1], 0, 4), "b": entry([0], 2, 2)}, bytes(4)))
@example(content=packed({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)))
@example(content=packed({"a": entry([1], 0, 4, "F4")}, bytes(4)))
@example(content=packed({"a": {**entry([1], 0, 4), "x": 1}}, bytes(4)))
@example(content=packed({"a": ["F32", [1], [0, 4]]}, bytes(4)))
@example(content=_one('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b""))
@example(content=_one('{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}'))
@example(content=_one('{"a":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}}'))
@example(content=_one('{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}'))
@example(content=_one('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],}}'))
@example(content=_one('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'))
@example(content=_one('{"a":{"shape":[1],"shape":[1],"data_offsets":[0,4]}}'))
@example(content=_one('{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}'))
@example(content=_one('{"a":{"data_offsets":[0,4],"dtype":"F32","shape":[]}}'))
def test_a_header_is_read_just_where_the_library_reads_it(tmp_path_factory, content):
    check(tmp_path_factory.mktemp("file") / "t.safetensors", content)


@pytest.mark.parametrize("padding", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_data_may_lie_anywhere(tmp_path, padding, dtype):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    name = SAFETENSORS_DTYPES[dtype]
    header = json.dumps({"a": entry([3, 5], 0, tensor.nbytes, name)}).encode() + b" " * padding
    path = tmp_path / "t.safetensors"
    path.write_bytes(packed(header, as_bytes(tensor)))
    found = SafetensorsSource(path).read("a")
    assert found.data_ptr() % dtype.itemsize == 0
    assert torch.equal(found, tensor)
    assert torch.equal(found.float() @ found.float().T, tensor.float() @ tensor.float().T)


def test_what_is_written_into_a_tensor_reaches_neither_the_file_nor_its_other_readers(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(_VALID)
    first, second = (SafetensorsSource(path).read("b.weight") for _ in range(2))
    before = second.clone()
    first.fill_(7)
    assert torch.equal(second, before)
    assert path.read_bytes() == _VALID


def test_a_tensor_outlives_its_source_and_the_name_of_its_file(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(_VALID)
    tensor = SafetensorsSource(path).read("a")
    path.unlink()
    gc.collect()
    assert tensor.tolist() == list(range(7))


def test_a_tensor_saved_by_torch_takes_no_neighbours_along(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(save({"a": torch.ones(3), "b": torch.ones(50_000)}))
    torch.save(SafetensorsSource(path).read("a"), tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 5000


def test_rows_are_those_of_the_tensor(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(_VALID)
    source = SafetensorsSource(path)
    rows = source.rows("b.weight")
    assert (rows.count, rows.unit) == (3, 1)
    assert torch.equal(rows.read(1, 3), source.read("b.weight")[1:])
    assert source.rows("c").read(0, 1).item() == 1.5


@pytest.mark.parametrize("dtype", ["F8_E8M0", "C64", "F4", "U16"])
def test_a_dtype_of_no_model_is_named(tmp_path, dtype):
    path = tmp_path / "t.safetensors"
    path.write_bytes(packed({"my.weight": entry([2], 0, 4, dtype)}, bytes(4)))
    with pytest.raises(CorruptCheckpointError, match=rf"my\.weight has dtype {dtype}.*convert it"):
        SafetensorsSource(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no header"),
        (struct.pack("<Q", 100_000_001) + b"{}", "100000001 bytes"),
        (packed(b'{"a": 5}'), "from byte 1 on"),
        (packed({"w": entry([3], 0, 8)}, bytes(8)), r"w is \[3\] float32.*bytes 0 to 8"),
        (packed({"w": entry([3], 0, 12)}, bytes(8)), "12 bytes, and 8 follow"),
        (packed({"w": entry([3], 4, 16)}, bytes(16)), "overlap or leave a gap"),
        (packed(b'{"w":%s,"w":%s}' % ((json.dumps(entry([1], 0, 4)).encode(),) * 2)), "w twice"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, said):
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=rf"t\.safetensors .*{said}.* get it anew"):
        SafetensorsSource(path)


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin"])
def test_a_limit_on_memory_is_told_as_such_and_not_as_damage(tmp_path, name):
    """A map counts by its size; a file with a hole has one, and takes no room."""
    path, tensors = tmp_path / name, {"w": torch.zeros(3 << 20)}
    save_file(tensors, path) if name.endswith("safetensors") else torch.save(tensors, path)
    code = f"""
import resource
from pathlib import Path
from checkpointing.storage.read import open_tensor_file
open_tensor_file  # with all that it imports
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), -1))
try:
    open_tensor_file(Path({str(path)!r}))
except MemoryError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith(f"OutOfMemoryError {path}"), done.stderr
    assert "cannot be mapped" in done.stdout and "ulimit" in done.stdout
