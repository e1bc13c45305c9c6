"""Tensors of which each process of a job has a part: torch's ``DTensor``, as rows."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from checkpointing.errors import ConfigError
from checkpointing.mapping.dtensor_parts import is_strided, part_at
from checkpointing.mapping.tensors import Held, Rows, Shards, Teams

WaitFor = Callable[[Callable[[], Tensor]], Tensor]
"""Gives what a function returns that ends only when other processes do their part in it."""


def rows_of_dtensor(tensor: DTensor, name: str) -> Rows:
    """The rows of the whole tensor, of which this process can read what it holds.

    Ranges are held of tensors that are cut along their first dimension and along no other, as
    FSDP does. What is cut otherwise is gathered; of what is cut along another dimension too, as
    FSDP cuts what tensor parallelism has cut along the columns, only by those that share rows.

    Args:
        tensor: of a mesh of all processes of the job.
        name: of the tensor, for errors.

    Raises:
        ConfigError: if the mesh is of some of the processes only, or the parts are no plain tensors
            or not those that torch makes.
    """
    mesh, ranks = tensor.device_mesh, tensor.device_mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(dist.get_world_size())):
        raise ConfigError(
            f"{name}: a DTensor of the ranks {ranks}, but the job has {dist.get_world_size()}; "
            "save it from a job whose mesh has all ranks, or give tensors that are whole"
        )
    local = local_part(tensor)
    if type(local) not in (Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"{name}: a DTensor whose parts are {type(local).__name__}s, which are not saved from "
            "several processes; use plain tensors, such as those of torch.optim's optimizers"
        )
    if not tensor.numel():
        return Rows.of(local.new_empty(tensor.shape))
    count = tensor.shape[0] if tensor.dim() else 1
    gathered = _gathered_rows(tensor, local, name)
    held = _held(count, tuple(mesh.mesh.shape), tuple(ranks), tuple(tensor.placements))
    if not held:
        return Rows(count, 1, _unreadable, Shards((), gathered, _teams(tensor, local, name)))
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

    return Rows(count, 1, read, Shards(held, gathered, _teams(tensor, local, name)))


def local_part(tensor: DTensor) -> Tensor:
    """What this process has of a tensor; it is waited for if it is being computed."""
    local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


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
    if any(mesh[along] > 1 and getattr(cut, "dim", 0) for along, cut in enumerate(placements)):
        return ()
    held: dict[tuple[int, int], list[int]] = {}
    for place, rank in zip(product(*map(range, mesh)), ranks, strict=True):
        part = part_at((count,), mesh, place, placements)
        if part is None:
            return ()
        (rows,) = part
        if rows.start < rows.stop:
            held.setdefault((rows.start, rows.stop), []).append(rank)
    return tuple(Held(*place, tuple(held[place])) for place in sorted(held))


def _teams(tensor: DTensor, local: Tensor, name: str) -> Teams | None:
    """How those read rows together that no other processes have; ``None`` if that takes all.

    Where tensor parallelism has cut the columns, those who have columns of the same rows; where it
    has cut the rows before FSDP did, those among whom FSDP has divided one part.

    Args:
        tensor: the whole.
        local: the part of this process.
        name: of the tensor, for errors.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    cuts = {dim: cut for dim, cut in enumerate(placements) if mesh.shape[dim] > 1}
    by_column = [dim for dim, cut in cuts.items() if type(cut) is Shard and cut.dim > 0]
    over = [dim for dim, cut in cuts.items() if is_strided(cut)]
    if len(by_column) + len(over) != 1 or mesh.mesh_dim_names is None:
        return None
    (across,) = by_column or over
    others = tuple(Replicate() if dim == across else cut for dim, cut in enumerate(placements))
    ranks = tuple(mesh.mesh.flatten().tolist())
    held = _held(tensor.shape[0], tuple(mesh.mesh.shape), ranks, others)
    if len(held) < 2:
        return None
    rank = dist.get_rank()
    own = next((one for one in held if rank in one.ranks), Held(0, 0, (rank,)))

    def gather(start: int, stop: int) -> Tensor:
        if start < own.start or stop > own.stop:
            raise RuntimeError(f"{name}: rank {rank} shares {own}, and is asked for {start}:{stop}")
        team = _mesh.get()(mesh)
        assert team.mesh_dim_names is not None  # or it would be another mesh
        some = local[start - own.start : stop - own.start] if by_column else local
        cut = placements[across] if by_column else Shard(0)
        shape = (stop - start, *tensor.shape[1:])
        part = _placed(some, team[team.mesh_dim_names[across]], (cut,), shape)
        return _once((name, start, stop), lambda: _wait_for.get()(part.full_tensor))

    # Parts of rows can be gathered by ranges, and rows that are cut only all at once.
    unit = 1 if by_column else held[0].stop
    return Teams(held, Rows(tensor.shape[0], unit, gather))


def _unreadable(start: int, stop: int) -> Tensor:
    raise RuntimeError(f"rows {start}:{stop} of a tensor that only all processes together can read")


def _gathered_rows(tensor: DTensor, local: Tensor, name: str) -> Rows:
    """The tensor as all processes read it together: in ranges, unless the rows are cut.

    Args:
        tensor: the whole.
        local: the part of this process.
        name: of the tensor.
    """

    def gather(start: int, stop: int) -> Tensor:
        shape = (stop - start, *tensor.shape[1:])
        return _once((name, start, stop), lambda: _gathered(tensor, local[start:stop], shape))

    shape = tuple(tensor.shape)
    if not shape or any(getattr(cut, "dim", None) == 0 for cut in tensor.placements):
        return Rows.whole(shape, lambda: _once((name,), lambda: _gathered(tensor, local, shape)))
    return Rows(shape[0], 1, gather)


def _gathered(tensor: DTensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The whole, of that shape, of parts that lie in the processes as those of a tensor do."""
    part = like(tensor, local, _mesh.get()(tensor.device_mesh), shape)
    return _wait_for.get()(part.full_tensor)


def like(tensor: DTensor, local: Tensor, mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensor:
    """A tensor that is cut as another one is.

    Args:
        tensor: the other one.
        local: the part of this process.
        mesh: of the processes; as large as that of the other one.
        shape: of the whole.
    """
    return _placed(local, mesh, tensor.placements, shape)


def _placed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=stride)


# What to gather over, given a tensor's own mesh; and what waits until a tensor is gathered.
_mesh: ContextVar[Callable[[DeviceMesh], DeviceMesh]] = ContextVar("mesh", default=lambda own: own)
_wait_for: ContextVar[WaitFor] = ContextVar("wait_for", default=lambda gather: gather())


@contextmanager
def gathering_over(mesh: Callable[[DeviceMesh], DeviceMesh]) -> Iterator[None]:
    """Gathers over other meshes than the tensors' own, which other threads use meanwhile.

    Args:
        mesh: gives one with the same processes in the same places.
    """
    before = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(before)


@contextmanager
def gathering_by(wait_for: WaitFor) -> Iterator[None]:
    """Waits for each tensor that is gathered in a way that notices if another process is gone."""
    before = _wait_for.set(wait_for)
    try:
        yield
    finally:
        _wait_for.reset(before)


def mesh_apart(mesh: DeviceMesh) -> DeviceMesh:
    """The same processes in the same places, which talk to each other over groups of their own.

    Every process must call it at the same time. It is a mesh for tensors on the CPU.
    """
    places = mesh.mesh.cpu()
    groups = []
    for dim in range(places.dim()):
        along = places.movedim(dim, -1).reshape(-1, places.shape[dim]).tolist()
        groups.append(dist.new_subgroups_by_enumeration(along, backend="gloo")[0])
    # By these names torch, which keeps what it has found out about meshes, tells it from others.
    names = tuple(f"apart_{dim}" for dim in range(places.dim()))
    return DeviceMesh.from_group(groups, "cpu", places, mesh_dim_names=names)


# What was gathered last, by the tensor's name and the range, while such are kept.
_kept: ContextVar[dict[Hashable, Tensor] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping_the_last() -> Iterator[None]:
    """Keeps what is gathered until the next is, which may be made of the same.

    So the experts that lie in one tensor are not gathered once for each of them.
    """
    before = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(before)


def _once(key: Hashable, gather: Callable[[], Tensor]) -> Tensor:
    kept = _kept.get()
    if kept is None:
        return gather()
    if key not in kept:
        kept.clear()
        kept[key] = gather()
    return kept[key]
