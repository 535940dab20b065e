"""Reports of the engine: the state of each host, its changes, its times, and how it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from clusterkit.ssh.api import ErrorKind

LAST_LINES = 8
_PASSING = {ErrorKind.UNREACHABLE, ErrorKind.SILENT, ErrorKind.LOST, ErrorKind.TIMEOUT}


class State(StrEnum):
    """State of one step on one host."""

    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"  # nothing had to be done
    CHANGED = "changed"
    PLANNED = "planned"  # --dry-run: would be changed
    FAILED = "failed"
    SKIPPED = "skipped"


class StepFailedError(Exception):
    """A step failed on one host. kind: how the connection failed; None where it did not."""

    def __init__(
        self,
        step: str,
        message: str,
        *,
        command: str = "",
        lines: Iterable[str] = (),
        fix: str = "",
        kind: ErrorKind | None = None,
    ) -> None:
        super().__init__(message)
        self.step, self.message, self.command, self.fix, self.kind = step, message, command, fix, kind
        self.lines = [line for line in lines if line.strip()][-LAST_LINES:]

    @property
    def transient(self) -> bool:
        """Whether another try may succeed: the connection failed, not what was done on the host."""
        return self.kind in _PASSING


@dataclass
class HostReport:
    """One host's row."""

    name: str
    states: dict[str, State] = field(default_factory=dict)  # by step
    details: dict[str, str] = field(default_factory=dict)  # by step
    seconds: dict[str, float] = field(default_factory=dict)  # by step, without waits for other hosts
    changes: list[str] = field(default_factory=list)
    failure: StepFailedError | None = None
    retries: int = 0  # further connections
    log: str = ""

    @property
    def busy_seconds(self) -> float:
        """Sum of the host's own steps, without its waits for other hosts."""
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        failure = self.failure
        return {
            "host": self.name,
            "steps": {step: str(state) for step, state in self.states.items()},
            "seconds": {step: round(value, 3) for step, value in self.seconds.items()},
            "changes": self.changes,
            "retries": self.retries,
            "failure": None
            if failure is None
            else {
                "step": failure.step,
                "message": failure.message,
                "command": failure.command,
                "last_lines": failure.lines,
                "fix": failure.fix,
            },
            "log": self.log,
        }


@dataclass
class Report:
    """Reports of all hosts."""

    hosts: dict[str, HostReport]
    wall_seconds: float = 0.0  # from the first connection to the end
    notes: list[str] = field(default_factory=list)
    stopped: str = ""  # why all hosts were stopped in the middle; empty where they were not

    @property
    def failed(self) -> list[HostReport]:
        """Hosts that failed."""
        return [host for host in self.hosts.values() if host.failure is not None]

    @property
    def num_changes(self) -> int:
        """Number of changes on all hosts."""
        return sum(len(host.changes) for host in self.hosts.values())

    @property
    def exit_code(self) -> int:
        """0: all hosts are done; 1: none, or all were stopped; 3: some."""
        if self.stopped:
            return 1
        if not self.failed:
            return 0
        return 1 if len(self.failed) == len(self.hosts) else 3

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "changes": self.num_changes,
            "failed": [host.name for host in self.failed],
            "wall_seconds": round(self.wall_seconds, 3),
            "slowest_host_seconds": round(max((h.busy_seconds for h in self.hosts.values()), default=0.0), 3),
            "notes": self.notes,
            "stopped": self.stopped,
            "hosts": [host.as_dict() for host in self.hosts.values()],
        }


class Milestones:
    """Named points that one host reaches and others wait for. When that host fails, the others' waits fail."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._reached: set[str] = set()
        self._failure: StepFailedError | None = None
        self._changed = asyncio.Condition()

    async def reach(self, name: str) -> None:
        """End all waits for `name`."""
        async with self._changed:
            self._reached.add(name)
            self._changed.notify_all()

    async def fail(self, failure: StepFailedError) -> None:
        """Fail all waits for points that were not reached."""
        async with self._changed:
            self._failure = failure
            self._changed.notify_all()

    async def wait(self, name: str, step: str) -> None:
        """Wait until `name` is reached. Raises StepFailedError: of `step`, since the owner has failed."""
        async with self._changed:
            await self._changed.wait_for(lambda: name in self._reached or self._failure is not None)
        if name not in self._reached:
            assert self._failure is not None
            raise StepFailedError(
                step,
                f"the head node {self._owner} failed at {self._failure.step}: {self._failure.message}",
                fix=f"repair {self._owner} and run setup again; this host is ready up to here",
            )
