"""Notices that a process of a job has ended, or hangs, while all of them work together.

Each process counts up in the store of the job, a few times a second, in a thread of its own: so a
long write is no silence. It looks at the count of its neighbour in the order of ranks, and at what
another process has found, so that the work for the store does not grow with the square of the job.

What it counts are its own looks, and not seconds: where all processes are stopped for a while and
go on, none takes another for dead.
"""

import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from checkpointing.errors import ConfigError, RankLostError

TIMEOUT_VARIABLE = "TUNEPOINT_RANK_TIMEOUT"
_SECONDS = 120.0
BEAT = 0.2
# After a connection has broken, of which torch does not say whose it was.
_LOOKS = 6
_PREFIX = "tunepoint/alive"
_LOST = "tunepoint/lost"
# Of a process that does nothing together with others just now.
_AWAY = b"away"


def seconds_of_silence() -> float:
    """After how long a silent process is given up: 120, or what ``TUNEPOINT_RANK_TIMEOUT`` says.

    Raises:
        ConfigError: if it is no number above 0.
    """
    told = os.environ.get(TIMEOUT_VARIABLE)
    if told is None:
        return _SECONDS
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{TIMEOUT_VARIABLE}: {told!r} is no number of seconds, give 120 or so")
    return seconds


class RankWatch:
    """Tells the other processes of a group that this one lives, and looks whether they do.

    It does so within its block, which may be entered again in itself.

    Args:
        group: of ``torch.distributed``.
    """

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._members: Sequence[int] = dist.get_process_group_ranks(group)
        self._prefix = f"{_PREFIX}/{group.group_name}"
        self._own = dist.get_rank()
        before = (self._members.index(self._own) - 1) % len(self._members)
        self._neighbour = self._members[before]
        self._most_looks = max(seconds_of_silence() / BEAT, 2)
        self._depth = 0
        self._count = 0
        self._lost: str | None = None
        self._heard, self._silent = b"", 0
        self._looked_at, self._unmoved = 0, 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._ended.set()
            # It may wait for a store that never answers.
            self._thread.join(5 * BEAT)

    def check(self) -> None:
        """To be called every ``BEAT`` seconds, within the block.

        Raises:
            RankLostError: if a process is lost.
        """
        if self._looked_at != self._count:
            self._looked_at, self._unmoved = self._count, 0
        self._unmoved += 1
        if self._lost is None and self._unmoved > self._most_looks:
            self._lost = (
                "the store of the job does not answer: the process that holds it (rank 0, or the "
                "launcher) hangs"
            )
        if self._lost is not None:
            raise RankLostError(self._lost)

    def blame(self, error: BaseException) -> RankLostError:
        """Who was lost, when a connection has broken; within the block."""
        before = self._counts()
        for _ in range(_LOOKS):
            if self._lost is not None:
                return RankLostError(self._lost)
            time.sleep(BEAT)
        after = self._counts()
        silent = [rank for rank in before if after.get(rank, b"") == before[rank]]
        here = [rank for rank in silent if before[rank] not in (b"", _AWAY)]
        reason = _reason(error)
        what = "does not come" if "timed out" in reason.lower() else "has ended"
        self._tell(f"{_named(here or silent)} {what} ({reason})")
        return RankLostError(self._lost)

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:
                self._lost = self._lost or (
                    "the store of the job is gone, with the process that holds it (rank 0, or the "
                    f"launcher): {_reason(error)}"
                )
                return
            if self._ended.wait(BEAT):
                break
        with suppress(Exception):
            self._store.set(self._key(self._own), _AWAY.decode())

    def _look(self) -> None:
        self._count += 1
        self._store.set(self._key(self._own), str(self._count))
        if self._store.check([_LOST]):
            self._lost = self._store.get(_LOST).decode()
        heard = self._heard_of(self._neighbour)
        is_silent = heard == self._heard and heard not in (b"", _AWAY)
        self._silent = self._silent + 1 if is_silent else 0
        self._heard = heard
        if self._silent > self._most_looks:
            seconds = self._most_looks * BEAT
            self._tell(
                f"rank {self._neighbour} has given no sign of life for {seconds:g} seconds "
                f"({TIMEOUT_VARIABLE}): it hangs, or was stopped"
            )

    def _tell(self, lost: str) -> None:
        # What the first one finds is what all say.
        try:
            self._lost = self._store.compare_set(_LOST, "", lost).decode()
        except Exception:
            self._lost = lost

    def _counts(self) -> dict[int, bytes]:
        with suppress(Exception):
            return {rank: self._heard_of(rank) for rank in self._members if rank != self._own}
        return {}

    def _heard_of(self, rank: int) -> bytes:
        key = self._key(rank)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _reason(error: BaseException) -> str:
    """What torch says, without the place in its sources and its advice."""
    said = str(error).splitlines()[0].partition(". This is")[0]
    return re.sub(r"^\[\S+\] ", "", said)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"one of the ranks {some}" if ranks else "another rank"
