"""Which process writes what of a file that all processes of a job write together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from checkpointing.mapping.tensors import Held, Rows, Shards, TensorSource
from checkpointing.storage.new_file import LEAST_RANGE, PlacedRows, PlacedTensor, in_parts

# What is gathered at a time of a tensor whose rows are not cut, or not apart from its columns; and,
# so that several processes write it, what each of them writes at least.
GATHERED_RANGE = 64 << 20
_GATHERED_SHARE = 8 << 20


@dataclass(frozen=True)
class Gathered:
    """Rows that some processes gather, and write.

    Attributes:
        place: of the rows in the file.
        rows: the tensor, which these processes must read at the same time.
        ranks: of these processes.
        shares: by rank, what of the rows it writes.
    """

    place: PlacedRows
    rows: Rows
    ranks: tuple[int, ...]
    shares: Mapping[int, Sequence[PlacedRows]]


class Work:
    """Which process writes what of a file. Every process comes to the same result.

    Args:
        tensors: of the file.
        source: the tensors.
        count: number of processes.

    Attributes:
        readable: by rank, what it can read by itself.
        gathered: what must be gathered, in order, a range at a time.
    """

    def __init__(self, tensors: Sequence[PlacedTensor], source: TensorSource, count: int) -> None:
        everyone = tuple(range(count))
        self._loads = [0] * count
        self.readable: dict[int, list[PlacedRows]] = {rank: [] for rank in everyone}
        self.gathered: list[Gathered] = []
        for tensor in tensors:
            rows = source.rows(tensor.name)
            if rows.shards is None:
                self._deal(tensor.all_rows, rows.unit, everyone, self.readable)
                continue
            for held in rows.shards.held:
                place = replace(tensor.all_rows, start=held.start, stop=held.stop)
                self._deal(place, rows.unit, held.ranks, self.readable)
            if not rows.shards.held:
                self._gather(tensor, rows.shards, everyone)

    def _gather(self, tensor: PlacedTensor, shards: Shards, everyone: tuple[int, ...]) -> None:
        """Gives ranges to those who gather them, or if no fewer can, to all."""
        place, rows = tensor.all_rows, shards.gathered
        held: Sequence[Held] = (Held(place.start, place.stop, everyone),)
        if shards.teams is not None:
            held, rows = shards.teams.held, shards.teams.rows
        for one in held:
            place = replace(place, start=one.start, stop=one.stop)
            for part in in_parts(place, rows, GATHERED_RANGE):
                shares: dict[int, list[PlacedRows]] = {rank: [] for rank in one.ranks}
                self._deal(part, 1, one.ranks, shares, _GATHERED_SHARE)
                self.gathered.append(Gathered(part, rows, one.ranks, shares))

    def _deal(
        self,
        place: PlacedRows,
        unit: int,
        ranks: Sequence[int],
        to: Mapping[int, list[PlacedRows]],
        least: int = LEAST_RANGE,
    ) -> None:
        """Gives rows to those ranks, of all that have them, which have least to write.

        Of those that have as little it is another one for each tensor, since a large model is
        written into many files of few tensors each.
        """
        rows, count = place.stop - place.start, len(self._loads)
        first = crc32(place.tensor.name.encode()) % count
        parts = max(min(len(ranks), place.nbytes // least), 1)
        step = max(-(-rows // (parts * unit)), 1) * unit
        for start in range(place.start, max(place.stop, place.start + 1), step):
            part = replace(place, start=start, stop=min(start + step, place.stop))
            rank = min(ranks, key=lambda rank: (self._loads[rank], (rank - first) % count))
            self._loads[rank] += part.nbytes
            to[rank].append(part)
