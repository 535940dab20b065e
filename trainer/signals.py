"""SIGINT and SIGTERM ask the run to stop at the next safe point; they never tear it apart."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Set by the first SIGINT, SIGTERM or SIGHUP. Calling it tells whether it is set."""

    def __init__(self) -> None:
        self.signal_name = ""

    def __call__(self) -> bool:
        """Whether the run is to stop."""
        return bool(self.signal_name)

    def install(self) -> StopFlag:
        """Catch the signals from now on (main thread only). Under nohup a hang-up stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._set)
        return self

    def _set(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
