"""What of a whole tensor a process keeps, where each process of a job has a part (``DTensor``)."""

import torch
from torch import Tensor

from checkpointing.errors import ConfigError
from checkpointing.mapping.dtensor_parts import part_at
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
    if not is_dtensor(tensor):
        return tuple(slice(0, length) for length in tensor.shape)
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    sizes = tuple(map(mesh.size, range(mesh.ndim)))
    part = None if place is None else part_at(tensor.shape, sizes, place, tensor.placements)
    held = tuple(local_tensor(tensor).shape)
    if part is None or tuple(each.stop - each.start for each in part) != held:
        raise ConfigError(
            f"{name}: a DTensor {list(tensor.shape)} with the placements {tensor.placements}, of "
            f"which this process has {list(held)}: it is not known what part that is; make it with "
            "fully_shard or distribute_tensor, or give a tensor that is whole"
        )
    return part


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
