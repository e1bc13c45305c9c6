"""Runs `tune` commands in forks of a process that has imported everything and started no thread.

Reads one JSON job a line and answers with one line: a command takes a fraction of a second so,
where a new interpreter takes several. Run as ``python -m tests.crash.server``.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from checkpointing.cli.main import main
from checkpointing.storage import commit, new_file
from tests.crash.hooks import Hooks
from tests.crash.scenarios import RANGE
from tests.crash.watchers import Bystander, Faulty, Historian, Killer

WATCHERS = {"kill": Killer, "fault": Faulty, "history": Historian, "none": Bystander}
# A command that hangs is ended.
_SECONDS = 120


def serve() -> None:
    """Answers jobs until there are no more."""
    for line in sys.stdin:
        job = json.loads(line)
        code = _run_in_fork(job) if "command" in job else 0
        _import_too(Path(job["modules"]))
        print(code, flush=True)


def _run_in_fork(job: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(_run(job))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _run(job: dict[str, Any]) -> int:
    """In the fork: one command, its output and what the watcher saw in files."""
    with open(job["output"], "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        signal.alarm(_SECONDS)
        # A checkpoint notes the path of its directory, which must be the same in all runs.
        os.chdir(Path(job["root"]).parent)
        os.environ.update(job["environment"])
        new_file._RANGE = RANGE
        watcher = WATCHERS[job["watcher"]](**job["settings"])
        if not job["exchange"]:
            commit.exchange = lambda first, second: False
        hooks = Hooks(Path(job["root"]), watcher)
        hooks.install()
        try:
            code = main(job["command"])
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 99
        hooks.remove()
        sys.stdout.flush()
        sys.stderr.flush()
        with open(job["seen"], "wb") as file:
            pickle.dump(watcher, file)
        Path(job["modules"]).write_text("\n".join(sys.modules))
        return code


def _import_too(modules: Path) -> None:
    """Imports what a command needed, so that the next one need not."""
    if modules.exists():
        for name in modules.read_text().splitlines():
            if name not in sys.modules and name != "__main__":
                with contextlib.suppress(Exception):
                    __import__(name)


if __name__ == "__main__":
    serve()
