"""Exact, invertible actions on one axis of a linear map, and on tensors that are no linear maps.

An axis op is given the tensor dimension that the axis occupies, so that one op serves a weight
``[out, in]``, a bias ``[out]``, LoRA's ``B [out, r]`` and ``A [r, in]`` and a DoRA magnitude
``[out]`` alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpointing.mapping.model_config import Dims


class AxisOp(ABC):
    """What happens to one axis between the native and a foreign layout."""

    @abstractmethod
    def to_foreign(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        """Carries dimension ``dim`` of a native tensor to the foreign order."""

    @abstractmethod
    def to_native(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        """The exact inverse of :meth:`to_foreign`."""

    @abstractmethod
    def unit(self, dims: Dims) -> int:
        """Along the axis, multiples of this length are carried over by themselves."""


@dataclass(frozen=True)
class Identity(AxisOp):
    """The axis is the same in both layouts."""

    def to_foreign(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return tensor

    def to_native(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return tensor

    def unit(self, dims: Dims) -> int:
        return 1


IDENTITY = Identity()


@dataclass(frozen=True)
class RopeOrder(AxisOp):
    """Order of the rows of a head under rotary position embedding (Su et al. 2021).

    The native decoder rotates neighbouring pairs, as Meta's code does; Hugging Face rotates a
    head's first half against its second. So native row ``2 i + j`` of a head is foreign row
    ``j head_dim / 2 + i``.
    """

    def to_foreign(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return self._swap(tensor, dim, (-1, dims.head_dim // 2, 2))

    def to_native(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return self._swap(tensor, dim, (-1, 2, dims.head_dim // 2))

    def unit(self, dims: Dims) -> int:
        return dims.head_dim

    @staticmethod
    def _swap(tensor: Tensor, dim: int, split: tuple[int, int, int]) -> Tensor:
        split_tensor = tensor.unflatten(dim, split)
        return split_tensor.transpose(dim + 1, dim + 2).reshape(tensor.shape)


class NotRepresentableError(ValueError):
    """The values of a tensor are such that the other layout cannot hold them exactly."""


class Recast(ABC):
    """What happens to a tensor whose dimensions are others in the native and a foreign layout.

    Either direction is exact, or raises :class:`NotRepresentableError`.
    """

    @abstractmethod
    def to_foreign(self, tensor: Tensor, dims: Dims) -> Tensor:
        """Carries a native tensor to the foreign layout."""

    @abstractmethod
    def to_native(self, tensor: Tensor, dims: Dims) -> Tensor:
        """The exact inverse of :meth:`to_foreign`."""


@dataclass(frozen=True)
class TilesByAspectRatio(Recast):
    """Embeddings of the tiles of an image, which is cut into a grid of one of several shapes.

    Natively, as in Meta's code, a tile has its embedding by its row and column, ``[tiles, tiles,
    tokens, width]``. Hugging Face has the tiles of every shape of grid listed, row by row and
    filled up with zeros, ``[1 + shapes, tiles * tokens * width]``; the first list is all zeros, for
    no image (transformers, ``models/mllama``).

    Attributes:
        tiles: the field of ``Dims`` with the largest number of tiles.
        shapes: the field of ``Dims`` with the shapes of grids, each ``(rows, columns)``.
        width: the field of ``Dims`` with the width of an embedding.
    """

    tiles: str
    shapes: str
    width: str

    def to_foreign(self, tensor: Tensor, dims: Dims) -> Tensor:
        foreign = self._listed(tensor, dims)
        if not same_bits(self._placed(foreign, tensor.shape, dims), tensor):
            raise NotRepresentableError(
                "not zero for tiles that no image has, of which Hugging Face keeps nothing; set "
                "them to zero"
            )
        return foreign

    def to_native(self, tensor: Tensor, dims: Dims) -> Tensor:
        tiles, width = getattr(dims, self.tiles), getattr(dims, self.width)
        tokens = tensor.shape[1] // tiles // width
        native = self._placed(tensor, (tiles, tiles, tokens, width), dims)
        if not same_bits(self._listed(native, dims), tensor):
            raise NotRepresentableError(
                "the same tile has other values in images of other shapes, or there are values for "
                "no image, of which the native layout keeps nothing"
            )
        return native

    def _listed(self, native: Tensor, dims: Dims) -> Tensor:
        shapes = getattr(dims, self.shapes)
        lists = native.new_zeros(1 + len(shapes), *native.shape[1:])
        for number, rows, columns in self._grids(dims):
            lists[number, : rows * columns] = native[:rows, :columns].flatten(0, 1)
        return lists.flatten(1)

    def _placed(self, foreign: Tensor, shape: tuple[int, ...], dims: Dims) -> Tensor:
        lists = foreign.unflatten(1, shape[1:])
        native = foreign.new_zeros(shape)
        for number, rows, columns in self._grids(dims):
            grid = lists[number, : rows * columns].unflatten(0, (rows, columns))
            native[:rows, :columns] = grid
        return native

    def _grids(self, dims: Dims) -> Iterator[tuple[int, int, int]]:
        for number, (rows, columns) in enumerate(getattr(dims, self.shapes), start=1):
            yield number, rows, columns


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality in which a zero is not minus zero, and a NaN is itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
