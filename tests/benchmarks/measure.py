"""Running the jobs of a group in turn, round after round."""

import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.benchmarks.control_group import limited_memory
from tests.benchmarks.memory import Memory
from tests.benchmarks.processes import JobError, Processes
from tests.benchmarks.rows import Figure, Group, Task

Say = Callable[[str], None]


@dataclass
class Results:
    """What was measured of a group."""

    figures: dict[Figure, list[float]] = field(default_factory=dict)
    memory: dict[Task, Memory] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    limited: dict[str, str] = field(default_factory=dict)

    def median(self, figure: Figure) -> float:
        """Of all rounds."""
        return statistics.median(self.figures[figure])


def measure(
    group: Group,
    rounds: int,
    pause: float,
    pythons: Mapping[str, Path],
    outputs: Path,
    say: Say,
) -> Results:
    """Runs every job once in each round, then what is taken once.

    Args:
        group: what to run.
        rounds: how often.
        pause: seconds before each job.
        pythons: interpreters of the sides that have one of their own.
        outputs: removed afterwards.
        say: told what is going on.
    """
    try:
        return _measure(group, rounds, pause, pythons, say)
    finally:
        shutil.rmtree(outputs, ignore_errors=True)


def _measure(
    group: Group, rounds: int, pause: float, pythons: Mapping[str, Path], say: Say
) -> Results:
    results = Results()
    tasks = _timed_tasks(group)
    with Processes(pythons, pause) as processes:
        for number in range(rounds + group.extra_rounds if tasks else 0):
            for task in tasks:
                figures = processes.run(task)
                text = " ".join(f"{name} {value:.3f}".strip() for name, value in figures.items())
                say(f"round {number + 1}: {task.side}.{task.job} {text}")
                for name, value in figures.items():
                    results.figures.setdefault(task.figure(name), []).append(value)
    for check in group.checks:
        results.checks[check.what] = check.result()
    for task in _memory_tasks(group):
        with Processes(pythons).fresh(task.side) as process:
            results.memory[task] = process.memory_of(task)
        say(f"memory: {task.side}.{task.job} {results.memory[task].private / 2**20:.0f} MiB")
    for each in group.limited:
        say(f"within {each.limit / 2**20:.0f} MiB: {each.job}")
        results.limited[each.job] = _within(each.task, each.limit, pythons)
    return results


def _timed_tasks(group: Group) -> list[Task]:
    """Each job once, however many rows it is in: ours and the others' by turns."""
    tasks = []
    for row in group.rows:
        tasks.append(row.ours.task)
        tasks += [figure.task for against in row.against for figure in against.figures]
    tasks += [task for growth in group.growth for task in growth.tasks]
    return list(dict.fromkeys(tasks))


def _memory_tasks(group: Group) -> list[Task]:
    rows = [row.task for row in group.memory]
    return list(dict.fromkeys(rows + [task for growth in group.growth for task in growth.tasks]))


def _within(task: Task, limit: int, pythons: Mapping[str, Path]) -> str:
    with limited_memory(limit) as processes:
        if processes is None:
            return "not measured: needs the right to make a control group"
        try:
            join = partial(_join, processes)
            with Processes(pythons).fresh(task.side, join) as process:
                process.run(task)
        except JobError as error:
            print(error, file=sys.stderr)
            return str(error).strip().splitlines()[-1]
    return "works"


def _join(processes: Path) -> None:
    processes.write_text(str(os.getpid()))
