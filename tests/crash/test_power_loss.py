"""Whatever the disk forgets when the power fails, a name of a checkpoint leads to all of it."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.storage import commit, new_file
from checkpointing.storage.commit import recover
from checkpointing.storage.threads import THREADS_VARIABLE
from tests.crash.contents import Content, content, contents, hidden
from tests.crash.disk import Disk, write_tree
from tests.crash.hooks import Call, Recorder, watching
from tests.crash.scenarios import MODEL, RANGE
from tests.tiny import ATTENTION, random_adapter

# Possibilities that are looked at after each call, if there are more.
SAMPLE, ALL = 6, 64
ADAPTER = AdapterConfig(r=2, alpha=6.0, target_modules=ATTENTION[:1])


@pytest.fixture(autouse=True)
def no_real_fsync(monkeypatch):
    """It takes long, and the disk whose power fails is a modelled one."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture(autouse=True)
def in_many_places(monkeypatch):
    """A file is written as a large one is, in an order that is the same each time."""
    monkeypatch.setattr(new_file, "_RANGE", RANGE)
    monkeypatch.setenv(THREADS_VARIABLE, "1")


@pytest.fixture
def open_run(inputs):
    """Gives the checkpointer of a run, which goes on if anything was saved."""

    def opened(out, keep=None):
        return FullModelHFCheckpointer(
            inputs / "hf",
            output_dir=out,
            keep_last_n_checkpoints=keep,
            resume_from_checkpoint=any(out.glob("*/manifest.json")),
        )

    return opened


@pytest.fixture
def save(open_run, tmp_path):
    """Saves a checkpoint of a run into the output directory."""

    def run(step, scale=1.0, keep=None):
        adapter = random_adapter(MODEL.dims, ADAPTER)
        state = {
            "adapter": {name: tensor * scale for name, tensor in adapter.items()},
            "adapter_config": ADAPTER.to_state(),
            "steps_run": step,
        }
        return open_run(tmp_path / "root" / "runs" / "out", keep).save_checkpoint(
            state, epoch=0, adapter_only=True, step=step, dir_prefix="step"
        )

    return run


@pytest.fixture(params=["first", "next", "overwriting", "two renames", "retention"])
def saved(request, open_run, save, tmp_path, monkeypatch):
    """A save: the directory before, the calls, what may be there, and what must be at its end."""
    root = tmp_path / "root"
    root.mkdir()
    out = root / "runs" / "out"
    if request.param == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    if request.param != "first":
        save(step=1)
        save(step=2)
    shutil.copytree(root, tmp_path / "before")
    old = contents(out) if out.exists() else {}
    recorder = Recorder()
    step = {"first": 1, "next": 3, "retention": 3}.get(request.param, 2)
    with watching(root, recorder):
        new = save(step, scale=2.0, keep=1 if request.param == "retention" else None)
    if request.param in ("overwriting", "two renames"):
        assert content(new) != old[new.name]
    calls = [_moved(call, root, tmp_path / "before") for call in recorder.made]
    return Saved(tmp_path / "before", calls, old, {new.name: content(new)}, open_run)


@dataclass(frozen=True)
class Saved:
    """What was recorded of a save, and how to judge what is left of it."""

    before: Path
    calls: list[Call]
    old: dict[str, Content]
    new: dict[str, Content]
    open_run: Callable[[Path], FullModelHFCheckpointer]

    def check(self, root, done):
        """Looks at what is left, starts the run again, and looks once more."""
        out = root / "runs" / "out"
        if out.exists():
            self.check_names(out)
            recover(out)
            assert hidden(out) == set()
            self.check_names(out)
        found = contents(out) if out.exists() else {}
        if done:
            assert self.new.items() <= found.items()
        if done or self.old:
            step = self.open_run(out).load_checkpoint()["steps_run"]
            assert f"step_{step}" in {max(self.old, default=None), *self.new}

    def check_names(self, out):
        for name, found in contents(out).items():
            assert found in (self.old.get(name), self.new.get(name)), f"{name} is not whole"


def _moved(call, old_root, new_root):
    def moved(path):
        return path.replace(str(old_root.resolve()), str(new_root.resolve()), 1)

    return Call(call.kind, moved(call.path), moved(call.other), call.data, call.offset)


def check_all(saved, calls, first, done_at, place, most):
    """Lets the power fail after each call from the first one on; returns in how many ways."""
    disk, seen = Disk(saved.before), set()
    for number, call in enumerate(calls, 1):
        disk.apply(call)
        if number < first:
            continue
        done = done_at is not None and number >= done_at
        for left in disk.after_losses(most):
            key = done, what_matters(left)
            if key not in seen:
                seen.add(key)
                write_tree(left, place)
                saved.check(place, done)
                shutil.rmtree(place)
    return len(seen)


def what_matters(tree):
    """A tree without what lies in directories that were being written: it is never looked at."""
    if isinstance(tree, bytes):
        return tree
    return frozenset(
        (name, "any" if ".saving-" in name else what_matters(child)) for name, child in tree.items()
    )


def test_the_model_of_the_disk_ends_where_the_disk_did(saved, tmp_path):
    disk = Disk(saved.before)
    for call in saved.calls:
        disk.apply(call)
    write_tree(disk.present(), tmp_path / "present")
    saved.check(tmp_path / "present", done=True)


def test_the_model_loses_what_is_not_synced(tmp_path):
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    top = str((tmp_path / "disk").resolve())
    file = f"{top}/a"
    for call in (Call("create", file), Call("write", file, data=b"12345678")):
        disk.apply(call)

    def possible():
        return {frozenset(left.items()) for left in disk.after_losses(64)}

    data = b"12345678"
    some = (b"", b"1234", data, b"\0\0\0\x005678", bytes(8))
    assert possible() == {frozenset(), *(frozenset({("a", part)}) for part in some)}
    disk.apply(Call("fsync", file))
    assert possible() == {frozenset(), frozenset({("a", data)})}
    disk.apply(Call("fsync", top))
    assert possible() == {frozenset({("a", data)})}
    disk.apply(Call("rename", file, f"{top}/b"))
    assert possible() == {frozenset({("a", data)}), frozenset({("b", data)})}


def test_the_model_has_zeros_where_a_file_was_made_long_and_not_yet_written(tmp_path):
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    top = str((tmp_path / "disk").resolve())
    file = f"{top}/a"
    for call in (
        Call("create", file),
        Call("fsync", top),
        Call("truncate", file, offset=8),
        Call("write", file, data=b"34", offset=2),
    ):
        disk.apply(call)
    assert disk.present() == {"a": b"\0\x0034\0\0\0\0"}
    left = {tree["a"] for tree in disk.after_losses(64)}
    assert left == {b"", bytes(8), b"\0\x0034", b"\0\x0034\0\0\0\0"}
    disk.apply(Call("fsync", file))
    disk.apply(Call("write", file, data=b"56", offset=6))
    disk.apply(Call("truncate", file, offset=7))
    left = {tree["a"] for tree in disk.after_losses(64)}
    assert left >= {b"\0\x0034\0\0\0\0", b"\0\x0034\0\x005"}


def test_a_save_writes_a_file_in_many_places_and_makes_it_long_first(saved):
    kinds = {}
    for call in saved.calls:
        kinds.setdefault(call.path, []).append(call.kind)
    calls = re.compile("create truncate (write ){3,}close fsync( unlink)?")
    assert any(calls.fullmatch(" ".join(found)) for found in kinds.values())


def test_a_save_outlasts_a_power_loss_at_any_call(saved, tmp_path):
    check_all(saved, saved.calls, 1, len(saved.calls), tmp_path / "after", SAMPLE)


@pytest.mark.slow
def test_a_save_outlasts_all_that_a_disk_may_forget(saved, tmp_path):
    ways = check_all(saved, saved.calls, 1, len(saved.calls), tmp_path / "after", ALL)
    assert ways > SAMPLE


def killed_and_recovered(saved, killed_at, place):
    """All calls of a save that is killed and of the next start."""
    disk = Disk(saved.before)
    for call in saved.calls[:killed_at]:
        disk.apply(call)
    write_tree(disk.present(), place)
    recorder = Recorder()
    with watching(place, recorder):
        recover(place / "runs" / "out")
    recovering = [_moved(call, place, saved.before) for call in recorder.made]
    shutil.rmtree(place)
    return [*saved.calls[:killed_at], *recovering]


def check_restarts(saved, place, before, after, most):
    """Kills a save, starts again, and lets the power fail after each call of the start.

    Args:
        before: how many calls before the first one that gives a name to look at.
        after: how many from then on; each is another time to be killed at.
    """
    kinds = [call.kind for call in saved.calls]
    commit = min(n for n, kind in enumerate(kinds) if kind in ("rename", "exchange"))
    for killed_at in range(max(0, commit - before), min(commit + after, len(kinds)) + 1):
        calls = killed_and_recovered(saved, killed_at, place / "killed")
        check_all(saved, calls, killed_at, None, place / "after", most)


def test_a_start_after_a_kill_outlasts_a_power_loss_at_any_call(saved, tmp_path):
    check_restarts(saved, tmp_path, before=1, after=5, most=SAMPLE)


@pytest.mark.slow
def test_a_start_after_any_kill_outlasts_all_that_a_disk_may_forget(saved, tmp_path):
    check_restarts(saved, tmp_path, before=1000, after=1000, most=ALL)
