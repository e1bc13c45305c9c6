"""The processes of a job that write one checkpoint together.

They talk to each other at the same places, in the same order. What goes wrong in one of them is
told to all, at the next place, and all of them raise it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from checkpointing.errors import CheckpointingError, ConfigError


class Ranks:
    """This process, and the others that write the same checkpoint; often it is the only one.

    Args:
        group: of ``torch.distributed``, for data that is not on a GPU.

    Attributes:
        rank: number of this process.
        count: number of processes.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)
        self._failed = False

    @property
    def is_first(self) -> bool:
        """Of several processes one does what only one may do."""
        return self.rank == 0

    def exchange(self, value: Any = None) -> list[Any]:
        """What all processes give, in the order of their ranks.

        Raises:
            CheckpointingError: what another process has raised.
        """
        values, error = self._exchange(value, None)
        if error is not None:
            raise error
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Ends when the block has ended in all processes; raises in all if it raises in one.

        Raises:
            CheckpointingError: what another process has raised.
        """
        try:
            yield
        except BaseException as error:
            # If nobody can be told, what has happened here still tells most.
            with suppress(Exception):
                self._exchange(None, error)
            raise
        self.exchange()

    def _exchange(
        self, value: Any, error: BaseException | None
    ) -> tuple[list[Any], BaseException | None]:
        """The values of all processes, and the first error of another one."""
        # After an error is told all processes are on their way out, and nobody listens any more.
        if self.count == 1 or self._failed:
            return [value], None
        told: list[Any] = [None] * self.count
        mine = (value, None if error is None else _told(error))
        self._failed = True  # unless all goes well
        dist.all_gather_object(told, mine, self._group)
        errors = [(rank, one) for rank, (_, one) in enumerate(told) if one is not None]
        self._failed = bool(errors)
        others = [_of_rank(rank, *one) for rank, one in errors if rank != self.rank]
        return [one for one, _ in told], others[0] if others else None


def all_ranks() -> Ranks:
    """All processes of the job.

    Raises:
        ConfigError: if this is a thread beside the one that trains.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "weights in shards are saved by all processes together, which must not get mixed up "
            "with what training does in other threads: call save_checkpoint from the main thread, "
            "without AsyncCheckpointer"
        )
    return Ranks(_cpu_group())


# A group made here, and the job's own group that it is made beside.
_made: "tuple[dist.ProcessGroup, dist.ProcessGroup] | None" = None


def _cpu_group() -> "dist.ProcessGroup":
    global _made
    world = dist.group.WORLD
    assert world is not None  # or there were no tensors in shards
    if "gloo" in dist.get_backend_config():
        return world
    if _made is None or _made[0] is not world:
        _made = world, dist.new_group(backend="gloo")
    return _made[1]


def _told(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """An error as it is told to others: its class, the arguments of that, and its attributes."""
    if isinstance(error, CheckpointingError):
        return type(error), (str(error),), vars(error)
    if isinstance(error, OSError) and error.errno is not None:
        return OSError, (error.errno, error.strerror, error.filename), {}
    return CheckpointingError, (f"{type(error).__name__}: {error}",), {}


def _of_rank(
    rank: int, kind: type[BaseException], arguments: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    """What another process has told, as it is raised here: an error of the same class."""
    if kind is OSError:
        number, text, file = arguments
        return OSError(number, f"rank {rank}: {text}", file)
    # Not by its constructor: those of some classes take other arguments than the message.
    error = kind.__new__(kind, f"rank {rank}: {arguments[0]}")
    vars(error).update(attributes)
    return error
