"""What must hold after a save was cut short, and after the user has gone on."""

from pathlib import Path

from tests.crash.commands import Server
from tests.crash.contents import contents, hidden, logged_steps, losses
from tests.crash.reference import Reference
from tests.crash.scenarios import placed


def check_left(reference: Reference, out: Path, at: int, where: str) -> None:
    """Every checkpoint is exactly the old one or the new one, and none that was whole is missing.

    Args:
        reference: the command, when nothing interrupts it.
        out: its output directory.
        at: number of the call at which it was cut short.
        where: the same in words, for failures.
    """
    left = contents(out)
    for name, content in left.items():
        assert content in reference.known[name], f"{where}: {name} is a mix, or not whole"
    before = reference.complete_before(at)
    if before and reference.scenario.exchange:
        # Retention may have removed older ones.
        assert reference.newest(before) in left, where


def go_on(server: Server, reference: Reference, out: Path, at: int, where: str) -> None:
    """Does what a user does then; all must end as if nothing had happened.

    Args:
        server: runs the commands.
        reference: as for :func:`check_left`, with all others.
    """
    scenario = reference.scenario
    killed, again = (
        placed(command, reference.inputs) for command in (scenario.command, scenario.again)
    )
    before = reference.complete_before(at)
    nothing_saved = not contents(out) and not before
    logged = len(logged_steps(out))
    allowed: set[int | None] = {0}
    done = server.run(again, out, exchange=scenario.exchange)
    if scenario.resumes and nothing_saved:
        assert done.code == 1 and "no complete checkpoint to resume from" in done.output, where
        assert hidden(out) == set(), where
        done = server.run(killed, out, exchange=scenario.exchange)
    elif scenario.resumes:
        names = [reference.order[reference.saving[at]]]
        names += [reference.newest(before)] if before else []
        allowed = {reference.steps[name] for name in names}
    assert done.code == 0, (where, done.output)
    started_from: int | None = 0
    if steps := logged_steps(out):
        started_from = steps[logged] - 1 if len(steps) > logged else steps[-1]
        assert started_from in allowed, (where, started_from, allowed)

    assert hidden(out) == set(), where
    assert losses(out) == losses(reference.whole), where
    found, whole = contents(out), contents(reference.whole)
    assert found.keys() >= whole.keys(), where
    for name, content in found.items():
        saved_since = name in whole and (reference.steps[name] or 1) > (started_from or 0)
        # What was not saved again is what the killed command left: the old one or the new one.
        # Where there are too many, it was killed before it removed what a save made superfluous.
        assert content in ([whole[name]] if saved_since else reference.known[name]), (where, name)
