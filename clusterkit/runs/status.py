"""How a run is doing, read from its directory alone: one model, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from clusterkit.runs.directory import RunDirectory, killed_command, lock_holder, runs
from clusterkit.runs.holder import holder_of
from clusterkit.runs.log.console import failure_message
from clusterkit.runs.log.metrics import History, Record, number, read_history
from clusterkit.runs.slurm.queue_state import with_queue_state
from trainer.errors import RunError

STALLED_AFTER_SECONDS = 60.0
STALLED_AFTER_STEPS = 5.0
STALLED_BEFORE_FIRST_STEP_SECONDS = 600.0
"""Loading a model, the first evaluation and the first step are silent, and nothing yet says how long they take."""
ENDED_SILENTLY = "ended without a word (kill -9, out of memory, or the machine went down)"
KILLED_OFTEN = " (the kernel for want of memory, someone's kill -9, or a limit of the job)"


@dataclass(frozen=True)
class Status:
    """One observation of a run.

    state: new, pending (in Slurm's queue), running, stalled, finished, interrupted, failed or killed. message: why,
    where there is something to say. total_steps: what the run means to make, 0 when unknown.
    """

    run: RunDirectory
    history: History
    state: str
    message: str
    holder: str | None
    total_steps: int
    observed_at: float

    @property
    def alive(self) -> bool:
        """Whether a process is working on the run, or waits for nodes to."""
        return self.state in ("pending", "running", "stalled")

    @property
    def silence(self) -> float | None:
        """Seconds since the last record."""
        last = self.history.last_time
        return None if last is None else max(self.observed_at - last, 0.0)

    @property
    def eta(self) -> float | None:
        """Seconds to the end of the last step: of the records, less what has passed of the current step."""
        eta = self.history.eta()
        if eta is None or not self.alive or not self.history.steps:
            return eta
        passed = self.observed_at - (number(self.history.steps[-1], "time") or self.observed_at)
        return eta - min(max(passed, 0.0), self.history.step_time() or 0.0, eta)

    def as_dict(self) -> dict[str, Any]:
        """The shape of `clusterkit status --json`."""
        history, last = self.history, self.history.steps[-1] if self.history.steps else {}
        return {
            "experiment": self.run.experiment,
            "trial": self.run.trial,
            "run_dir": str(self.run.logs),
            "state": self.state,
            "message": self.message,
            "progress": {
                **history.progress(self.total_steps, self.eta),
                "tokens_per_s": last.get("tokens_per_s"),
            },
            "warmup": history.warmup if not history.steps else None,
            "stats": last.get("stats") or {},
            "history": {"task_reward": history.stat("task_reward")},
            "time_split": history.time_split(),
            "recover": self._checkpoint(history.recovers),
            "save": self._checkpoint(history.saves),
            "attempts": len(self.run.attempt_numbers()) or len(history.attempts),
            "warnings": history.warnings,
            "observed_at": iso_time(self.observed_at),
            "seconds_since_last_record": self.silence,
        }

    def _checkpoint(self, records: list[Record]) -> dict[str, Any]:
        last = records[-1] if records else {}
        written = number(last, "time")
        return {
            "last_dump": None if written is None else iso_time(written),
            "age_s": None if written is None else max(self.observed_at - written, 0.0),
            "count": len(records),
            "global_step": last.get("global_step"),
            "bytes": last.get("bytes"),
            "path": last.get("path"),
        }


def find_run(
    fileroot: Path, experiment: str | None = None, trial: str | None = None, user: str | None = None
) -> RunDirectory:
    """The newest run that fits, or an error that says where was looked and what to do."""
    found = runs(fileroot, experiment, trial, user)
    if found:
        return found[-1]
    others = runs(fileroot, user=user)
    if others:
        names = ", ".join(f"{run.experiment}/{run.trial}" for run in others[-5:])
        wanted = f"{experiment or '*'}/{trial or '*'}"
        raise RunError(f"no run {wanted} under {fileroot}. There is {names}: name one with --experiment and --trial")
    raise RunError(
        f"no runs found under {fileroot}{f' of user {user}' if user else ''}: start one with "
        "`clusterkit train --preset tiny`, or point to another folder with --fileroot DIR"
    )


def observe(run: RunDirectory, now: float, history: History | None = None, holder: str | None = None) -> Status:
    """Judge the run's state from its directory.

    history: saves reading the records again. holder: who works on it, where its locks cannot tell (a copy of a run on
    other machines).
    """
    history = read_history(run.metrics) if history is None else history
    holder = holder or holder_of(run)
    state, message = with_queue_state(run, *_judge(run, history, holder, now))
    return Status(run, history, state, message, holder, history.total_steps or _configured_steps(run), now)


def stalled_after(history: History) -> float:
    """Seconds of silence after which a living run counts as stalled."""
    step_time = history.step_time()
    if step_time is None:
        return STALLED_BEFORE_FIRST_STEP_SECONDS
    return max(STALLED_AFTER_SECONDS, STALLED_AFTER_STEPS * step_time)


def iso_time(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _judge(run: RunDirectory, history: History, holder: str | None, now: float) -> tuple[str, str]:
    started = run.attempt_numbers()
    if holder:
        notes = _notes(run, history)
        silence = now - history.last_time if history.last_time is not None else 0.0
        if silence > stalled_after(history):
            stalled = f"{holder} is alive, but has recorded nothing for {silence:.0f} s"
            return "stalled", f"{stalled}; {notes}" if notes else stalled
        return "running", notes
    finish = history.finish
    # An attempt that died before its first record leaves nothing but its folder.
    if finish is not None and (not started or started[-1] <= (number(finish, "attempt") or started[-1])):
        state = {"completed": "finished"}.get(str(finish.get("status")), str(finish.get("status")))
        return state, str(finish.get("message") or "")
    if not started and not history.attempts:
        return "new", "no attempt has been started"
    message = failure_message(run.console(started[-1])) if started else None
    if message:
        return "failed", message.removeprefix("error: ")
    printed = f"; what it printed is in {run.console(started[-1])}" if started else ""
    name = run.ended_by(started[-1]) if started else ""
    how = f"was ended by {name}{KILLED_OFTEN if name == 'SIGKILL' else ''}" if name else ENDED_SILENTLY
    return "killed", f"the trainer {how}{printed}"


def _notes(run: RunDirectory, history: History) -> str:
    """What is unusual with who works on a run of this machine."""
    if command := killed_command(run):
        named = f"--fileroot {run.fileroot} --experiment {run.experiment} --trial {run.trial}"
        return (
            f"the clusterkit train that started it ({command}) was killed and the trainer goes on without it; should "
            f"it die, nothing starts it again. To follow it: clusterkit status --watch {named}. To end it with a "
            f"checkpoint: clusterkit stop {named}; the same train command then goes on"
        )
    waits = lock_holder(run.logs / "launch.lock") and not lock_holder(run.logs / "run.lock")
    return history.warnings[-1] if waits and history.warnings else ""


def _configured_steps(run: RunDirectory) -> int:
    try:
        config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        return int(config["train"]["total_steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 0
