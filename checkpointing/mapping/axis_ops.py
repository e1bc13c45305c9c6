"""Exact, invertible actions on one axis of a linear map.

An action is given the tensor dimension that the axis occupies, so that one action serves a weight
``[out, in]``, a bias ``[out]``, LoRA's ``B [out, r]`` and ``A [r, in]`` and a DoRA magnitude
``[out]`` alike.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Identity(AxisOp):
    """The axis is the same in both layouts."""

    def to_foreign(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return tensor

    def to_native(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return tensor


IDENTITY = Identity()


@dataclass(frozen=True)
class RopeOrder(AxisOp):
    """Order of the rows of a head under rotary position embedding (Su et al. 2021).

    The native decoder rotates neighbouring pairs, as Meta's code does; Hugging Face rotates a
    head's first half against its second. So native row ``2 i + j`` of a head is foreign row
    ``j head_dim / 2 + i``.

    Attributes:
        heads: the field of ``Dims`` that counts the heads along the axis.
    """

    heads: str

    def to_foreign(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return self._swap(tensor, dim, (getattr(dims, self.heads), dims.head_dim // 2, 2))

    def to_native(self, tensor: Tensor, dim: int, dims: Dims) -> Tensor:
        return self._swap(tensor, dim, (getattr(dims, self.heads), 2, dims.head_dim // 2))

    @staticmethod
    def _swap(tensor: Tensor, dim: int, split: tuple[int, int, int]) -> Tensor:
        split_tensor = tensor.unflatten(dim, split)
        return split_tensor.transpose(dim + 1, dim + 2).reshape(tensor.shape)
