"""What of a whole tensor a process keeps, where each process of a job has a part (``DTensor``)."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import is_dtensor


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, sharing its memory; all of one that is no ``DTensor``."""
    detached = tensor.detach()
    return detached.to_local() if is_dtensor(detached) else detached


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; all processes that have a part of it must ask for it together."""
    detached = tensor.detach()
    return detached.full_tensor() if is_dtensor(detached) else detached


def part_held(tensor: Tensor, name: str) -> tuple[slice, ...]:
    """Which range of each dimension of the whole tensor this process has; nothing is sent.

    Args:
        tensor: plain, or cut as torch does: along a dimension in chunks, or after that by FSDP2
            along the same dimension again.
        name: of the tensor, for the error.

    Raises:
        ConfigError: if the part that is there is not the one that torch would make.
    """
    starts, lengths = [0] * tensor.dim(), list(tensor.shape)
    if is_dtensor(tensor):
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        cuts: list[tuple[int, Any]] = [
            (along, cut) for along, cut in enumerate(tensor.placements) if not cut.is_replicate()
        ]
        # FSDP cuts what tensor parallelism has cut before, along a later dimension of the mesh.
        for along, cut in sorted(cuts, key=lambda each: _is_strided(each[1])):
            dim = getattr(cut, "dim", None)
            before = [mesh.size(a) for a, c in cuts if a > along and getattr(c, "dim", None) == dim]
            strides = _is_strided(cut) and cut.split_factor != prod(before)
            if dim is None or place is None or strides:
                raise _unknown(tensor, name)
            # As torch.chunk cuts: the last parts may be shorter, or empty.
            chunk = -(-lengths[dim] // mesh.size(along))
            skipped = min(place[along] * chunk, lengths[dim])
            starts[dim] += skipped
            lengths[dim] = min(chunk, lengths[dim] - skipped)
        if tuple(lengths) != tuple(local_tensor(tensor).shape):
            raise _unknown(tensor, name)
    ranges = zip(starts, lengths, strict=True)
    return tuple(slice(start, start + length) for start, length in ranges)


def copy_part(target: Tensor, whole: Tensor, name: str) -> None:
    """Overwrites what this process has of a tensor with that part of a whole one.

    Args:
        target: plain, or a ``DTensor``.
        whole: of the target's whole shape, on any device and of any floating point dtype.
        name: of the tensor, for the error.

    Raises:
        ConfigError: as :func:`part_held`.
    """
    with torch.no_grad():
        local_tensor(target).copy_(whole[part_held(target, name)])


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _unknown(tensor: Any, name: str) -> ConfigError:
    return ConfigError(
        f"{name}: a DTensor {list(tensor.shape)} with the placements {tensor.placements}, of which "
        f"this process has {list(tensor.to_local().shape)}: it is not known what part that is; "
        "make it with fully_shard or distribute_tensor, or give a tensor that is whole"
    )
