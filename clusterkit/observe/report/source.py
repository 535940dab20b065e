"""The content of a run's page, from its directory; an update reads only what was appended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterkit.config.presets import leaves
from clusterkit.observe.report.series import Numbers, Series
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import History, MetricsTail, Record, number, score_name, whole
from clusterkit.runs.log.tail import failure_message
from clusterkit.runs.status import Status, observe
from trainer.errors import RunError
from trainer.metrics import eval_scalars, step_scalars


@dataclass
class Restart:
    """An attempt after the first. `reason`: how the previous one ended; `lost_steps`: steps that were repeated."""

    attempt: int
    time: float | None
    resume_step: int
    lost_steps: int
    reason: str


@dataclass
class Run:
    """A run's history, and what that leaves out: restarts, and the times of warnings."""

    directory: RunDirectory
    history: History = field(default_factory=History)
    restarts: list[Restart] = field(default_factory=list)
    warnings: list[Record] = field(default_factory=list)
    damaged: int = 0
    records: int = 0
    _numbers: Numbers = field(default_factory=lambda: Numbers(1))
    _added: tuple[int, int, int] = (0, 0, 0)

    @property
    def name(self) -> str:
        """EXPERIMENT/TRIAL."""
        return self.directory.name

    def status(self, now: float) -> Status:
        """Return the status of the run at `now` (Unix seconds), by the records that were read."""
        return observe(self.directory, now, self.history)

    def recovers(self) -> dict[int, Record]:
        """Return the recover checkpoints by step, without those of dropped steps."""
        found = {whole(record, "global_step"): record for record in self.history.recovers}
        return {step: found[step] for step in sorted(found) if step <= self.history.global_step}

    def step_numbers(self) -> list[int]:
        """Return the training steps that have ended."""
        return [whole(step, "global_step") for step in self.history.steps]

    def numbers(self, width: int) -> dict[str, Series]:
        """Return all numbers over the steps by the names that TensorBoard gets, `width` steps per point.

        Only records since the last call are looked at, unless the width has changed or steps were undone.
        """
        attempts, steps, evals = self._added
        if width != self._numbers.width or attempts != len(self.history.attempts):
            self._numbers, steps, evals = Numbers(width), 0, 0
        held_out = self.history.held_out
        for record in self.history.steps[steps:]:
            step = whole(record, "global_step")
            values = step_scalars(record)
            for name in self._numbers.names("time/") - values.keys():
                values[name] = 0.0  # a part that a step lacks took no time
            for name, value in values.items():
                self._numbers.add(name, step, value)
        for record in held_out[evals:]:
            for name, value in eval_scalars(record).items():
                self._numbers.add(name, whole(record, "global_step"), value)
        self._added = (len(self.history.attempts), len(self.history.steps), len(held_out))
        return self._numbers.series()

    def settings(self) -> dict[str, Any]:
        """Return the run's settings by dotted key; empty if they cannot be read."""
        return _settings(self.directory, _file(self.directory.config))


def held_out_name(runs: Sequence[Run]) -> str:
    """Return what the held-out scores of runs are called; those that have losses have none."""
    last = [run.history.held_out[-1] for run in runs if run.history.held_out]
    return score_name(*(record for record in last if number(record, "accuracy") is not None))


class RunReader:
    """Reads a run repeatedly. A file that was replaced or truncated is read from its beginning."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._file = (0, 0)
        self._begin()

    def read(self) -> Run:
        """Return the run as it is now: the same object as before, unless its file was replaced."""
        inode, size = _file(self.directory.metrics)
        if inode != self._file[0] or size < self._file[1]:
            self._begin()
        self._file = (inode, size)
        try:
            records = self._tail.read()
        except OSError as error:
            path = self.directory.metrics
            raise RunError(f"{path} cannot be read ({error.strerror}): run this as the user who trains") from None
        for record in records:
            self._add(record)
        self.run.records += len(records)
        self.run.damaged = self._tail.damaged
        return self.run

    def _begin(self) -> None:
        self.run = Run(self.directory)
        self._tail = MetricsTail(self.directory.metrics)
        self._endings: dict[int, Record] = {}

    def _add(self, record: Record) -> None:
        attempt = whole(record, "attempt")
        if record["kind"] == "finish":
            self._endings[attempt] = record
        elif record["kind"] == "warning":
            self.run.warnings.append(record)
        elif record["kind"] == "attempt" and self.run.history.attempts:
            resume_step = whole(record, "resume_step")
            before = whole(self.run.history.attempts[-1], "attempt")
            lost = max(self.run.history.global_step - resume_step, 0)
            reason = self._reason(before)
            self.run.restarts.append(Restart(attempt, number(record, "time"), resume_step, lost, reason))
        self.run.history.add(record)

    def _reason(self, attempt: int) -> str:
        """Return how an attempt ended."""
        ending = self._endings.get(attempt)
        if ending is not None:
            return str(ending.get("message") or ending.get("status") or "")
        message = failure_message(self.directory.console(attempt))
        return (
            message.removeprefix("error: ") if message else "ended without a message (killed, or the machine went down)"
        )


@lru_cache(maxsize=64)
def _settings(run: RunDirectory, file: tuple[int, int]) -> dict[str, Any]:  # noqa: ARG001 (a new file is read)
    return dict(leaves(run.saved_values()))


def _file(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_size
