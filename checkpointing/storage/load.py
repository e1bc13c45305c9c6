"""Reading all tensors of a source, with several threads."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.tensors import Rows, TensorSource
from checkpointing.storage.local_part import local_tensor, part_held
from checkpointing.storage.new_file import Progress
from checkpointing.storage.page_in import fits_in_memory, page_in
from checkpointing.storage.threads import Check, run
from checkpointing.storage.write import plan_shards

# What one thread loads at a time: large enough to be worth a job, and small enough that all threads
# end at about the same time.
_JOB = 8 << 20
# What is copied at a time: views take no memory, and what is computed takes some for each thread.
_VIEWED, _COMPUTED = 1 << 20, 1 << 18


def load_all(source: TensorSource, progress: Progress) -> dict[str, Tensor]:
    """All tensors, in the order of the source; those that it does not compute are views of it.

    Files are read to the end, unless they are so large that they would drive each other out of
    memory; then they are read where and when the tensors are used.

    Args:
        source: the tensors.
        progress: called, by several threads, with the number of bytes that were just read.

    Raises:
        CorruptCheckpointError: if a file cannot be read any more.
    """
    eager = fits_in_memory(sum(meta.nbytes for meta in source.metas.values()))

    def load(names: Sequence[str], check: Check) -> list[Tensor]:
        loaded = []
        for name in names:
            check()
            tensor = source.read(name)
            if eager:
                page_in(tensor, name)
            progress(tensor.nbytes)
            loaded.append(tensor)
        return loaded

    jobs = plan_shards(source.metas, _JOB)
    found = run([partial(load, names) for names in jobs])
    return {
        name: tensor
        for names, tensors in zip(jobs, found, strict=True)
        for name, tensor in zip(names, tensors, strict=True)
    }


def copy_into(
    targets: Mapping[str, Tensor], source: TensorSource, subject: str, progress: Progress
) -> None:
    """Copies tensors into memory that is there, a few rows at a time.

    Of a tensor of which each process of a job has a part (``DTensor``), each reads the rows of its
    own, and sends nothing.

    Args:
        targets: what to overwrite, on any device; a floating point tensor of another dtype gets
            the values rounded to it.
        source: the tensors.
        subject: names the source in errors.
        progress: called, by several threads, with the number of bytes that were just read, or need
            not be read here.

    Raises:
        TensorMismatchError: lists what differs in name or shape, or cannot take the values; then
            nothing is copied.
        ConfigError: if it is not known which part of a tensor this process has.
        CorruptCheckpointError: if a file cannot be read any more.
    """
    _check_targets(targets, source, subject)
    parts = {name: _Part(target, name) for name, target in targets.items()}

    def copy(ranges: Sequence[_Range], check: Check) -> None:
        for name, rows, start, stop in ranges:
            check()
            found = rows.read(start, stop)
            page_in(found, name)
            parts[name].take(found, start, stop)
            progress(found.nbytes)

    run([partial(copy, ranges) for ranges in _jobs(source, parts, progress)])


class _Part:
    """What this process has of a tensor that is copied into.

    Attributes:
        rows: which of the whole tensor's; a scalar's only one.
    """

    def __init__(self, target: Tensor, name: str) -> None:
        self._local = local_tensor(target)
        self.rows, *self._columns = part_held(target, name) or (slice(0, 1),)

    def take(self, found: Tensor, start: int, stop: int) -> None:
        """Copies what is held of some rows of the whole tensor, from ``start`` to ``stop``."""
        if start == self.rows.start and found.shape == self._local.shape:
            self._local.copy_(found)
            return
        first, last = max(start, self.rows.start), min(stop, self.rows.stop)
        own = found[(slice(first - start, last - start), *self._columns)]
        self._local[first - self.rows.start : last - self.rows.start].copy_(own)


_Range = tuple[str, Rows, int, int]
"""Name and rows of a tensor, and from which row to which."""


def _jobs(
    source: TensorSource, parts: Mapping[str, _Part], progress: Progress
) -> Iterator[list[_Range]]:
    """What one thread copies at a time."""
    together: list[_Range] = []
    nbytes = 0
    for name, meta in source.metas.items():
        rows, own = source.rows(name), parts[name].rows
        row_bytes = meta.nbytes // max(rows.count, 1)
        # Where an axis gets another order, its rows can only be had several at a time.
        block = _VIEWED if rows.unit == 1 else _COMPUTED
        step = max(block // max(row_bytes, 1) // rows.unit, 1) * rows.unit
        # Those that are held may begin and end in the midst of what can be had.
        first = own.start // rows.unit * rows.unit
        last = min(-(-own.stop // rows.unit) * rows.unit, rows.count)
        if own.start == own.stop:
            last = first
        progress((rows.count - (last - first)) * row_bytes)
        for start in range(first, last, step):
            stop = min(start + step, last)
            together.append((name, rows, start, stop))
            nbytes += (stop - start) * row_bytes
            if nbytes >= _JOB:
                yield together
                together, nbytes = [], 0
    if together:
        yield together


def _check_targets(targets: Mapping[str, Tensor], source: TensorSource, subject: str) -> None:
    problems = [f"{name}: nothing to load it into" for name in source.metas if name not in targets]
    for name, target in targets.items():
        meta = source.metas.get(name)
        if meta is None:
            problems.append(f"{name}: unexpected, {list(target.shape)}")
        elif meta.shape != tuple(target.shape):
            problems.append(f"{name}: {list(target.shape)}, expected {list(meta.shape)}")
        elif type(local_tensor(target)) is not Tensor or target.is_meta:
            kind = "has no memory" if target.is_meta else f"is a {type(target).__name__}"
            problems.append(f"{name}: {kind}, so that values cannot be copied into it")
        elif meta.dtype != target.dtype and not (
            meta.dtype.is_floating_point and target.is_floating_point()
        ):
            problems.append(f"{name}: {target.dtype} cannot hold what is {meta.dtype}")
    if problems:
        raise TensorMismatchError(
            subject,
            problems,
            "Give tensors with memory, by native name, as those of the state dict of a model of "
            "this size; nothing was copied.",
        )
