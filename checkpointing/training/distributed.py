"""Training in many processes: how they find each other, and what each does of the whole.

In a process that trains alone everything here is as if it were the first of one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import ConfigError, RankLostError
from checkpointing.storage.ranks import Ranks, all_ranks, is_broken_connection
from checkpointing.training.settings import get_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def process_group(device: str, timeout_seconds: float) -> Iterator[torch.device]:
    """Joins the processes that ``tune run --nproc_per_node`` has started, for a block.

    They talk by NCCL about what is on GPUs, and by gloo about all else.

    Args:
        device: ``cpu``, or ``cuda`` for a GPU for each process of a machine.
        timeout_seconds: time that a process waits for the others, after which it ends with an
            error.

    Yields:
        The device of this process.

    Raises:
        ConfigError: if the process was not started so, or the machine lacks the device.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "this recipe trains in several processes, which the command starts: "
            "tune run --nproc_per_node <NUMBER> <RECIPE> --config <CONFIG>"
        )
    if not timeout_seconds > 0:
        raise ConfigError(f"process_group_timeout_seconds={timeout_seconds}: must be above 0")
    own = _own_device(device)
    backend = "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    # After an error the others may be anywhere, so that they cannot end the group together.
    try:
        yield own
    except SystemExit:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _own_device(name: str) -> torch.device:
    if name == "cuda":
        device = get_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(device)
        return device
    if name != "cpu":
        raise ConfigError(f"device={name}: several processes train on cpu, or on cuda, a GPU each")
    return torch.device(name)


def job() -> Ranks:
    """All processes of the job; often this is the only one.

    Raises:
        ConfigError: if there are others, with which this one has no group.
    """
    if _is_one_of_many():
        return all_ranks("training")
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "this recipe trains in one process, but was started in "
            f"{os.environ['WORLD_SIZE']}: leave out --nproc_per_node, or write the recipe as "
            "lora_finetune_distributed is (tune cp lora_finetune_distributed my_recipe.py)"
        )
    return Ranks()


def is_first_rank() -> bool:
    """Whether this process does what only one may do, such as logging."""
    return not _is_one_of_many() or dist.get_rank() == 0


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Lets the first process go through the block before all others.

    Raises:
        CheckpointingError: in the others, what the first one has raised.
    """
    ranks = job()
    if ranks.is_first:
        with ranks.agreed():
            yield
    else:
        ranks.exchange()
        yield


def from_first_rank(value: Any) -> Any:
    """What the first process gives."""
    return job().exchange(value)[0]


def largest_of_all(number: int) -> int:
    """The largest number that any process gives."""
    if not _is_one_of_many():
        return number
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class DataShare:
    """Which rows of each batch a process trains on: every ``count``-th one, from ``rank`` on.

    Processes that hold parts of the same layers, as in tensor parallelism, have the same share.

    Attributes:
        rank: number of the share.
        count: number of the shares; 1 for all rows.
        group: a process of each share, this one among them.
    """

    rank: int = 0
    count: int = 1
    group: "dist.ProcessGroup | None" = None

    def total(self, value: Tensor) -> Tensor:
        """The sum over the shares of a value that each of them has."""
        if self.count == 1:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def of_each(self, value: Any) -> list[Any]:
        """What is given for each of the shares, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values


def data_share(mesh: "DeviceMesh") -> DataShare:
    """The share of this process.

    Args:
        mesh: of all processes, whose dimension ``dp`` has the shares.
    """
    along = mesh["dp"]
    return DataShare(along.get_local_rank(), along.size(), along.get_group())


def lost_another(error: BaseException) -> bool:
    """Whether an error says no more than that another process has gone, which will tell why."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RankLostError) or is_broken_connection(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
