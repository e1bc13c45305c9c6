"""Ways in which a valid file is made invalid."""

import io
import json
import math
import struct
import zipfile
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_NAMES = [
    "",
    "x",
    "..",
    "../secret.safetensors",
    "../secret.json",
    "/etc/passwd",
    "a\x00b",
    "\x1b[31mred\x1b]0;title\x07",
    "two\nlines",
    "\u202egnp.exe",
    "\ud800",
    "x" * 5000,
    "model.safetensors",
    "all-linear",
    "(a+)+$",
    "[",
    "llama",
    "qwen2_moe",
    "gemma2",
    "layers.0." * 40,
]
_NUMBERS = [
    *(0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *(2**31, 2**53, 2**63, 2**64, -(2**63), 10**6, 10**400),
]
SCALARS = st.sampled_from([None, True, False, *_NUMBERS, *_NAMES])
VALUES = SCALARS | st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
# Beyond what its reader can follow.
_NESTED = [b"[" * 200_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value something can be put."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += _places(value[key], (*path, key))
    elif isinstance(value, list):
        for number in range(min(len(value), 3)):
            found += _places(value[number], (*path, number))
    return found


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def json_values(draw: st.DrawFn, valid: dict[str, Any], extra_keys: tuple[str, ...] = ()) -> Any:
    """A JSON object of which one to three fields are others than they should be.

    Args:
        valid: the object.
        extra_keys: fields that it does not have, and that its reader looks at.
    """
    value = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["set", "set", "set", "remove", "add", "rename", "copy"]))
        places = _places(value)
        if kind == "add" or not places:
            keys = (*extra_keys, *_NAMES) if extra_keys else _NAMES
            value[draw(st.sampled_from(keys))] = draw(VALUES)
            continue
        *where, key = draw(st.sampled_from(places))
        parent = _at(value, tuple(where))
        if kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(_NAMES))] = parent.pop(key)
        elif kind == "copy":
            other = _at(value, draw(st.sampled_from(places)))
            parent[key] = json.loads(json.dumps(other))
        else:
            parent[key] = draw(VALUES)
    return value


@st.composite
def json_files(draw: st.DrawFn, valid: dict[str, Any], extra_keys: tuple[str, ...] = ()) -> bytes:
    """The bytes of a JSON file that is not as it should be, in its text or in its content."""
    kind = draw(st.sampled_from(["content"] * 8 + ["bytes", "bytes", "twice", "nested", "other"]))
    if kind == "content":
        return json.dumps(draw(json_values(valid, extra_keys))).encode()
    text = json.dumps(valid).encode()
    if kind == "bytes":
        return draw(damaged(text))
    if kind == "twice":
        other = json.dumps(draw(json_values(valid, extra_keys))).encode()
        return text[:-1] + b"," + other[1:] if len(other) > 2 else text
    if kind == "nested":
        return draw(st.sampled_from(_NESTED)) + draw(st.sampled_from([b"", text]))
    whole = [b"", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf" + text, b"NaN", b"1" * 5000, text * 2]
    return draw(st.sampled_from(whole) | VALUES.map(lambda value: json.dumps(value).encode()))


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of which some are changed, missing, inserted, or stand twice."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)) | st.integers(0, min(len(data), 400)))
        kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "insert", "remove", "repeat"]))
        if kind == "flip" and place < len(data):
            data[place] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=12))
        elif kind == "remove":
            del data[place : place + draw(st.integers(1, 40))]
        else:
            data[place:place] = data[place : place + draw(st.integers(1, 40))]
    return bytes(data)


def safetensors_parts(valid: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
    (length,) = struct.unpack("<Q", valid[:8])
    return json.loads(valid[8 : 8 + length]), valid[8 + length :]


_DTYPES = ["F32", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "X", "f32"]
_OFFSETS = st.lists(
    st.sampled_from([0, 4, 8, 400, 2**31, 2**50, 2**63, 2**64 - 1, -1, -8, 1.5, None, "0"]),
    max_size=3,
)
_SHAPES = st.lists(
    st.sampled_from([0, 1, 2, 10, 2**20, 2**32, 2**62, 2**64 - 1, 2**64, -1, 1.5, None]), max_size=5
)


@st.composite
def safetensors_files(draw: st.DrawFn, valid: bytes) -> bytes:
    """A safetensors file whose header lies."""
    header, data = safetensors_parts(valid)
    kind = draw(st.sampled_from(["field", "field", "field", "json", "length", "bytes", "data"]))
    if kind == "bytes":
        return draw(damaged(valid))
    if kind == "field":
        for _ in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from(sorted(header)))
            entry = header[name]
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "other"]))
            if field == "name":
                header[draw(st.sampled_from(_NAMES + sorted(header)))] = header.pop(name)
            elif field == "other":
                header[name] = draw(VALUES)
            elif isinstance(entry, dict):
                choice = {
                    "dtype": st.sampled_from(_DTYPES),
                    "shape": _SHAPES,
                    "data_offsets": _OFFSETS,
                }
                entry[field] = draw(choice[field] | VALUES)
    text = json.dumps(header).encode()
    if kind == "json":
        text = draw(json_files(header))
    length = len(text)
    if kind == "length":
        lengths = [0, 1, 2, length - 1, length + 1, length + 8, 10**8, 10**8 + 1, 2**62, 2**64 - 1]
        length = draw(st.sampled_from(lengths))
    if kind == "data":
        data = data[: draw(st.integers(0, len(data)))]
    return struct.pack("<Q", length) + text + data


def repacked(valid: bytes, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A file of ``torch.save`` with other contents of some records, by the ends of their names."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(valid)) as old,
        zipfile.ZipFile(result, "w", method) as new,
    ):
        for info in old.infolist():
            end = info.filename.split("/", 1)[1]
            new.writestr(info.filename, records.get(end, old.read(info)))
    return result.getvalue()


@st.composite
def torch_files(draw: st.DrawFn, valid: bytes) -> bytes:
    """A file of ``torch.save`` that is damaged, or whose pickle lies."""
    kind = draw(st.sampled_from(["bytes", "bytes", "pickle", "pickle", "pickle", "record"]))
    if kind == "bytes":
        return draw(damaged(valid))
    with zipfile.ZipFile(io.BytesIO(valid)) as archive:
        names = [info.filename.split("/", 1)[1] for info in archive.infolist()]
        prefix = archive.namelist()[0].split("/", 1)[0]
        pickle = archive.read(f"{prefix}/data.pkl")
    if kind == "record":
        name = draw(st.sampled_from(names))
        return repacked(valid, {name: draw(st.binary(max_size=40))})
    return repacked(valid, {"data.pkl": draw(damaged_pickles(pickle))})


@st.composite
def damaged_pickles(draw: st.DrawFn, valid: bytes) -> bytes:
    """A pickle that is damaged, or in which numbers are others."""
    if draw(st.booleans()):
        return draw(damaged(valid))
    # Numbers of one and two bytes: sizes, strides, offsets.
    places = [i for i in range(len(valid) - 1) if valid[i : i + 1] in (b"K", b"M")]
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.sampled_from(places)) + 1] = draw(st.integers(0, 255))
    return bytes(data)


def any_of(*strategies: SearchStrategy) -> SearchStrategy:
    """One of several strategies, each as often as the others."""
    return st.one_of(*strategies)
