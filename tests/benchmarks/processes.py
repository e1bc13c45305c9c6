"""The processes in which the jobs run: one for each side, in its own environment."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.benchmarks.memory import Memory, memory_while
from tests.benchmarks.rows import Task

_WORKER = Path(__file__).with_name("worker.py")


class JobError(Exception):
    """What a job raised, with its traceback."""


class Process(AbstractContextManager["Process"]):
    """A process that has imported a module of jobs.

    Args:
        python: interpreter of the side's environment.
        module: the jobs.
        before: called in the new process before Python starts.
    """

    def __init__(self, python: Path, module: str, before: Callable[[], None] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the process ends
        # -P: the packages of the environment are meant, not those of this checkout.
        self._process = subprocess.Popen(
            [str(python), "-P", str(_WORKER), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=before,
        )
        self._answer()

    def run(self, task: Task, pause: float = 0) -> dict[str, float]:
        """Prepares a job and runs it after a pause in seconds; returns its figures."""
        self._call("prepare", job=task.job, arguments=task.arguments)
        time.sleep(pause)
        return self._call("run")

    def memory_of(self, task: Task) -> Memory:
        """Prepares a job and runs it; returns by how much the process grew while it ran."""
        self._call("prepare", job=task.job, arguments=task.arguments)
        return memory_while(self._process.pid, lambda: self._call("run"))

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._log.close()

    def _call(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        request = json.dumps({"method": method, "arguments": arguments}, default=str)
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise JobError(f"the process ended:\n{self._log.read()[-4000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise JobError(reply["error"])
        return reply["result"]


class Processes(AbstractContextManager["Processes"]):
    """One process of each side, started when it is first needed.

    Args:
        pythons: interpreter of each side that doesn't share this one.
        pause: seconds before each job.
    """

    def __init__(self, pythons: Mapping[str, Path], pause: float = 0) -> None:
        self._pythons = pythons
        self._pause = pause
        self._started: dict[str, Process] = {}

    def run(self, task: Task) -> dict[str, float]:
        """Runs a job in its side's process."""
        if task.side not in self._started:
            self._started[task.side] = self.fresh(task.side)
        return self._started[task.side].run(task, self._pause)

    def fresh(self, side: str, before: Callable[[], None] | None = None) -> Process:
        """Another process of a side."""
        return Process(self._pythons.get(side, Path(sys.executable)), side, before)

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.__exit__()
        self._started.clear()
