"""One of the processes that `tune run --nproc_per_node` has started.

Only the first process of a job writes to the terminal; the others write to files. How a process
ended, and why, it leaves in a directory of the launcher, which shows it once for all.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointing.errors import CheckpointingError

# Set by the launcher: where the processes leave how they ended, and where their output goes.
DIRECTORY, LOG_DIRECTORY = "TUNE_JOB_DIRECTORY", "TUNE_JOB_LOG_DIRECTORY"
INTERRUPTED = 130
# As :mod:`checkpointing.storage.ranks` passes errors on.
_OF_RANK = re.compile(r"error: rank (\d+): ")
_SET_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        rank: of the process, in the job.
        code: its exit code.
        error: what is to be shown; ``None`` if it did not fail.
        is_of_another: the error says no more than that another process has gone.
        told_at: time in nanoseconds.
    """

    rank: int
    code: int
    error: str | None
    is_of_another: bool
    told_at: int

    def repeats(self) -> int | None:
        """The rank whose error this is, which has told it to all; ``None`` if it is an own one."""
        told = _OF_RANK.match(self.error or "")
        return int(told[1]) if told else None


def is_worker() -> bool:
    """Whether `tune run --nproc_per_node` has started this process."""
    return DIRECTORY in os.environ


def was_restarted() -> bool:
    """Whether the processes of this job have failed before, and were started again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def as_worker(run: Callable[[], int], debug: bool) -> int:
    """Runs the recipe, and leaves how it ended where the launcher looks for it.

    Args:
        run: runs the recipe; returns the exit code.
        debug: show the traceback of every error.

    Returns:
        The exit code.
    """
    rank = int(os.environ["RANK"])
    file = Path(os.environ[DIRECTORY]) / f"rank_{rank}.json"
    file.unlink(missing_ok=True)
    _stop_when_the_launcher_dies()
    if rank > 0:
        _write_to(log_file(rank))
    error: BaseException | None = None
    shown: str | None = None
    try:
        code = run()
    except CheckpointingError as caught:
        code, error, shown = 1, caught, f"error: {caught}"
        if debug:
            shown = f"{traceback.format_exc()}{shown}"
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as caught:
        code, error, shown = 1, caught, traceback.format_exc().rstrip()
    is_of_another = error is not None and _is_of_another(error)
    outcome = Outcome(rank, code, shown, is_of_another, time.time_ns())
    file.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    return code


def outcomes(directory: Path) -> list[Outcome]:
    """What the processes of this machine have left, by their ranks."""
    found = []
    for file in directory.glob("rank_*.json"):
        # One that was killed while it wrote has told nothing.
        with suppress(ValueError):
            found.append(Outcome(**json.loads(file.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda outcome: outcome.rank)


def log_file(rank: int) -> Path:
    """Where the output of a process goes."""
    return Path(os.environ[LOG_DIRECTORY]) / f"rank_{rank}.log"


def _is_of_another(error: BaseException) -> bool:
    from checkpointing.training.distributed import lost_another

    return lost_another(error)


def _write_to(path: Path) -> None:
    """Sends all output of this process to a file, also that of libraries that are not Python's."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _stop_when_the_launcher_dies() -> None:
    # Else its processes, which are in sessions of their own, would train on unseen.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)
