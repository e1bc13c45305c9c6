"""The header of a ``.safetensors`` file, checked.

It is JSON, and what the format allows of it is a grammar of regular expressions, so that a hostile
file makes us use no more memory than it has bytes itself. All that the safetensors library (0.8)
reads is read, except what the format forbids or does not have: a name twice, space before the first
brace, an entry that is no object of just its three fields; and more than 64 dimensions
(https://github.com/huggingface/safetensors#format).
"""

import json
import re
from dataclasses import dataclass
from typing import NoReturn

import torch

from checkpointing.mapping.tensors import TensorMeta

# The names in the format, by dtype.
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_BY_NAME = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_METADATA = "__metadata__"

# Every repetition is possessive: none is ever gone back into, so matching takes linear time.
_SPACE = rb"[ \t\r\n]*+"
_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
_NUMBER = rb"(?:0|[1-9][0-9]{0,18}+)(?![0-9])"


def _grammar(pattern: bytes) -> re.Pattern[bytes]:
    """A pattern in which a space stands for any white space of JSON."""
    return re.compile(pattern.replace(b" ", _SPACE))


_DTYPE = rb'"dtype" : "([A-Z0-9_]*+)"'
_SHAPE = rb'"shape" : \[( (?:%(n)s(?: , %(n)s){0,63}+)?+ )\]' % {b"n": _NUMBER}
_OFFSETS = rb'"data_offsets" : \[ (%(n)s) , (%(n)s) \]' % {b"n": _NUMBER}
_ENTRY = _grammar(rb" (%s) : \{ %s , %s , %s \} ([,}])" % (_STRING, _DTYPE, _SHAPE, _OFFSETS))
_ENTRY_IN_ANY_ORDER = _grammar(
    rb" (%s) : \{(?: (?:%s|%s|%s) (?:,(?! \})|(?=\}))){3}+\} ([,}])"
    % (_STRING, _DTYPE, _SHAPE, _OFFSETS)
)
_METADATA_ENTRY = _grammar(
    rb" (%(s)s) : (null|\{ (?:%(s)s : %(s)s (?:,(?! \})|(?=\})) )*+\}) ([,}])" % {b"s": _STRING}
)
_STRINGS = re.compile(_STRING)
_EMPTY = _grammar(rb"\{ \} ")
_REST = _grammar(rb" ")


class UnsupportedDtypeError(ValueError):
    """A tensor is of a dtype that is not in the table."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a header says.

    Attributes:
        metas: shape and dtype of every tensor, in the order of the names.
        begins: where each tensor's data begins, in bytes from the end of the header.
    """

    metas: dict[str, TensorMeta]
    begins: dict[str, int]


def parse_header(text: bytes, data_bytes: int) -> SafetensorsHeader:
    """Reads a header.

    Args:
        text: the header.
        data_bytes: length of what follows it, which the tensors must fill without gaps.

    Raises:
        ValueError: if it is not what the format says.
        UnsupportedDtypeError: if a tensor is of a dtype that torch, or a model, does not have.
    """
    if not text.startswith(b"{"):
        _refuse(text, 0)
    metas: dict[str, TensorMeta] = {}
    begins: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    # Most tensors of a model are of few kinds.
    kinds: dict[tuple[bytes, bytes], tuple[TensorMeta, int]] = {}
    has_metadata = False
    place, last = (len(text), b"}") if _EMPTY.fullmatch(text) else (1, b",")
    while last == b",":
        entry = _ENTRY.match(text, place) or _ENTRY_IN_ANY_ORDER.match(text, place)
        if entry is None:
            metadata = _METADATA_ENTRY.match(text, place)
            if metadata is None or has_metadata or _decoded(metadata[1]) != _METADATA:
                _refuse(text, place)
            _check_strings(metadata[2])
            has_metadata, place, last = True, metadata.end(), metadata[3]
            continue
        quoted, dtype, shape, first, end, last = entry.groups()
        if dtype is None or shape is None or first is None:
            _refuse(text, place)
        place = entry.end()
        name = _decoded(quoted)
        if name in metas or name == _METADATA:
            raise ValueError(f"its header has {name} twice, or as a tensor")
        kind = kinds.get((dtype, shape))
        if kind is None:
            meta = _meta(name, dtype, shape)
            kind = kinds[dtype, shape] = meta, meta.nbytes
        metas[name], nbytes = kind
        begins[name] = begin = int(first)
        span = begin, int(end)
        if span[1] - begin != nbytes:
            raise ValueError(f"{name} is {kind[0]}, and lies in the bytes {begin} to {span[1]}")
        spans.append(span)
    if not _REST.fullmatch(text, place):
        _refuse(text, place)
    _check_tiling(spans, data_bytes)
    return SafetensorsHeader({name: metas[name] for name in sorted(metas)}, begins)


def _refuse(text: bytes, place: int) -> NoReturn:
    found = text[place : place + 40].decode(errors="replace")
    raise ValueError(f"its header is not as the format says, from byte {place} on: {found!r}")


def _decoded(quoted: bytes) -> str:
    """What a string of JSON stands for."""
    if b"\\" not in quoted:
        return quoted[1:-1].decode()
    text: str = json.loads(quoted)
    # Half of a surrogate pair is no text, which Python lets pass.
    text.encode()
    return text


def _check_strings(text: bytes) -> None:
    text.decode()
    if b"\\" in text:
        for string in _STRINGS.finditer(text):
            _decoded(string[0])


def _meta(name: str, dtype: bytes, shape: bytes) -> TensorMeta:
    if dtype.decode() not in DTYPE_BY_NAME:
        raise UnsupportedDtypeError(f"{name} has dtype {dtype.decode()}")
    sizes = tuple(map(int, shape.split(b","))) if shape.strip() else ()
    if 0 in sizes:
        try:
            torch.empty(0, device="cpu").reshape(sizes)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"{name} has a shape that torch cannot have: {list(sizes)}") from error
    return TensorMeta(sizes, DTYPE_BY_NAME[dtype.decode()])


def _check_tiling(spans: list[tuple[int, int]], data_bytes: int) -> None:
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError(
                f"its tensors overlap or leave a gap: one ends at byte {position} of the data and "
                f"the next begins at byte {begin}"
            )
        position = end
    if position != data_bytes:
        raise ValueError(f"its tensors have {position} bytes, and {data_bytes} follow the header")
