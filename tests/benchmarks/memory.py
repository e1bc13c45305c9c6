"""How much a process grows while it does something."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PAUSE = 0.002


@dataclass(frozen=True)
class Memory:
    """By how much a process grew at most, in bytes.

    Attributes:
        private: memory that belongs to no file, sampled every 2 ms.
        resident: all resident memory, pages of mapped files too, at its peak.
    """

    private: int
    resident: int


def memory_while(process: int, job: Callable[[], object]) -> Memory:
    """Watches a process from outside, so that nothing it does hides its peak.

    Args:
        process: its number.
        job: what makes it work, and returns when it has.
    """
    # Sets the peak of its resident memory to what it is now (proc(5)).
    Path(f"/proc/{process}/clear_refs").write_text("5")
    before = _status(process)
    peak = before["RssAnon"]
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_PAUSE):
            peak = max(peak, _status(process)["RssAnon"])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        job()
    finally:
        done.set()
        watching.join()
    return Memory(peak - before["RssAnon"], _status(process)["VmHWM"] - before["VmRSS"])


def _status(process: int) -> dict[str, int]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}
