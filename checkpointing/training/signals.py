"""SIGTERM and SIGINT while training: the running step is finished and saved, then the run stops."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from checkpointing.training.distributed import largest_of_all

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Some launchers send a signal to the process and to its group: that is one request.
_ONE_REQUEST_SECONDS = 1.0


class StoppedBySignal(SystemExit):
    """A run was asked to stop, and did. Not caught, it ends the process with ``128 + signal``.

    Attributes:
        signal: what was received.
        checkpoint: the newest one that this process saved; ``None`` if it saved none.
    """

    def __init__(self, received: signal.Signals, checkpoint: Path | None) -> None:
        super().__init__(128 + received)
        self.signal = received
        self.checkpoint = checkpoint


class StopSignals:
    """Notes the first SIGTERM or SIGINT in the block; the next one stops the process at once.

    What handled the signals before does so again after the block, and handles the second one. A
    signal that is ignored, as SIGINT is in background jobs of a shell, stays ignored. Only the main
    thread can handle signals; in another one nothing is noted.

    Args:
        deadline_seconds: time from the first signal after which the process ends, whatever it does;
            ``None``: no limit.

    Attributes:
        received: the signal; ``None`` as long as there was none.
    """

    def __init__(self, deadline_seconds: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._deadline_seconds = deadline_seconds
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                handler = signal.getsignal(each)
                if handler not in (None, signal.SIG_IGN):
                    self._before[each] = handler
                    signal.signal(each, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if self._timer is not None:
            self._timer.cancel()

    def agreed(self) -> signal.Signals | None:
        """The signal that this process or another one of the job has got; ``None`` if none has.

        All processes must ask at the same places, and so do the same.
        """
        number = largest_of_all(self.received or 0)
        if number and self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        return self.received if number else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at > _ONE_REQUEST_SECONDS:
                self._restore()
                signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        self._received_at = time.monotonic()
        _say(f"{self.received.name}: stops when this step is done and saved; once more: at once")
        if self._deadline_seconds is not None:
            self._timer = threading.Timer(self._deadline_seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        assert self.received is not None
        _say(
            f"{self.received.name}: not done after {self._deadline_seconds} seconds, so the last "
            "checkpoint before counts; resume with resume_from_checkpoint=True"
        )
        os._exit(128 + self.received)

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before.clear()


def _say(text: str) -> None:
    # Not print, which cannot be entered again where a signal has interrupted it.
    os.write(2, f"\n{text}\n".encode())
