"""Asks the fork server to run commands."""

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.threads import THREADS_VARIABLE
from tests.cli.command import ROOT, environment


@dataclass(frozen=True)
class Finished:
    """What became of a command.

    Attributes:
        code: exit code; negative is the signal that ended it.
        output: what it printed.
        seen: what watched it, unless it was killed.
    """

    code: int
    output: str
    seen: Any


class Server:
    """One fork server, which runs one command at a time."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.server"],
            cwd=ROOT,
            env=environment({"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        command: Sequence[str],
        root: Path,
        watcher: str = "none",
        exchange: bool = True,
        threads: int = 1,
        **settings: Any,
    ) -> Finished:
        """Runs a command to its end.

        Args:
            command: arguments of `tune`.
            root: what is changed below it is watched; the command runs in the directory above it.
            watcher: which one; `settings` are its arguments.
            exchange: whether names can be exchanged.
            threads: that write; one makes its calls in the same order each time.
        """
        files = {name: self._directory / name for name in ("output", "seen", "modules")}
        for file in files.values():
            file.unlink(missing_ok=True)
        code = self._ask(
            command=list(command),
            root=str(root),
            watcher=watcher,
            settings=settings,
            exchange=exchange,
            environment={THREADS_VARIABLE: str(threads)},
            **{name: str(file) for name, file in files.items()},
        )
        seen = pickle.loads(files["seen"].read_bytes()) if files["seen"].exists() else None
        return Finished(code, files["output"].read_text(), seen)

    def import_as(self, other: "Server") -> None:
        """Imports what the last command of another server needed."""
        self._ask(modules=str(other._directory / "modules"))

    def _ask(self, **job: Any) -> int:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the server."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
