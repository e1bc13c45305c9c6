"""The processes of a job beside their training: over groups that only saves use."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from checkpointing.adapters.lora import MergedStateDict
from checkpointing.mapping.tensors import LazyTensors, StateDictSource, is_dtensor
from checkpointing.save_plan import MODEL_KEY
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.tensor_bytes import named_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class ProcessesApart:
    """All processes of a job, which can talk to each other in a thread beside training.

    Every process must make one at the same time, and add the same meshes to it.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def ranks(self) -> Ranks:
        """The processes, for one save."""
        return Ranks(self._group)

    def add_meshes(self, state: Mapping[str, Any]) -> None:
        """Makes groups for the meshes of all tensors of a state dict that lie in shards."""
        # Imported here: it takes long, and only who has tensors in shards needs it.
        from checkpointing.mapping.dtensors import mesh_apart

        for tensor in _in_shards(state):
            if tensor.device_mesh not in self._meshes:
                self._meshes[tensor.device_mesh] = mesh_apart(tensor.device_mesh)

    def copy(self, tensor: "DTensor", copy_local: Callable[[Tensor], Tensor]) -> "DTensor":
        """A tensor on the CPU of which each process has a copy of what it has of another one.

        Args:
            tensor: the other one.
            copy_local: copies the part of this process.
        """
        from checkpointing.mapping.dtensors import like, local_part

        local = copy_local(local_part(tensor))
        return like(tensor, local, self._apart(tensor.device_mesh), tuple(tensor.shape))

    def gathering(self) -> AbstractContextManager[None]:
        """Within it tensors are gathered over these groups, those of training's meshes too."""
        from checkpointing.mapping.dtensors import gathering_over

        return gathering_over(self._apart)

    def _apart(self, mesh: "DeviceMesh") -> "DeviceMesh":
        return mesh if mesh in self._meshes.values() else self._meshes[mesh]


def _in_shards(state: Mapping[str, Any]) -> "Iterator[DTensor]":
    """All tensors in shards, in the same order in every process."""
    model = state.get(MODEL_KEY)
    if isinstance(model, MergedStateDict) and isinstance(model.base, StateDictSource):
        yield from filter(is_dtensor, model.base.state_dict.values())
    known = {key: value for key, value in state.items() if not isinstance(value, LazyTensors)}
    yield from (tensor for _, tensor in named_tensors(known) if is_dtensor(tensor))
