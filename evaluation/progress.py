"""How far an evaluation is: a line on stderr every few seconds."""

from __future__ import annotations

import sys
import time

EVERY_SECONDS = 5.0


class Progress:
    """Counts answers as they come. total: answers that were missing at the start; done_before: those there already."""

    def __init__(self, total: int, done_before: int) -> None:
        self.total, self.done_before = total, done_before
        self.done = self.failed = self.tokens = 0
        self._began = self._last = time.monotonic()

    def add(self, tokens: int, failed: bool) -> None:
        """One more answer of so many tokens."""
        self.done += 1
        self.failed += failed
        self.tokens += tokens
        if time.monotonic() - self._last >= EVERY_SECONDS or self.done == self.total:
            self.say()

    def say(self) -> None:
        """Print the line."""
        self._last = time.monotonic()
        seconds = max(self._last - self._began, 1e-9)
        left = (self.total - self.done) * seconds / max(self.done, 1)
        failed = f", {self.failed} failed" if self.failed else ""
        say(
            f"{self.done_before + self.done}/{self.done_before + self.total} answers{failed}, "
            f"{self.tokens / seconds:.0f} tokens/s, ETA {_duration(left)}"
        )

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began


def say(text: str) -> None:
    """Print a line on stderr; a terminal that has gone is no reason to stop."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        return


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
