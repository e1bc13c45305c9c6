"""The process of one side: prepares and runs its jobs when it is told to, and times them.

    python -P worker.py MODULE

Reads requests from standard input, one JSON object a line, and answers each with one line. A job is
a function of the module; it prepares what is not timed, and returns the function that is.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _jobs(module: str) -> Any:
    """The module with the jobs; everything else comes from the environment's own packages."""
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    try:
        return importlib.import_module(f"tests.benchmarks.{module}")
    finally:
        sys.path.remove(root)


class Worker:
    """Runs one prepared job at a time."""

    def __init__(self, jobs: Any) -> None:
        self._jobs = jobs
        self._prepared: Callable[[], Any] | None = None

    def prepare(self, job: str, arguments: dict[str, Any]) -> None:
        """Does what a job needs and is not timed."""
        self._prepared = getattr(self._jobs, job)(**arguments)
        gc.collect()

    def run(self) -> dict[str, float]:
        """Runs the prepared job; the seconds it took, or those that it has measured itself."""
        assert self._prepared is not None
        started = time.perf_counter()
        result = self._prepared()
        seconds = time.perf_counter() - started
        figures = result if type(result).__name__ == "Figures" else {"": seconds}
        del result
        self._prepared = None
        gc.collect()
        return dict(figures)


def main() -> None:
    """Serves requests until standard input ends."""
    # What the libraries print must not mix with the answers.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker(_jobs(sys.argv[1]))
    # torchtune collects garbage after every file that it reads; what was imported is none.
    gc.freeze()
    print(json.dumps({"result": None}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(worker, request["method"])(**request["arguments"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
