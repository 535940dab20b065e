"""End a run in order: a recover checkpoint first, and by force only after a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterkit.backends.base import Say, StoppedRun
from trainer.errors import RunError, UserError

KILL_SECONDS = 120.0
"""So long a run may outlive force."""


@dataclass(frozen=True)
class LiveRun:
    """A run that is alive."""

    name: str  # for people
    interrupt: Callable[[], object]  # has it write a recover checkpoint and end
    kill: Callable[[], object]  # ends it at once
    alive: Callable[[], bool]  # whether it still is
    resume_hint: Callable[[], str]  # what the same train command does now, as the end of a sentence
    stuck: Callable[[], str]  # what to do where it outlives even force
    poll_seconds: float  # between two looks


def end_run(run: LiveRun, *, deadline: float, force: bool, say: Say) -> StoppedRun:
    """End a run.

    Args:
        deadline: seconds until it is ended by force.

    Raises:
        RunError: it cannot be ended.
    """
    if not force:
        run.interrupt()
        say(f"{run.name} writes a recover checkpoint and ends; by force after {deadline:.0f} s")
        if _ends(run, deadline):
            return StoppedRun(run.name, False, f"{run.name} is stopped; {run.resume_hint()}")
    run.kill()
    if not _ends(run, KILL_SECONDS):
        raise RunError(f"{run.name} does not end even by force: {run.stuck()}")
    return StoppedRun(run.name, True, f"{run.name} was ended by force; {run.resume_hint()}")


def require_one(names: Sequence[str]) -> None:
    """Refuse to guess which of several living runs is meant. Raises UserError where there are several."""
    if len(names) > 1:
        raise UserError(f"several runs are alive: {', '.join(names)}. Name one: clusterkit stop {names[0]}")


def _ends(run: LiveRun, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while run.alive():
        if time.monotonic() > end:
            return False
        time.sleep(run.poll_seconds)
    return True
