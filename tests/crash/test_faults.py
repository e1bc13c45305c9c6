"""A disk that refuses something: the error says what and where, and nothing that was saved is lost.

The disk may refuse once, or everything from some call on.
"""

import errno
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch

from checkpointing.errors import OutOfSpaceError, WriteError
from checkpointing.mapping.tensors import StateDictSource
from checkpointing.storage import new_file
from checkpointing.storage.commit import recover, staged_directory
from checkpointing.storage.threads import THREADS_VARIABLE
from checkpointing.storage.writer import CheckpointWriter
from tests.crash.contents import contents, hidden, losses
from tests.crash.hooks import Recorder, watching
from tests.crash.judging import check_left, go_on
from tests.crash.reference import STAGED
from tests.crash.scenarios import OUT, placed
from tests.crash.watchers import Faulty, can_refuse

SAMPLE = 1
NAMES = (
    "HF with an adapter",
    "Meta",
    "overwriting",
    "overwriting where names cannot be exchanged",
    "retention",
    "convert",
    "merge",
)
# A disk that failed may work again, a full one stays full; Python names none of these itself.
FAULTS = {
    "EIO": (errno.EIO, False),
    "ENOSPC": (errno.ENOSPC, True),
    "EDQUOT": (errno.EDQUOT, False),
    "read-only": (errno.EROFS, True),
}
# Those that remove what is hidden already.
_FORGIVEN = {"unlink", "rmdir"}
_FULL = (errno.ENOSPC, errno.EDQUOT)
NEW_FILE = ("create", "truncate", "write", "fsync", "close")


def refuse_and_go_on(server, reference, out, code, lasting, at, threads=1):
    scenario = reference.scenario
    shutil.copytree(reference.prepared, out)
    where = f"{reference.calls[at]}, call {at}"
    command = placed(scenario.command, reference.inputs)
    settings = {"code": code, "lasting": lasting, "at": at}
    done = server.run(command, out, "fault", scenario.exchange, threads, **settings)
    refused = done.seen.refused
    assert refused, where
    if done.code == 0:
        check_forgiven(refused, where)
        assert contents(out) == contents(reference.whole), where
        shutil.rmtree(out.parent)
        return
    assert done.code == 1, (where, done.output)
    message = done.output[done.output.rindex("error: ") :]
    assert os.strerror(code) in message and message.startswith(f"error: {OUT}"), (where, message)
    assert "as they were" in message, (where, message)
    if any(is_of_a_new_file(call) for call in refused[:1]):
        assert Path(refused[0].path).name in message, (where, message)
    check_left(reference, out, at, where)
    # As long as it is not certain that the new one's name is on the disk, the old one is kept.
    uncertain = refused[0].kind == "fsync" and refused[0].path == str(out)
    if not lasting and not uncertain:
        check_hidden(out, message, where)
    go_on(server, reference, out, at, where)
    shutil.rmtree(out.parent)


def check_hidden(out, message, where):
    """Nothing is left but what a conversion can go on from, which it says."""
    found = {path for path in out.rglob(".*") if path.name in hidden(out)}
    tops = {path for path in found if path.parent == out}
    assert all(
        ".partial-" in path.name and f"stay in {OUT}/{path.name}" in message for path in tops
    ), (
        where,
        tops,
        message,
    )
    assert all(path in tops or path.parent in tops for path in found), (where, found)


def refuse_and_train_on(server, reference, out, code, lasting, at):
    scenario = reference.scenario
    shutil.copytree(reference.prepared, out)
    where = f"{reference.calls[at]}, call {at}"
    settings = {"code": code, "lasting": lasting, "at": at}
    command = placed(scenario.command, reference.inputs)
    done = server.run(command, out, "fault", scenario.exchange, **settings)
    assert done.code == 0, (where, done.output)
    if f"NOT SAVED: {OUT}/step_2: could not be saved: {os.strerror(code)}" not in done.output:
        check_forgiven(done.seen.refused, where)
    left, whole = contents(out), contents(reference.whole)
    # The name may be there already when it cannot be made sure that it is on the disk.
    assert left in (whole, {"epoch_0": whole["epoch_0"]}), where
    assert losses(out) == losses(reference.whole), where
    assert hidden(out) == set(), where
    shutil.rmtree(out.parent)


def check_forgiven(refused, where):
    """What may be refused without a harm: removing what is hidden."""
    for call in refused:
        replaced = call.kind == "rename" and ".replaced-" in call.path and ".saving-" in call.other
        assert call.kind in _FORGIVEN or replaced, where


def is_of_a_new_file(call):
    """The call writes a file of a checkpoint, and not its manifest."""
    file = Path(call.path)
    inside = any(STAGED.fullmatch(parent) for parent in file.parts[:-1])
    return inside and call.kind in NEW_FILE and file.suffix and file.name != "manifest.json"


def cases(reference, tmp_path, code, lasting):
    return [
        (reference, tmp_path / str(number) / OUT, code, lasting, number)
        for number, call in enumerate(reference.calls)
        if reference.is_looked_at(number)
        and number not in reference.failing
        and can_refuse(code, call)
    ]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["HF with an adapter", "Meta", "merge"])
def test_what_is_refused_to_any_thread_is_said(name, fault, reference, each, tmp_path):
    known = reference(name)
    every = [
        (*case, 2)
        for case in cases(known, tmp_path, *FAULTS[fault])
        if is_of_a_new_file(known.calls[case[-1]]) and known.calls[case[-1]].kind == "write"
    ]
    each(refuse_and_go_on, random.Random(name + fault).sample(every, SAMPLE))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_is_said_and_nothing_is_lost(name, fault, reference, each, tmp_path):
    known = reference(name)
    every = cases(known, tmp_path, *FAULTS[fault])
    each(refuse_and_go_on, random.Random(name + fault).sample(every, SAMPLE))


def test_training_goes_on_if_it_was_told_to(reference, each, tmp_path):
    known = reference("training goes on after an error")
    every = in_its_save(cases(known, tmp_path, errno.EIO, False))
    each(refuse_and_train_on, random.Random(0).sample(every, 4))


@pytest.mark.slow
def test_training_goes_on_after_an_error_at_any_call(reference, each, tmp_path):
    known = reference("training goes on after an error")
    each(refuse_and_train_on, in_its_save(cases(known, tmp_path, errno.EIO, False)))


def in_its_save(cases):
    """Without the calls by which a run claims its directory before its first save."""
    return [case for case in cases if ".run.lock" not in case[0].calls[case[-1]].path]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_call_may_be_refused(name, fault, reference, each, tmp_path):
    known = reference(name)
    # One kind of fault at every call; the others at some, for they differ in their number only.
    each(refuse_and_go_on, cases(known, tmp_path, *FAULTS[fault])[:: 1 if fault == "EIO" else 5])


def save_three_files(final):
    weights = {
        "a": torch.arange(700.0).reshape(7, 100),
        "b": torch.ones(3, 5, dtype=torch.int8),
        "c": torch.arange(900.0).reshape(300, 3),
    }
    with staged_directory(final) as staging:
        writer = CheckpointWriter(staging, lambda _: None)
        writer.tensors("w.safetensors", StateDictSource(weights))
        writer.tensors("w.pt", StateDictSource(weights))
        writer.torch_object("state.pt", {"steps": 3, "momentum": torch.arange(1100.0)})


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_thread_and_no_file_is_left_of_what_was_refused(fault, threads, tmp_path, monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, str(threads))
    monkeypatch.setattr(new_file, "_RANGE", 512)
    root = tmp_path / "root"
    root.mkdir()
    recorder = Recorder()
    with watching(root, recorder):
        save_three_files(root / "whole")
    calls = recorder.tried
    before = sorted(root.rglob("*"))
    assert sum(call.kind == "truncate" for call in calls) == 2
    assert sum(call.kind == "write" for call in calls) > 30
    code, lasting = FAULTS[fault]
    running = threading.active_count()
    refused = set()
    for at, call in enumerate(calls):
        if not is_of_a_new_file(call) or not can_refuse(code, call):
            continue
        disk = Faulty(code, at, lasting)
        with watching(root, disk), pytest.raises(WriteError) as raised:
            save_three_files(root / "next")
        assert threading.active_count() == running
        assert isinstance(raised.value, OutOfSpaceError) == (code in _FULL)
        assert os.strerror(code) in str(raised.value)
        # Several threads may be refused something at once.
        assert any(Path(call.path).name in str(raised.value) for call in disk.refused)
        refused.add(disk.refused[0].kind)
        if lasting:
            # Removing was refused too.
            recover(root)
        assert sorted(root.rglob("*")) == before
    assert refused >= {"create", "write", "fsync", "close"}
