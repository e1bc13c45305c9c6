"""The processes of a job that write one checkpoint, or stream one model, together.

They talk to each other at the same places, in the same order. What goes wrong in one of them is
told to all, at the next place, and all of them raise it. One that has died cannot tell: that it is
missed is noticed by the others where they wait for it, see :mod:`checkpointing.storage.rank_watch`.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import CheckpointingError, ConfigError, RankLostError
from checkpointing.storage.rank_watch import BEAT, RankWatch

_Result = TypeVar("_Result")
# What says so in the words of gloo and NCCL, whose errors have no class of their own.
_BROKEN = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class Ranks:
    """This process, and the others that write the same checkpoint; often it is the only one.

    Args:
        group: of ``torch.distributed``, for data that is not on a GPU.
        doing: what all processes do together, for the error if one of them is lost.

    Attributes:
        rank: number of this process.
        count: number of processes.
    """

    def __init__(
        self, group: "dist.ProcessGroup | None" = None, doing: str = "saving a checkpoint"
    ) -> None:
        self._group = group
        self._doing = doing
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)
        self._watch = None if group is None or self.count == 1 else RankWatch(group)
        self._caller = None if self._watch is None else _Caller()
        self._failed = False
        self._lost: RankLostError | None = None

    @property
    def is_first(self) -> bool:
        """Of several processes one does what only one may do."""
        return self.rank == 0

    def exchange(self, value: Any = None) -> list[Any]:
        """What all processes give, in the order of their ranks.

        Raises:
            CheckpointingError: what another process has raised.
            RankLostError: if another process has ended, or hangs.
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
            RankLostError: if another process has ended, or hangs.
        """
        with self.watching():
            try:
                yield
            except BaseException as error:
                self.tell(error)
                raise
            self.exchange()

    def tell(self, error: BaseException) -> None:
        """Makes the other processes raise an error of this one, at the next place where they meet.

        No process is spoken to any more then, through this object.
        """
        # If nobody can be told, what has happened here still tells most.
        with suppress(Exception):
            self._exchange(None, error)

    def pass_on(
        self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Sends tensors to other processes, and gets those that they send at the same time.

        Args:
            sent: each contiguous, with the rank that gets it.
            received: memory for each, contiguous, with the rank that it comes from; in the order in
                which that one sends them.

        Raises:
            RankLostError: if another process has ended, or hangs.
        """

        def operations(act: Any, tensors: Sequence[tuple[Tensor, int]]) -> list[dist.P2POp]:
            # What is not on a GPU goes by the group that is for such data.
            return [
                dist.P2POp(act, raw, group=None if raw.is_cuda else self._group, group_peer=rank)
                for tensor, rank in tensors
                if (raw := tensor.reshape(-1).view(torch.uint8)).numel()
            ]

        batch = operations(dist.isend, sent) + operations(dist.irecv, received)

        def pass_all() -> None:
            for work in dist.batch_isend_irecv(batch):
                work.wait()

        if batch:
            self.wait_for(pass_all)

    def watching(self) -> AbstractContextManager[None]:
        """Within the block the other processes are told that this one lives, however busy it is."""
        return nullcontext() if self._watch is None else self._watch

    def wait_for(self, act: Callable[[], _Result]) -> _Result:
        """What an action gives that ends only when other processes do their part in it.

        It runs in another thread, since nothing else ends a wait for a process that hangs. If one
        is lost the action is left alone, and so is all that would come after it: it must not touch
        what is used afterwards.

        Raises:
            RankLostError: if another process has ended, or hangs.
            KeyboardInterrupt: when the action has ended, if the user has asked to stop meanwhile.
        """
        result, stop = self._waited_for(act)
        if stop is not None:
            raise stop
        return result

    def _exchange(
        self, value: Any, error: BaseException | None
    ) -> tuple[list[Any], BaseException | None]:
        """The values of all processes, and the first error of another one."""
        # After an error is told all processes are on their way out, and nobody listens any more.
        if self.count == 1 or self._failed:
            return [value], None
        told: list[Any] = [None] * self.count
        mine = (value, None if error is None else _told(error))
        _, stop = self._waited_for(lambda: dist.all_gather_object(told, mine, self._group))
        errors = [(rank, one) for rank, (_, one) in enumerate(told) if one is not None]
        self._failed = bool(errors)
        if stop is not None:
            raise stop
        others = [_of_rank(rank, *one) for rank, one in errors if rank != self.rank]
        return [one for one, _ in told], others[0] if others else None

    def _waited_for(self, act: Callable[[], _Result]) -> tuple[_Result, KeyboardInterrupt | None]:
        """The result, and the user's wish to stop: to leave at once would get out of step."""
        if self._watch is None or self._caller is None:
            return act(), None
        if self._lost is not None:
            raise self._lost
        call = _Call(act)
        self._caller.run(call)
        stop = None
        while not call.has_ended():
            try:
                self._wait_for_end(call, self._watch)
            except KeyboardInterrupt as interrupt:
                stop = interrupt
        try:
            return call.result(), stop
        except RuntimeError as error:
            if not is_broken_connection(error):
                raise
            with self._watch:
                raise self._given_up(self._watch.blame(error)) from error

    def _wait_for_end(self, call: "_Call[Any]", watch: RankWatch) -> None:
        if call.has_ended(BEAT):
            return
        with watch:
            while not call.has_ended(BEAT):
                try:
                    watch.check()
                except RankLostError as lost:
                    raise self._given_up(lost) from None

    def _given_up(self, lost: RankLostError) -> RankLostError:
        """The error for the user; no other process is spoken to any more."""
        self._failed = True
        self._lost = RankLostError(
            f"{self._doing}: {lost}. The others cannot go on without it: start the job again from "
            "its newest checkpoint, which is whole; what that rank printed last may say why"
        )
        return self._lost


class _Call(Generic[_Result]):
    """A function that runs in another thread, on the same stream of a GPU."""

    def __init__(self, act: Callable[[], _Result]) -> None:
        self._act = act
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self._result = self._act()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def has_ended(self, within: float = 0.0) -> bool:
        return self._ended.wait(within)

    def result(self) -> _Result:
        if self._error is not None:
            raise self._error
        return self._result


class _Caller:
    """Another thread, that runs one call after the other.

    It is the same one for all, since some of the memory that a thread frees stays with it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        # The process may end while it still waits.
        threading.Thread(
            target=_run_calls, args=(self._calls,), name="wait for ranks", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def run(self, call: _Call[Any]) -> None:
        self._calls.put(call)


def _run_calls(calls: "SimpleQueue[_Call[Any] | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error of torch says that another process cannot be reached any more."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _BROKEN)


def all_ranks(doing: str = "saving a checkpoint") -> Ranks:
    """All processes of the job.

    Args:
        doing: what they do together, for errors.

    Raises:
        ConfigError: if this is a thread beside the one that trains.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "weights in shards are saved by all processes together, which must not get mixed up "
            "with what training does in other threads: call save_checkpoint from the main thread, "
            "or let an AsyncCheckpointer save in the background"
        )
    return Ranks(_cpu_group(), doing)


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
