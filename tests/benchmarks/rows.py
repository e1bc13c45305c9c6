"""What is measured against what, and what it should come to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A job of a side, with its arguments."""

    side: str
    job: str
    arguments: dict[str, Any]

    def __hash__(self) -> int:
        return hash(repr(self))

    def figure(self, name: str) -> "Figure":
        """One of several figures that the job gives."""
        return Figure(self, name)


def task(side: str, job: str, **arguments: Any) -> Task:
    """A job of a side; paths travel as text."""
    plain = {
        name: value if isinstance(value, bool | int | None) else str(value)
        for name, value in arguments.items()
    }
    return Task(side, job, plain)


@dataclass(frozen=True)
class Figure:
    """A number that a job gives: by default the seconds that it takes."""

    task: Task
    name: str = ""


@dataclass(frozen=True)
class Against:
    """What a job of ours is compared with.

    Attributes:
        name: for the table.
        figures: of several, the one with the best median counts.
        target: how often as fast we want to be, ``None`` if there is no target.
    """

    name: str
    figures: tuple[Figure, ...]
    target: float | None = None

    @property
    def sides(self) -> set[str]:
        """Whose processes are needed."""
        return {figure.task.side for figure in self.figures}


@dataclass(frozen=True)
class Row:
    """A job of ours.

    Attributes:
        job: for the table.
        ours: what we take.
        against: what it is compared with.
        at_most: seconds that it may take, ``None`` if that is no target.
        is_rate: the figures are steps per second, of which more is better.
    """

    job: str
    ours: Figure
    against: tuple[Against, ...] = ()
    at_most: float | None = None
    is_rate: bool = False


@dataclass(frozen=True)
class MemoryRow:
    """By how much a fresh process grows, with its limit in bytes of private memory."""

    job: str
    task: Task
    limit: float | None = None


@dataclass(frozen=True)
class Check:
    """Something that is true or false after the rounds, or a fact to print."""

    what: str
    result: Callable[[], str]


@dataclass(frozen=True)
class Limited:
    """A job that must run in a container whose memory is limited, in bytes."""

    job: str
    task: Task
    limit: int


@dataclass(frozen=True)
class Growth:
    """The same job on models with once, twice and four times the layers.

    Attributes:
        job: for the table.
        tasks: one for each size, smallest first.
        sizes: bytes of the models.
        is_flat: a larger model should need no more memory.
    """

    job: str
    tasks: tuple[Task, ...]
    sizes: tuple[int, ...]
    is_flat: bool = True


@dataclass(frozen=True)
class Group:
    """What is measured in the same rounds.

    Attributes:
        rows: times.
        memory: taken afterwards, once each.
        checks: made afterwards.
        limited: run afterwards.
        growth: times and memory.
        extra_rounds: more than asked for, of what is short and varies.
    """

    rows: tuple[Row, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    checks: tuple[Check, ...] = ()
    limited: tuple[Limited, ...] = ()
    growth: tuple[Growth, ...] = ()
    extra_rounds: int = field(default=0)
