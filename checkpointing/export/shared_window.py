"""Computing a few tensors of a stream: in one process, or in all of a job that have parts of them.

A process computes the rows that it has, and gives them to those that hand them out. What none can
compute by itself is gathered, some rows at a time, by all of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from checkpointing.export.memory import Memory
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta, TensorSource
from checkpointing.merge import MeasuredMerge, Survival
from checkpointing.sharded import gathering
from checkpointing.storage.load import copy_into
from checkpointing.storage.page_in import page_in
from checkpointing.storage.ranks import Ranks

# So much is computed before several threads would have started.
FEW = 32 << 20
# What is gathered at a time.
_GATHERED = 16 << 20


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor that at least one process can compute by itself.

    Attributes:
        name: of the tensor.
        meta: of the rows.
        rows: of the whole tensor.
        start: the first row.
        owner: rank of the process that computes them in any case.
        others: ranks of those that compute them too, since they hand them out and have what is
            needed.
        takers: ranks of those that the owner sends them to.
    """

    name: str
    meta: TensorMeta
    rows: Rows
    start: int
    owner: int
    others: tuple[int, ...]
    takers: tuple[int, ...]

    @property
    def key(self) -> str:
        """Tells it from the other pieces of the tensor."""
        return f"{self.name} from row {self.start}"

    def of(self, whole: Tensor) -> Tensor:
        """The rows, in memory of all of the tensor."""
        return whole[self.start : self.start + self.meta.shape[0]] if whole.dim() else whole


class OwnWindow:
    """Some tensors of a stream, of which this process has all.

    Args:
        source: the tensors.
        names: those that are wanted.
        memory: for them.

    Attributes:
        tensors: by name; they hold any values until they are filled.
    """

    def __init__(self, source: TensorSource, names: Sequence[str], memory: Memory) -> None:
        self._source = source
        self._metas = {name: source.metas[name] for name in names}
        self.tensors = {name: memory.empty(meta) for name, meta in self._metas.items()}

    def fill(self, measured: MeasuredMerge | None) -> Survival:
        """Computes the tensors.

        Args:
            measured: what measures a merge while it is computed.

        Returns:
            What was measured.
        """
        if sum(meta.nbytes for meta in self._metas.values()) > FEW:
            rows = {name: partial(self._source.rows, name) for name in self._metas}
            some = LazyTensors(self._metas, rows)
            copy_into(self.tensors, some, "streaming weights", lambda nbytes: None)
        else:
            for name, target in self.tensors.items():
                found = self._source.read(name)
                page_in(found, name)
                target.copy_(found)
        return _taken(measured)


class SharedWindow:
    """Some tensors of a stream, and what each process does for them.

    It must be made and filled in all processes, of the same tensors.

    Args:
        source: the tensors.
        names: those that are wanted.
        ranks: the processes.
        readers: ranks of those that get the tensors.
        memory: for them.

    Attributes:
        tensors: by name, in a process that gets them; they hold any values until they are filled.
    """

    def __init__(
        self,
        source: TensorSource,
        names: Sequence[str],
        ranks: Ranks,
        readers: Collection[int],
        memory: Memory,
    ) -> None:
        self._metas = {name: source.metas[name] for name in names}
        self._ranks = ranks
        self._gathered: dict[str, Rows] = {}
        self._pieces: list[_Piece] = []
        self._loads = [0] * ranks.count
        for name in names:
            rows = source.rows(name)
            if rows.shards is not None and not rows.shards.held:
                self._gathered[name] = rows.gathered
            else:
                self._pieces += self._pieces_of(name, rows, frozenset(readers))
        is_reader = ranks.rank in readers
        self.tensors = {name: memory.empty(meta) for name, meta in self._metas.items() if is_reader}
        self._own = {
            piece.key: piece.of(self.tensors[piece.name]) if is_reader else memory.empty(piece.meta)
            for piece in self._pieces
            if piece.owner == ranks.rank
        }

    def fill(self, measured: MeasuredMerge | None) -> Survival:
        """Computes the tensors; an error of this process is raised when the others need no more.

        Args:
            measured: what measures a merge while it is computed.

        Returns:
            What was measured of rows that no other process measures.
        """
        error: BaseException | None = None

        def attempt(act: Callable[[], None]) -> None:
            nonlocal error
            try:
                act()
            except BaseException as found:
                error = error or found

        with _gathering_in_turn(self._ranks) if self._gathered else nullcontext():
            attempt(partial(self._compute, lambda piece: piece.owner == self._ranks.rank))
            survival = _taken(measured)
            attempt(partial(self._compute, lambda piece: self._ranks.rank in piece.others))
            _taken(measured)
            for name, rows in self._gathered.items():
                for start, stop in _ranges(rows, self._metas[name].nbytes):
                    attempt(partial(self._gather, name, rows, start, stop))
            if self._ranks.is_first:
                survival += _taken(measured)
            _taken(measured)
        attempt(self._transfer)
        if error is not None:
            raise error
        return survival

    def _pieces_of(self, name: str, rows: Rows, readers: frozenset[int]) -> Iterator[_Piece]:
        meta = self._metas[name]
        everyone = tuple(range(self._ranks.count))
        if rows.shards is None:
            held = [(0, rows.count, everyone)]
        else:
            held = [(one.start, one.stop, one.ranks) for one in rows.shards.held]
        for start, stop, holders in held:
            shape = (stop - start, *meta.shape[1:]) if meta.shape else ()
            part = replace(meta, shape=shape)
            handing_out = [rank for rank in holders if rank in readers]
            owner = min(handing_out or holders, key=self._loads.__getitem__)
            self._loads[owner] += part.nbytes
            yield _Piece(
                name,
                part,
                rows if stop - start == rows.count else rows.narrow(start, stop - start),
                start,
                owner,
                tuple(rank for rank in handing_out if rank != owner),
                tuple(sorted(readers.difference(holders))),
            )

    def _compute(self, is_wanted: Callable[[_Piece], bool]) -> None:
        targets, metas, rows = {}, {}, {}
        for piece in filter(is_wanted, self._pieces):
            own = self._own.get(piece.key)
            targets[piece.key] = piece.of(self.tensors[piece.name]) if own is None else own
            metas[piece.key] = piece.meta
            rows[piece.key] = partial(_same, piece.rows)
        copy_into(targets, LazyTensors(metas, rows), "streaming weights", lambda nbytes: None)

    def _gather(self, name: str, rows: Rows, start: int, stop: int) -> None:
        some = rows.read(start, stop)
        if name in self.tensors:
            whole = self.tensors[name]
            (whole[start:stop] if whole.dim() else whole).copy_(some)

    def _transfer(self) -> None:
        rank = self._ranks.rank
        sent = [(self._own[p.key], to) for p in self._pieces if p.owner == rank for to in p.takers]
        received = [
            (piece.of(self.tensors[piece.name]), piece.owner)
            for piece in self._pieces
            if rank in piece.takers
        ]
        self._ranks.pass_on(sent, received)


def _ranges(rows: Rows, nbytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are gathered one after another."""
    of_unit = max(nbytes * rows.unit // max(rows.count, 1), 1)
    step = max(_GATHERED // of_unit, 1) * rows.unit
    return ((start, min(start + step, rows.count)) for start in range(0, rows.count, step))


def _same(rows: Rows) -> Rows:
    return rows


def _taken(measured: MeasuredMerge | None) -> Survival:
    """What was measured since this was last called."""
    found: Mapping[str, Any] = {} if measured is None else measured.take()
    return sum((Survival(*numbers) for numbers in found.values()), Survival())


@contextmanager
def _gathering_in_turn(ranks: Ranks) -> Iterator[None]:
    # Imported here: it takes long, and only who has tensors in shards needs it.
    from checkpointing.mapping.dtensors import keeping_the_last

    with gathering(ranks), keeping_the_last():
        yield
