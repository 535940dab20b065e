"""SIGINT, SIGTERM and SIGHUP ask the run to stop at the next safe point; they do not end it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Set by the first SIGINT, SIGTERM or SIGHUP. Calling it tells whether it is set."""

    def __init__(self) -> None:
        self._is_set = False

    def __call__(self) -> bool:
        """Whether the run is to stop."""
        return self._is_set

    def install(self) -> StopFlag:
        """Catch the signals from now on (main thread only). Under nohup a hang-up stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._set)
        return self

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self._is_set = True


def end_with_input(number: int) -> None:
    """Send this process the signal `number` when its standard input ends: the process at the other end has gone."""

    def read_to_the_end() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=read_to_the_end, daemon=True).start()
