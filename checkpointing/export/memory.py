"""Memory for the tensors of a stream."""

import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpointing.mapping.tensors import TensorMeta

# Smaller ones come fast from the allocator.
_LEAST = 1 << 20
_OPTIONS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Memory:
    """Memory for tensors, each its own; what nobody holds a tensor in any more is given again.

    The system clears every page of new memory, which takes as long as computing what comes into it.

    Args:
        device: of the tensors.
        most: bytes that are kept for tensors to come.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        self._most = most
        self._maps: list[mmap.mmap] = []

    def empty(self, meta: TensorMeta) -> Tensor:
        """A tensor with any values."""
        if self._device.type != "cpu" or not _LEAST <= meta.nbytes <= self._most:
            return torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        return torch.frombuffer(self._free(meta.nbytes), dtype=meta.dtype).view(meta.shape)

    def _free(self, nbytes: int) -> mmap.mmap:
        # Without a name for what is looked at, which would be one more holder.
        for index in range(len(self._maps)):
            if len(self._maps[index]) == nbytes and _holders(self._maps, index) == _NOBODY:
                return self._maps[index]
        self._forget(nbytes)
        self._maps.append(mmap.mmap(-1, nbytes, **_OPTIONS))
        return self._maps[-1]

    def _forget(self, nbytes: int) -> None:
        """Lets go of what is kept, so that with so many bytes more it is not too much."""
        while self._maps and sum(map(len, self._maps)) + nbytes > self._most:
            self._maps.pop(0)


def _holders(maps: Sequence[object], index: int) -> int:
    # A tensor's storage holds the object that its memory is of, whatever views of it there are.
    return sys.getrefcount(maps[index])


_NOBODY = _holders([object()], 0)
