"""Saves in the background that a program waits for before it ends, whether or not it says so."""

import threading
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakSet


class SavesInBackground(Protocol):
    """What may still be writing.

    Attributes:
        running: the save that is being written, or was written last; ``None`` if there is none.
    """

    @property
    def running(self) -> "Future[Any] | None": ...


_alive: "WeakSet[SavesInBackground]" = WeakSet()


def wait_before_exit(saver: SavesInBackground) -> None:
    """Has the program wait for a save that is running when it ends."""
    _alive.add(saver)


def _finish_all() -> None:
    for saver in list(_alive):
        if saver.running is not None:
            saver.running.exception()


# Before Python stops to start threads for those who want some, which is the first that it does.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
