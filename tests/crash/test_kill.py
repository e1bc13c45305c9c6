"""A command that is killed at any file-system call of a save loses nothing."""

import random
import shutil
import signal

import pytest

from tests.crash.contents import contents
from tests.crash.judging import check_left, go_on
from tests.crash.scenarios import OUT, SCENARIOS, placed

SAMPLE = 2
LEAST = 500


def kill_and_go_on(server, reference, out, at, half):
    scenario = reference.scenario
    shutil.copytree(reference.prepared, out)
    where = f"{reference.calls[at]}, call {at}, half={half}"
    command = placed(scenario.command, reference.inputs)
    done = server.run(command, out, "kill", scenario.exchange, at=at, half=half)
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
        if call.kind in ("create", "write") and ".saving-" in call.path:
            parts = call.path.split("/")
            staged = next(part for part in parts if ".saving-" in part)
            inside = "/".join(parts[parts.index(staged) + 1 :])
            file = f"{staged.split('.saving-')[0][1:]}/{inside}"
            before = 0 if call.kind == "create" else written[file]
            written[file] = before + len(call.data)
    saved = {
        f"{checkpoint}/{path.relative_to(known.whole / checkpoint)}": path.stat().st_size
        for checkpoint in contents(known.whole)
        if checkpoint in known.order
        for path in (known.whole / checkpoint).rglob("*")
        if path.is_file()
    }
    assert {file: written.get(file) for file in saved} == saved
