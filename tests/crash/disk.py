"""What a disk may hold after the power fails, given the calls that were made until then.

The model is what POSIX promises and no more. What was written to a file since its last fsync may be
there, or not, or in part, or be zeros, which may come before what is there. A change of a
directory's entries (a name made, removed, renamed or exchanged, each as a whole) since the last
fsync of that directory may be there or not, whatever became of other changes before and after it;
an fsync of a file does not make sure of its name. After Pillai et al., All File Systems Are Not
Created Equal (OSDI 2014), section 2.
"""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.crash.hooks import Call

Tree: TypeAlias = "bytes | dict[str, Tree]"
# Of what was written to a file and not synced.
_FATES = _LOST, _KEPT, _HALF, _LATER_HALF, _ZEROS = range(5)


@dataclass
class _File:
    synced: bytes = b""
    now: bytes = b""

    def after_loss(self, fate: int) -> bytes:
        if fate == _LOST:
            return self.synced
        if fate == _KEPT:
            return self.now
        more = max(0, len(self.now) - len(self.synced))
        if fate == _HALF:
            return self.now[: len(self.synced) + more // 2]
        if fate == _LATER_HALF:
            return self.synced + bytes(more // 2) + self.now[len(self.synced) + more // 2 :]
        return self.synced + bytes(more)


@dataclass
class _Directory:
    synced: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)

    def change(self, entries: dict[str, int | None]) -> None:
        self.pending.append(entries)
        _apply(self.now, entries)

    def after_loss(self, kept: Sequence[bool]) -> dict[str, int]:
        entries = dict(self.synced)
        for change, stays in zip(self.pending, kept, strict=True):
            if stays:
                _apply(entries, change)
        return entries


def _apply(entries: dict[str, int], change: dict[str, int | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """A directory and all below it, and what of it would outlast a power loss.

    Args:
        root: whose present content is taken to be on the disk for good.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._nodes: list[_File | _Directory] = []
        self._scan(Path(self._root))

    def _scan(self, path: Path) -> int:
        number = len(self._nodes)
        if path.is_file():
            data = path.read_bytes()
            self._nodes.append(_File(data, data))
            return number
        directory = _Directory()
        self._nodes.append(directory)
        for child in sorted(path.iterdir()):
            directory.now[child.name] = self._scan(child)
        directory.synced = dict(directory.now)
        return number

    def _node(self, path: str) -> int:
        number = 0
        for part in Path(path).relative_to(self._root).parts:
            number = self._directory(number).now[part]
        return number

    def _directory(self, number: int) -> _Directory:
        node = self._nodes[number]
        assert isinstance(node, _Directory)
        return node

    def _file(self, path: str) -> _File:
        node = self._nodes[self._node(path)]
        assert isinstance(node, _File)
        return node

    def apply(self, call: Call) -> None:
        """The call is made."""
        parent, name = os.path.split(call.path)
        if call.kind == "close":
            return
        if call.kind == "write":
            file = self._file(call.path)
            before = file.now[: call.offset].ljust(call.offset, b"\0")
            file.now = before + call.data + file.now[call.offset + len(call.data) :]
            return
        if call.kind == "truncate":
            file = self._file(call.path)
            file.now = file.now[: call.offset].ljust(call.offset, b"\0")
            return
        if call.kind == "fsync":
            node = self._nodes[self._node(call.path)]
            node.synced = node.now if isinstance(node, _File) else dict(node.now)
            if isinstance(node, _Directory):
                node.pending.clear()
            return
        directory = self._directory(self._node(parent))
        if call.kind in ("unlink", "rmdir"):
            directory.change({name: None})
        elif call.kind in ("rename", "exchange"):
            other_parent, other = os.path.split(call.other)
            assert other_parent == parent, "a rename into another directory is not one change"
            back = directory.now[other] if call.kind == "exchange" else None
            directory.change({name: back, other: directory.now[name]})
        elif name in directory.now:
            self._file(call.path).now = b""
        else:
            self._nodes.append(_Directory() if call.kind == "mkdir" else _File())
            directory.change({name: len(self._nodes) - 1})

    def present(self) -> Tree:
        """What a process sees now, such as the one that comes after one that was killed."""
        return self._tree(0, {n: d.now for n, d in self._directories()}, self._all(_KEPT))

    def _directories(self) -> Iterator[tuple[int, _Directory]]:
        for number, node in enumerate(self._nodes):
            if isinstance(node, _Directory):
                yield number, node

    def _all(self, fate: int) -> dict[int, int]:
        return {n: fate for n, node in enumerate(self._nodes) if isinstance(node, _File)}

    def after_losses(self, most: int) -> Iterator[Tree]:
        """What may be there after a power loss now.

        All of it, if there are no more than `most` possibilities. Else the extremes, what differs
        from them in one change, and others by chance.
        """
        directories = dict(self._directories())
        changes = [(n, i) for n, d in directories.items() for i in range(len(d.pending))]
        open_files = [
            n for n, f in enumerate(self._nodes) if isinstance(f, _File) and f.now != f.synced
        ]
        choices = [range(2)] * len(changes) + [range(len(_FATES))] * len(open_files)
        for chosen in _some_of(choices, most):
            kept = dict(zip(changes, chosen, strict=False))
            fates = self._all(_KEPT)
            fates.update(zip(open_files, chosen[len(changes) :], strict=True))
            entries = {
                n: d.after_loss([bool(kept[n, i]) for i in range(len(d.pending))])
                for n, d in directories.items()
            }
            yield self._tree(0, entries, fates)

    def _tree(self, number: int, entries: dict[int, dict[str, int]], fates: dict[int, int]) -> Tree:
        node = self._nodes[number]
        if isinstance(node, _File):
            return node.after_loss(fates[number])
        return {name: self._tree(child, entries, fates) for name, child in entries[number].items()}


def write_tree(tree: Tree, to: Path) -> None:
    """Makes a file or a directory of it."""
    if isinstance(tree, bytes):
        to.write_bytes(tree)
        return
    to.mkdir()
    for name, child in tree.items():
        write_tree(child, to / name)


def _some_of(choices: Sequence[Sequence[int]], most: int) -> Iterator[tuple[int, ...]]:
    total = 1
    for options in choices:
        total *= len(options)
    if total <= most:
        yield from itertools.product(*choices)
        return
    lost, kept = (0,) * len(choices), (1,) * len(choices)
    singles = [
        (*one[:number], other[number], *one[number + 1 :])
        for one, other in ((lost, kept), (kept, lost))
        for number in range(len(choices))
    ]
    chance = random.Random(len(choices))
    chosen = [lost, kept, *chance.sample(singles, min(len(singles), most // 2))]
    while len(chosen) < most:
        chosen.append(tuple(chance.choice(options) for options in choices))
    yield from chosen
