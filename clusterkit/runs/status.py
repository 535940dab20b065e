"""The status of a run, read from its directory alone, for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clusterkit.common.text_plot import iso_time
from clusterkit.runs.directory import RunDirectory, killed_launcher, lock_holder, require_listable, runs
from clusterkit.runs.holder import holder_of
from clusterkit.runs.log.metrics import History, Record, latest_checkpoint, number, read_history
from clusterkit.runs.log.tail import failure_message
from clusterkit.runs.slurm.queue_state import with_queue_state
from trainer.errors import RunError

ENDED_SILENTLY = "ended without a message (kill -9, out of memory, or the machine went down)"
KILLED_OFTEN = " (the kernel for want of memory, someone's kill -9, or a limit of the job)"
UNREADABLE = "unreadable"
"""State of a run whose files cannot be read."""
ENDED = {"completed": "finished"}
"""State of a run by the status that its last record says, where that is another word."""


@dataclass(frozen=True)
class Status:
    """One observation of a run."""

    run: RunDirectory
    history: History
    state: str  # new, unreadable, pending (in Slurm's queue), running, stalled, finished, interrupted, failed or killed
    message: str  # the reason of the state, if there is one
    holder: str | None  # the process or job that works on the run
    total_steps: int  # planned steps, 0 if unknown
    observed_at: float  # Unix seconds
    asleep: float = 0.0  # seconds since the last record in which its machine was suspended

    @property
    def alive(self) -> bool:
        """Whether a process works on the run, or waits for nodes."""
        return self.state in ("pending", "running", "stalled")

    @property
    def silence(self) -> float | None:
        """Seconds since the last record, without those asleep."""
        last = self.history.last_time
        return None if last is None else max(self.observed_at - last - self.asleep, 0.0)

    @property
    def eta(self) -> float | None:
        """Seconds to the end of the last step."""
        return self.history.remaining(self.observed_at) if self.alive else self.history.eta()

    @property
    def left(self) -> float | None:
        """Seconds to the end of a run that is alive, its closing evaluation included; None where they are unknown."""
        return self.history.left(self.eta) if self.alive else None

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of `clusterkit status --json`."""
        history, last = self.history, self.history.steps[-1] if self.history.steps else {}
        return {
            "experiment": self.run.experiment,
            "trial": self.run.trial,
            "run_dir": str(self.run.logs),
            "state": self.state,
            "message": self.message,
            "progress": {
                **history.progress(self.total_steps, self.eta),
                "closing_evaluation_s": history.closing_seconds if self.alive else None,
                "tokens_per_s": last.get("tokens_per_s"),
            },
            "warmup": history.warmup if not history.steps else None,
            "stats": last.get("stats") or {},
            "history": {"task_reward": history.stat("task_reward")},
            "time_split": history.time_split(),
            "recover": self.checkpoint(history.recovers),
            "save": self.checkpoint(history.saves),
            "attempts": len(self.run.attempt_numbers()) or len(history.attempts),
            "warnings": history.warnings,
            "observed_at": iso_time(self.observed_at),
            "seconds_since_last_record": self.silence,
        }

    def checkpoint(self, records: list[Record]) -> dict[str, Any]:
        """Return the `recover` or `save` of `as_dict`, from the history's records of it."""
        last = records[-1] if records else {}
        return {
            **latest_checkpoint(records, self.observed_at),
            "count": len(records),
            "bytes": last.get("bytes"),
            "path": last.get("path"),
        }


def find_run(
    fileroot: Path, experiment: str | None = None, trial: str | None = None, user: str | None = None
) -> RunDirectory:
    """Return the newest run of that experiment, trial and user; None fits any (the user: only this one).

    Raises:
        RunError: there is no such run. PermissionError: the user's runs may not be listed.
    """
    found = runs(fileroot, experiment, trial, user)
    if found:
        return found[-1]
    require_listable(fileroot, user)
    others = runs(fileroot, user=user)
    if others:
        shown = (_alike(others, experiment, trial) or others)[-5:]
        names = ", ".join(run.name for run in shown)
        more = f" (`clusterkit runs` shows all {len(others)})" if len(others) > len(shown) else ""
        pattern = f"{experiment or '*'}/{trial or '*'}"
        raise RunError(f"no run {pattern} under {fileroot}. Name one of these: {names}{more}")
    raise RunError(
        f"no runs found under {fileroot}{f' of user {user}' if user else ''}: start one with "
        "`clusterkit train --preset tiny`, or point to another folder with --fileroot FOLDER"
    )


def _alike(others: Sequence[RunDirectory], experiment: str | None, trial: str | None) -> list[RunDirectory]:
    """Those whose names are nearly what was typed, the nearest last: of the experiment, if there is such a one, else
    with a name like it. What was typed as a trial may be an experiment's.
    """
    named = [run for run in others if run.experiment == (experiment or trial)]
    if experiment is None or trial is None:
        typed = experiment or trial or ""
        near = get_close_matches(typed, {name for run in others for name in (run.experiment, run.trial)}, 5)
        return named or [run for run in others if run.experiment in near or run.trial in near]
    among = {run.name: run for run in named or others}
    near = get_close_matches(f"{experiment}/{trial}", among, 5)
    return [among[name] for name in reversed(near)] or named


def observe(
    run: RunDirectory, now: float, history: History | None = None, holder: str | None = None, asleep: float = 0.0
) -> Status:
    """Observe a run by its directory.

    Args:
        now: Unix seconds, by this machine's clock.
        history: its records, if they were read already.
        holder: the process that works on it, if its locks cannot tell (a copy of a run on other machines).
        asleep: seconds since its last record in which its machine was suspended: they are no silence.
    """
    history = read_history(run.metrics) if history is None else history
    history.before = run.measured_before()
    holder, now = holder or holder_of(run), now + run.clock_ahead
    state, message = with_queue_state(run, *_judge(run, history, holder, now - asleep))
    return Status(run, history, state, message, holder, history.total_steps or _configured_steps(run), now, asleep)


def _judge(run: RunDirectory, history: History, holder: str | None, now: float) -> tuple[str, str]:
    started = run.attempt_numbers()
    if holder:
        notes = _notes(run, history)
        silence = now - history.last_time if history.last_time is not None else 0.0
        if silence > history.patience:
            stalled = f"{holder} is alive, but has recorded nothing for {silence:.0f} s"
            return "stalled", f"{stalled}; {notes}" if notes else stalled
        return "running", notes
    finish = history.finish
    # An attempt that died before its first record leaves nothing but its folder.
    if finish is not None and (not started or started[-1] <= (number(finish, "attempt") or started[-1])):
        status = str(finish.get("status"))
        return ENDED.get(status, status), str(finish.get("message") or "")
    if not started and not history.attempts:
        problem = run.config_problem()
        return (UNREADABLE, problem) if problem else ("new", "no attempt has been started")
    message = failure_message(run.console(started[-1])) if started else None
    if message:
        return "failed", message.removeprefix("error: ")
    printed = f"; what it printed is in {run.console(started[-1])}" if started else ""
    name = run.ended_by(started[-1]) if started else ""
    how = f"was ended by {name}{KILLED_OFTEN if name == 'SIGKILL' else ''}" if name else ENDED_SILENTLY
    if run.died_stopping:
        how += f" while it stopped; {recover_text(run, history)}"
    return "killed", f"the trainer {how}{printed}"


def recover_text(run: RunDirectory, history: History) -> str:
    """Return what a run that has ended goes on from, as a part of a sentence."""
    if history.recovers and run.has_recover_checkpoint:
        return f"the last recover checkpoint is that after step {history.recovers[-1].get('global_step', '?')}"
    if run.keeps_supervised:
        return "what its supervised start has done is kept"
    if history.is_in_warmup:
        return "there is no recover checkpoint yet; of its warm-up what was written is kept"
    return "there is no recover checkpoint yet, so it starts again from the beginning"


def _notes(run: RunDirectory, history: History) -> str:
    """Return what is unusual about the processes of a run on this machine."""
    if command := killed_launcher(run):
        named = f"{run.word} --fileroot {shlex.quote(str(run.fileroot))}"
        return (
            f"the clusterkit train that started it ({command}) was killed and the trainer goes on without it; should "
            f"it die, nothing starts it again. To follow it: clusterkit status --watch {named}. To end it with a "
            f"checkpoint: clusterkit stop {named}; the same train command then goes on"
        )
    waits = lock_holder(run.logs / "launch.lock") and not lock_holder(run.logs / "run.lock")
    return history.warnings[-1] if waits and history.warnings else ""


def _configured_steps(run: RunDirectory) -> int:
    try:
        return int(run.saved_values()["train"]["total_steps"])
    except (ValueError, KeyError, TypeError):
        return 0
