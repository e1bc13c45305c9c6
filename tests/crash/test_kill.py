"""A command that is killed at any file-system call of a save loses nothing."""

import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.crash.contents import contents
from tests.crash.judging import check_left, go_on
from tests.crash.reference import STAGED
from tests.crash.scenarios import OUT, SCENARIOS, placed

SAMPLE = 2
LEAST = 500
THREADED = ("HF", "asynchronous", "tune", "convert", "merge")


def kill_and_go_on(server, reference, out, at, half, threads=1):
    scenario = reference.scenario
    shutil.copytree(reference.prepared, out)
    where = f"{reference.calls[at]}, call {at}, half={half}, {threads} threads"
    command = placed(scenario.command, reference.inputs)
    done = server.run(command, out, "kill", scenario.exchange, threads, at=at, half=half)
    assert done.code == -signal.SIGKILL, (where, done.output)
    check_left(reference, out, at, where)
    go_on(server, reference, out, at, where)
    shutil.rmtree(out.parent)


def cases(reference, tmp_path, points):
    return [(reference, tmp_path / f"{at}_{half}" / OUT, at, half) for at, half in points]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_killed_command_goes_on_as_if_nothing_had_happened(name, reference, each, tmp_path):
    known = reference(name)
    chosen = random.Random(name).sample(known.points, SAMPLE)
    each(
        lambda server, at, half: kill_and_go_on(
            server, known, tmp_path / f"{at}_{half}" / OUT, at, half
        ),
        chosen,
    )


@pytest.mark.parametrize("name", THREADED)
def test_whichever_thread_makes_the_call_at_which_it_is_killed(name, reference, each, tmp_path):
    known = reference(name)
    each(
        lambda server, at, half: kill_and_go_on(
            server, known, tmp_path / f"{at}_{half}" / OUT, at, half, threads=2
        ),
        random.Random(name).sample(where_threads_write(known), SAMPLE),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_several_threads_can_be_killed_at_every_call(name, reference, each, tmp_path):
    known = reference(name)
    each(
        lambda server, at, half: kill_and_go_on(
            server, known, tmp_path / f"{at}_{half}" / OUT, at, half, threads=2
        ),
        where_threads_write(known),
    )


def where_threads_write(reference):
    """Where a file is written whose size was set before, since its parts come in any order."""
    sized = {call.path for call in reference.calls if call.kind == "truncate" and call.offset}
    return [
        (at, half)
        for at, half in reference.points
        if reference.calls[at].kind == "write" and reference.calls[at].path in sized
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_command_can_be_killed_at_every_call(name, reference, each, tmp_path):
    known = reference(name)
    each(
        lambda server, at, half: kill_and_go_on(
            server, known, tmp_path / f"{at}_{half}" / OUT, at, half
        ),
        known.points,
    )


def test_there_are_enough_places_to_be_killed_at(reference):
    assert sum(len(reference(name).points) for name in SCENARIOS) >= LEAST


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_byte_of_a_checkpoint_is_seen_by_the_hooks(name, reference):
    known = reference(name)
    written = {}
    for call in known.calls:
        parts = Path(call.path).parts
        staged = [number for number, part in enumerate(parts) if STAGED.fullmatch(part)]
        if call.kind in ("create", "write") and staged:
            (number,) = staged
            file = "/".join((STAGED.fullmatch(parts[number])["name"], *parts[number + 1 :]))
            seen = written.setdefault(file, set())
            if call.kind == "create":
                seen.clear()
            places = range(call.offset, call.offset + len(call.data))
            assert seen.isdisjoint(places), f"{call} writes what is written"
            seen.update(places)
    saved = {
        f"{checkpoint}/{path.relative_to(known.whole / checkpoint)}": path.stat().st_size
        for checkpoint in contents(known.whole)
        if checkpoint in known.order
        for path in (known.whole / checkpoint).rglob("*")
        if path.is_file()
    }
    assert known.order and saved
    assert {file: written.get(file) for file in saved} == {
        file: set(range(size)) for file, size in saved.items()
    }
