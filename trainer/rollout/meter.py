"""How long a run had nothing but its judge to wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class ScoreMeter:
    """Adds up the seconds in which trajectories were scored while none was generated.

    What a judge can cost a run at most: while anything is generated beside it, its time is hidden.
    """

    def __init__(self) -> None:
        self._generating = self._scoring = 0
        self._since, self._total, self._taken = time.monotonic(), 0.0, 0.0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A trajectory is generated during the block."""
        self._turn()
        self._generating += 1
        try:
            yield
        finally:
            self._turn()
            self._generating -= 1

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """A trajectory is scored during the block."""
        self._turn()
        self._scoring += 1
        try:
            yield
        finally:
            self._turn()
            self._scoring -= 1

    def take(self) -> float:
        """Seconds since the last call, of blocks that have begun or ended since."""
        taken, self._taken = self._taken, self._total
        return self._total - taken

    def _turn(self) -> None:
        now = time.monotonic()
        if self._scoring and not self._generating:
            self._total += now - self._since
        self._since = now
