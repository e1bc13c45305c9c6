"""Megatron's distributed checkpoints, which all ranks write together.

They are those of ``torch.distributed.checkpoint``: a pickle that tells of every tensor in which
pieces it lies, and files in which each piece is a file of ``torch.save`` by itself. Megatron stacks
the layers of a model, and the experts of a layer, along dimensions in front, if they are all alike
(Megatron-LM, ``megatron/core/transformer/transformer_block.py``, ``moe/experts.py``, ``mlp.py``).
Nothing is imported or called that a file names.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from checkpointing.errors import CheckpointingError, CorruptCheckpointError
from checkpointing.formats.inert_pickle import StoredTensor, read_inert, read_inert_pickle
from checkpointing.formats.megatron_names import plain_name
from checkpointing.formats.stored_tensors import stored_tensors
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta
from checkpointing.storage.paths import inside, refuse_link_outside

METADATA_NAME = ".metadata"
_MODEL = ("decoder.", "embedding.", "output_layer.")
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.experts\.(?:(\d{1,9})\.)?(linear_fc[12]\..+)")
_HALVES = ("_w", "_v")
_VECTOR = re.compile(r"\.(?:bias|weight_magnitude)(?:_[wv])?$")
# As long as the pickle of a model of a million pieces.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class _Piece:
    """A part of a stored tensor: where it begins in that, its shape, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class _Stored:
    """A tensor as it is stored, perhaps of all layers and experts."""

    meta: TensorMeta
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class _Place:
    """Which tensor of one layer or expert: numbers along the first dimensions of a stored one."""

    stored: _Stored
    numbers: tuple[int, ...]

    @property
    def meta(self) -> TensorMeta:
        """Shape and dtype."""
        return TensorMeta(self.stored.meta.shape[len(self.numbers) :], self.stored.meta.dtype)

    def rows(self, name: str) -> Rows:
        """Its data."""
        count = len(self.numbers)
        own = [
            piece
            for piece in self.stored.pieces
            if all(
                start <= number < start + size
                for number, start, size in zip(
                    self.numbers, piece.offsets[:count], piece.sizes[:count], strict=True
                )
            )
        ]
        by_row: dict[int, list[_Piece]] = {}
        for piece in sorted(own, key=lambda piece: piece.offsets):
            by_row.setdefault((*piece.offsets[count:], 0)[0], []).append(piece)
        strips = []
        for pieces in by_row.values():
            parts = [self._read(piece, name) for piece in pieces]
            strips.append(parts[0] if len(parts) == 1 else Rows.side_by_side(parts, 1))
        return strips[0] if len(strips) == 1 else Rows.concatenated(strips)

    def _read(self, piece: _Piece, name: str) -> Rows:
        stored = _open_piece(piece, self.stored.meta.dtype)
        for number, start in zip(self.numbers, piece.offsets, strict=False):
            stored = _select(stored, number - start)
        return stored_tensors(piece.path, {name: stored}).rows(name)


def _select(stored: StoredTensor, number: int) -> StoredTensor:
    """One of the tensors that are stacked along the first dimension."""
    first = stored.first + number * stored.stride[0]
    return StoredTensor(
        stored.dtype, stored.shape[1:], stored.stride[1:], stored.offset, stored.nbytes, first
    )


def _open_piece(piece: _Piece, dtype: torch.dtype) -> StoredTensor:
    try:
        with piece.path.open("rb") as file:
            window = _Window(file, piece.start, piece.length)
            stored = read_inert(io.BufferedReader(window), piece.length, piece.start)
        if not isinstance(stored, StoredTensor):
            raise ValueError("a piece in it is no tensor")
        if (stored.shape, stored.dtype) != (piece.sizes, dtype):
            raise ValueError(f"a piece in it is {list(stored.shape)}, not {list(piece.sizes)}")
    except Exception as error:
        raise CorruptCheckpointError(
            f"{piece.path}: cannot be read ({error}); get it anew"
        ) from error
    return stored


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, self._length)[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(self._length - self._at, 0)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def distributed_names(metadata: Path) -> list[str]:
    """Names of the model's tensors in a distributed checkpoint, by layers and experts.

    Raises:
        CorruptCheckpointError: if the file that describes it cannot be read.
        UnsafePathError: if it is a link to a file elsewhere, or names one.
    """
    return list(_places(metadata, _stored(metadata)))


def open_distributed(metadata: Path) -> tuple[LazyTensors, tuple[TensorMeta, ...]]:
    """The model in a distributed checkpoint.

    Returns:
        Its whole tensors by the rules' names, and shape and dtype of each tensor as it is stored.

    Raises:
        CorruptCheckpointError: if a file cannot be read.
        UnsafePathError: if one is a link to a file elsewhere, or named outside the directory.
    """
    stored = _stored(metadata)
    metas: dict[str, TensorMeta] = {}
    rows = {}
    for name, places in _places(metadata, stored).items():
        meta = places[0].meta
        if len(places) > 1:
            length = sum(place.meta.shape[0] for place in places)
            meta = TensorMeta((length, *meta.shape[1:]), meta.dtype)
        metas[name], rows[name] = meta, partial(_rows, places, name)
    return LazyTensors(metas, rows), tuple(one.meta for one in stored.values())


def _rows(places: Sequence[_Place], name: str) -> Rows:
    parts = [place.rows(name) for place in places]
    return parts[0] if len(parts) == 1 else Rows.concatenated(parts)


def _places(metadata: Path, stored: Mapping[str, _Stored]) -> dict[str, list[_Place]]:
    """By the rules' names, what each tensor of a model is made of: one tensor, or two halves."""
    found: dict[str, dict[str, _Place]] = {}
    for key, one in stored.items():
        for name, numbers in _unstacked(key, one.meta.shape):
            half = name[-2:] if name.endswith(_HALVES) else ""
            plain = plain_name(name.removesuffix(half))
            if plain is None:
                continue
            parts = found.setdefault(plain, {})
            if half in parts or (parts and "" in (*parts, half)):
                raise CorruptCheckpointError(f"{metadata}: has {plain} twice; get it anew")
            parts[half] = _Place(one, numbers)
    # Gate before up, and "_w" before "_v".
    return {
        name: [parts[half] for half in ("", *_HALVES) if half in parts]
        for name, parts in found.items()
    }


def _unstacked(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names of single layers' and experts' tensors in a stored one, and where they are."""
    layered = _STACKED_LAYERS.match(key) is not None
    experts = _EXPERTS.fullmatch(key)
    own = 1 if _VECTOR.search(key) else 2
    stacked = experts is not None and experts[2] is None and len(shape) == layered + 1 + own
    for numbers in product(*map(range, shape[: layered + stacked])):
        name = key
        if experts is not None and (stacked or experts[2] is not None):
            number = numbers[-1] if stacked else experts[2]
            name = f"{experts[1]}.local_experts.{number}.{experts[3]}"
        elif experts is not None:
            # An adapter of grouped experts is one for all of them.
            name = f"{experts[1]}.{experts[3]}"
        if layered:
            name = name.replace("decoder.layers.", f"decoder.layers.{numbers[0]}.", 1)
        yield name, numbers


def _stored(metadata: Path) -> dict[str, _Stored]:
    """Every tensor of the model, with its pieces checked to be there and to make it up."""
    refuse_link_outside(metadata)
    try:
        if metadata.stat().st_size > _MOST_BYTES:
            raise ValueError("it is far larger than any of its kind")
        content = read_inert_pickle(metadata.read_bytes())
        infos = {
            (index.state["fqn"], tuple(index.state["offset"])): info.state
            for index, info in content.state["storage_data"].items()
            if index.state.get("offset") is not None
        }
        return {
            key: _tensor(metadata, key, value.state, infos)
            for key, value in content.state["state_dict_metadata"].items()
            if key.startswith(_MODEL) and "chunks" in (value.state or {})
        }
    except CheckpointingError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{metadata}: cannot be read ({type(error).__name__}: {error}); it must describe a "
            "checkpoint of torch.distributed.checkpoint: get it anew"
        ) from error


def _tensor(
    metadata: Path, key: str, state: Mapping[str, Any], infos: Mapping[Any, Mapping[str, Any]]
) -> _Stored:
    shape = _whole(state["size"])
    properties: Any = state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has no dtype")
    pieces = []
    for chunk in state["chunks"]:
        offsets, sizes = _whole(chunk.state["offsets"]), _whole(chunk.state["sizes"])
        info = infos[key, offsets]
        if info.get("transform_descriptors"):
            raise ValueError(f"{key} is stored compressed")
        path = inside(metadata.parent, info["relative_path"], metadata)
        refuse_link_outside(path)
        (start, length), needed = _whole((info["offset"], info["length"])), prod(sizes)
        end = [a + b for a, b in zip(offsets, sizes, strict=True)]
        if not needed or any(a > b for a, b in zip(end, shape, strict=True)):
            raise ValueError(f"{key} has a piece that lies outside it")
        if needed * dtype.itemsize > length or start + length > path.stat().st_size:
            raise ValueError(f"{path.name} does not hold all of {key}")
        pieces.append(_Piece(offsets, sizes, path, start, length))
    _check_grid(key, shape, pieces)
    return _Stored(TensorMeta(shape, dtype), tuple(pieces))


def _check_grid(key: str, shape: tuple[int, ...], pieces: Sequence[_Piece]) -> None:
    """Checks that the pieces are those of a grid, and together the tensor."""
    if len({piece.offsets for piece in pieces}) != len(pieces):
        raise ValueError(f"{key} has a piece twice")
    for dim, length in enumerate(shape):
        ends = dict(sorted({piece.offsets[dim]: piece.sizes[dim] for piece in pieces}.items()))
        at = 0
        for start, size in ends.items():
            if start != at:
                raise ValueError(f"{key} has a gap, or pieces that overlap")
            at += size
        if at != length:
            raise ValueError(f"{key} is not whole")
        if any(ends[piece.offsets[dim]] != piece.sizes[dim] for piece in pieces):
            raise ValueError(f"{key} has pieces that overlap")
    if sum(prod(piece.sizes) for piece in pieces) != prod(shape):
        raise ValueError(f"{key} is not whole")


def _whole(numbers: Any) -> tuple[int, ...]:
    """Whole numbers that are not negative, checked to be that."""
    checked = tuple(numbers)
    if any(type(number) is not int or number < 0 for number in checked):
        raise ValueError("it has a shape that is none")
    return checked
