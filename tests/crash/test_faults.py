"""A disk that refuses something: the error says what and where, and nothing that was saved is lost.

The disk may refuse once, or everything from some call on.
"""

import errno
import os
import random
import shutil

import pytest

from tests.crash.contents import contents, hidden, losses
from tests.crash.judging import check_left, go_on
from tests.crash.scenarios import OUT, placed
from tests.crash.watchers import can_refuse

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
# Those that remove what is hidden already, and what is tried again in another way.
_FORGIVEN = {"unlink", "rmdir"}


def refuse_and_go_on(server, reference, out, code, lasting, at):
    scenario = reference.scenario
    shutil.copytree(reference.prepared, out)
    where = f"{reference.calls[at]}, call {at}"
    command = placed(scenario.command, reference.inputs)
    settings = {"code": code, "lasting": lasting, "at": at}
    done = server.run(command, out, "fault", scenario.exchange, **settings)
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
    check_left(reference, out, at, where)
    # As long as it is not certain that the new one's name is on the disk, the old one is kept.
    uncertain = refused[0].kind == "fsync" and refused[0].path == str(out)
    if not lasting and not uncertain:
        assert hidden(out) == set(), where
    go_on(server, reference, out, at, where)
    shutil.rmtree(out.parent)


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
    """What may be refused without a harm: removing what is hidden, a fast way to copy a file."""
    for call in refused:
        copied = call.kind == "write" and call.offset == 0
        replaced = call.kind == "rename" and ".replaced-" in call.path and ".saving-" in call.other
        assert call.kind in _FORGIVEN or copied or replaced, where


def cases(reference, tmp_path, code, lasting):
    return [
        (reference, tmp_path / str(number) / OUT, code, lasting, number)
        for number, call in enumerate(reference.calls)
        if reference.is_looked_at(number)
        and number not in reference.failing
        and can_refuse(code, call)
    ]


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
