"""What a command leaves when nothing interrupts it, and what lies in a directory."""

import re
import shutil
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.crash.commands import Server
from tests.crash.contents import Content, contents
from tests.crash.hooks import Call
from tests.crash.scenarios import OUT, Scenario, placed
from tests.crash.watchers import Historian

# The hidden directories that are written, and become those of these names.
STAGED = re.compile(r"\.(?P<name>.+)\.(saving|partial)-[0-9a-f]+")
# Writes of a file that are looked at, about.
_WRITES = 4


@dataclass(frozen=True)
class Reference:
    """A scenario that was run to its end.

    Attributes:
        scenario: which one.
        inputs: of its commands.
        prepared: the output directory before the command.
        whole: the output directory after it.
        known: every content that a checkpoint of a name may have.
        calls: that the command makes.
        failing: numbers of those that fail, such as making a directory that is there.
        saving: number of the save that each call is a part of.
        order: names of the checkpoints, as they are saved.
        steps: training step of each.
    """

    scenario: Scenario
    inputs: Path
    prepared: Path
    whole: Path
    known: dict[str, list[Content]]
    calls: list[Call]
    failing: set[int]
    saving: list[int]
    order: list[str]
    steps: dict[str, int | None]

    def is_looked_at(self, number: int) -> bool:
        """The call is a part of a save that the scenario is about.

        Of the many small writes to one file, only some are.
        """
        saves = self.scenario.saves
        if saves and self.order[self.saving[number]] not in saves:
            return False
        return self.calls[number].kind != "write" or number in self._some_writes

    @property
    def points(self) -> list[tuple[int, bool]]:
        """Where it can be killed: before each call, and in the middle of each write.

        Not before files are closed: that changes nothing that a kill would leave.
        """
        points: list[tuple[int, bool]] = []
        for number, call in enumerate(self.calls):
            if self.is_looked_at(number) and call.kind != "close":
                points += [(number, False), (number, True)][: 1 + (call.kind == "write")]
        return points

    @cached_property
    def _some_writes(self) -> set[int]:
        numbers = defaultdict(list)
        for number, call in enumerate(self.calls):
            if call.kind == "write":
                numbers[call.path].append(number)
        some = set()
        for each in numbers.values():
            some.update(each[:: max(1, len(each) // _WRITES)], each[-1:])
        return some

    def newest(self, names: list[str]) -> str:
        """The name of the checkpoint with the most steps."""
        return max(names, key=lambda name: self.steps[name] or 0)

    def complete_before(self, number: int) -> list[str]:
        """Names of the checkpoints that were there when the save of a call began."""
        return [*contents(self.prepared), *self.order[: self.saving[number]]]


def make_reference(server: Server, scenario: Scenario, inputs: Path, place: Path) -> Reference:
    """Runs a scenario to its end."""
    prepared, whole = (place / name / OUT for name in ("prepared", "whole"))
    prepared.mkdir(parents=True)
    for command in scenario.before:
        _succeed(server, command, inputs, prepared, scenario)
    shutil.copytree(prepared, whole)
    recorded = _succeed(server, scenario.command, inputs, whole, scenario)
    made = {id(call) for call in recorded.made}
    known = defaultdict(list)
    for name, content in [*contents(prepared).items(), *recorded.saved]:
        known[name].append(content)
    order: list[str] = []
    saving = []
    for call in recorded.tried:
        match = STAGED.fullmatch(Path(call.path).name)
        if call.kind == "mkdir" and match is not None and id(call) in made:
            order.append(match["name"])
        saving.append(max(0, len(order) - 1))
    failing = {number for number, call in enumerate(recorded.tried) if id(call) not in made}
    steps = {name: found[-1]["manifest.json"].get("step") for name, found in known.items()}
    return Reference(
        scenario,
        inputs,
        prepared,
        whole,
        dict(known),
        recorded.tried,
        failing,
        saving,
        order,
        steps,
    )


def _succeed(
    server: Server, command: tuple[str, ...], inputs: Path, out: Path, scenario: Scenario
) -> Historian:
    done = server.run(placed(command, inputs), out, "history", scenario.exchange)
    assert done.code == 0, done.output
    return done.seen
