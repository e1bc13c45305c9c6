"""Tensors of which each process of a job has a part: torch's ``DTensor``, as rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import Held, Rows, Shards


def rows_of_dtensor(tensor: DTensor, name: str) -> Rows:
    """The rows of the whole tensor, of which this process can read what it holds.

    Ranges are held of tensors that are cut along their first dimension and along no other, as
    FSDP does. What is cut otherwise is gathered.

    Args:
        tensor: of a mesh of all processes of the job.
        name: of the tensor, for errors.

    Raises:
        ConfigError: if the mesh is of some of the processes only, or the parts are not those that
            torch makes.
    """
    mesh, ranks = tensor.device_mesh, tensor.device_mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(dist.get_world_size())):
        raise ConfigError(
            f"{name}: a DTensor of the ranks {ranks}, but the job has {dist.get_world_size()}; "
            "save it from a job whose mesh has all ranks, or give tensors that are whole"
        )
    local = tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if not tensor.numel():
        return Rows.of(local.new_empty(tensor.shape))
    count = tensor.shape[0] if tensor.dim() else 1
    held = _held(count, tuple(mesh.mesh.shape), tuple(ranks), tuple(tensor.placements))
    if not held:
        return Rows(count, 1, _unreadable, Shards((), lambda: _gathered(tensor, name)))
    rank = dist.get_rank()
    own = next((one for one in held if rank in one.ranks), Held(0, 0, (rank,)))
    shape = (own.stop - own.start, *tensor.shape[1:]) if tensor.dim() else ()
    if local.shape != shape:
        raise ConfigError(
            f"{name}: a DTensor {list(tensor.shape)} with the placements {tensor.placements}, of "
            f"which rank {rank} holds {list(local.shape)} and should hold {list(shape)}: make it "
            "with fully_shard or distribute_tensor, or give a tensor that is whole"
        )

    def read(start: int, stop: int) -> Tensor:
        if start < own.start or stop > own.stop:
            raise RuntimeError(f"{name}: rank {rank} holds {own}, and is asked for {start}:{stop}")
        return local[start - own.start : stop - own.start] if local.dim() else local

    return Rows(count, 1, read, Shards(held, lambda: _gathered(tensor, name)))


@cache
def _held(
    count: int, mesh: tuple[int, ...], ranks: Sequence[int], placements: Sequence[Placement]
) -> tuple[Held, ...]:
    """Which rows every process holds; none if not all of each.

    Args:
        count: number of rows.
        mesh: its shape.
        ranks: of the mesh, in row-major order.
        placements: of the tensor, one for each dimension of the mesh.
    """
    cuts: dict[int, Any] = {
        dim: placement
        for dim, placement in enumerate(placements)
        if mesh[dim] > 1 and not placement.is_replicate()
    }
    plain = [dim for dim, cut in cuts.items() if type(cut) is Shard]
    # FSDP cuts what tensor parallelism has cut before, along a later dimension of the mesh.
    over = [
        dim
        for dim, cut in cuts.items()
        if type(cut).__name__ == "_StridedShard"
        and cut.split_factor == prod(mesh[later] for later in plain if later > dim)
    ]
    if len(plain) + len(over) < len(cuts) or len(over) > 1 or any(c.dim for c in cuts.values()):
        return ()
    held: dict[tuple[int, int], list[int]] = {}
    for place, rank in zip(product(*map(range, mesh)), ranks, strict=True):
        start, length = 0, count
        for dim in plain + over:
            # As torch.chunk cuts: the last parts may be shorter, or empty.
            chunk = -(-length // mesh[dim])
            skipped = min(place[dim] * chunk, length)
            start, length = start + skipped, min(chunk, length - skipped)
        if length:
            held.setdefault((start, start + length), []).append(rank)
    return tuple(Held(*place, tuple(held[place])) for place in sorted(held))


def _unreadable(start: int, stop: int) -> Tensor:
    raise RuntimeError(f"rows {start}:{stop} of a tensor that only all processes together can read")


# The tensor that was gathered last, by its name, while such are kept.
_kept: dict[str, Tensor] | None = None


@contextmanager
def keeping_the_last() -> Iterator[None]:
    """Keeps each tensor that is gathered until the next one, which may be made of the same.

    So the experts that lie in one tensor are not gathered once for each of them.
    """
    global _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = None


def _gathered(tensor: DTensor, name: str) -> Tensor:
    if _kept is None:
        return tensor.full_tensor()
    if name not in _kept:
        _kept.clear()
        _kept[name] = tensor.full_tensor()
    return _kept[name]
