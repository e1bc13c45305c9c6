"""Runs `tune` in processes of their own, each of which stops at a known point.

Python tells an audit hook of every file that is opened and every rename before it is done
(https://docs.python.org/3/library/audit_events.html), so no part of the command is replaced. The
processes are forked from one that has imported what they need, as that takes most of their time.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from tests.cli.command import ROOT, environment


class Stopping:
    """Starts commands, one at a time.

    Args:
        directory: for what they print.
    """

    def __init__(self, directory: Path) -> None:
        self._printed = [directory / name for name in ("output", "errors")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, self._printed)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, event: str, name: str, what: str, *arguments: str | Path) -> int:
        """Starts a command; returns the number of its process.

        Args:
            event: ``open``, a new file is opened; or ``os.rename``, something gets a name.
            name: of the file or directory.
            what: happens just before: a signal that the process sends itself; the name of an
                error of the system; ``EFBIG``, no file may grow beyond 1000 bytes any more; or
                ``bug``, another exception.
            arguments: of `tune`.
        """
        return self._ask([event, name, what, *map(str, arguments)])

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Waits for the command to end."""
        code = self._ask(None)
        output, errors = (path.read_text() for path in self._printed)
        return subprocess.CompletedProcess([], code, output, errors)

    def run(
        self, event: str, name: str, what: str, *arguments: str | Path
    ) -> subprocess.CompletedProcess[str]:
        """Both."""
        self.start(event, name, what, *arguments)
        return self.finish()

    def _ask(self, question: object) -> int:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process that they are forked from."""
        self._process.communicate()


def _serve(printed: list[str]) -> None:
    import checkpointing.convert
    import checkpointing.merge  # noqa: F401

    child = 0
    for line in sys.stdin:
        job = json.loads(line)
        if job is None:
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            answer = child = os.fork()
            if not child:
                _run(printed, *job)
        print(answer, flush=True)


def _run(printed: list[str], event: str, name: str, what: str, *arguments: str) -> None:
    from checkpointing.cli.main import main

    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    # It is ignored in what a shell runs in the background, and so in what that starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _stop(event, name, what)
    code = 1
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _stop(event: str, name: str, what: str) -> None:
    def hook(happens: str, details: tuple) -> None:
        if happens != event or (event == "open" and not details[2] & os.O_CREAT):
            return
        path = details[0 if event == "open" else 1]
        if isinstance(path, str | os.PathLike) and os.path.basename(path) == name:
            act()

    def act() -> None:
        if what.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what == "EFBIG":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        elif what == "bug":
            raise ValueError("not an error of the system")
        else:
            raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)), name)

    sys.addaudithook(hook)


if __name__ == "__main__":
    _serve(sys.argv[1:])
