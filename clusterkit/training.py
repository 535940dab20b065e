"""Train a chosen trial: prepare its folder, follow the trainer, and say how it ended and what to type next."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from clusterkit.closing import read_summary
from clusterkit.diagnose.view import explain_failure
from clusterkit.launch import Ending, disk_errors, new_attempt, run_trainer, write_config
from clusterkit.progress import Progress
from clusterkit.rundir import RunDirectory, hold_lock, lock_holder
from clusterkit.runlog.console import failure_message, last_lines
from clusterkit.runlog.metrics import History, MetricsTail
from clusterkit.trials import require_free
from trainer.config import RunConfig

SHOWN_CONSOLE_LINES = 10


@dataclass(frozen=True)
class Outcome:
    """How a followed run ended: completed, interrupted, failed or killed. `message`: what to tell on stderr."""

    status: str
    exit_code: int
    message: str
    summary: dict[str, Any] | None
    global_step: int

    def as_dict(self, run: RunDirectory) -> dict[str, Any]:
        """For --json."""
        return {
            "experiment": run.experiment,
            "trial": run.trial,
            "run_dir": str(run.logs),
            "status": self.status,
            "exit_code": self.exit_code,
            "global_step": self.global_step,
            "message": self.message,
            "summary": self.summary,
        }


@contextmanager
def prepared(run: RunDirectory, config: RunConfig) -> Iterator[int]:
    """Hold the run against other `train` commands, write its configuration, and yield the number of a new attempt."""
    with disk_errors(run.logs):
        run.logs.mkdir(parents=True, exist_ok=True)
    with hold_lock(run.logs / "launch.lock") as ours:
        if not ours or lock_holder(run.logs / "run.lock"):
            require_free(run)
        write_config(run, config)
        yield new_attempt(run)


def follow(run: RunDirectory, argv: Sequence[str], attempt: int, progress: Progress, again: str) -> Outcome:
    """Run the trainer to its end while showing what it records; `again` is the command that goes on."""
    tail, history = MetricsTail(run.metrics), History()
    for record in tail.read():  # earlier attempts
        history.add(record)

    def poll() -> None:
        news = tail.read()
        for record in news:
            history.add(record)
        progress.show(history, news)

    def interrupted() -> None:
        progress.say("stopping: a recover checkpoint is being written; interrupt again to kill the trainer at once")

    ending = run_trainer(argv, run.console(attempt), attempt, poll, interrupted)
    outcome = _outcome(run, attempt, ending, history, again)
    if outcome.status not in ("failed", "killed"):
        return outcome
    reasons = explain_failure(run, killed=ending.returncode == -signal.SIGKILL)
    return replace(outcome, message="\n".join([outcome.message, *reasons]))


def _outcome(run: RunDirectory, attempt: int, ending: Ending, history: History, again: str) -> Outcome:
    code, console, step = ending.returncode, run.console(attempt), history.global_step
    on = f"To go on: {again}"
    if code == 0:
        return Outcome("completed", 0, "", read_summary(run), step)
    told = failure_message(console)
    if code == 130 or (ending.interrupts and code < 0):
        kept = told.removeprefix("error: ") if told and code == 130 else f"interrupted: {_recover_text(run, history)}"
        return Outcome("interrupted", 130, f"{kept}\n{on}", None, step)
    if code < 0:
        name = _signal_name(-code)
        often = " (often the kernel, out of memory, or kill -9)" if -code == signal.SIGKILL else ""
        text = f"the trainer was ended by signal {-code}, {name}{often}; {_recover_text(run, history)}"
        return Outcome("killed", 1, f"{text}.{_tail_text(run, attempt)}\n{on}", None, step)
    if told is None:
        text = f"the trainer ended with code {code} and no message; {_recover_text(run, history)}"
        return Outcome("failed", 1, f"{text}.{_tail_text(run, attempt)}\n{on}", None, step)
    return Outcome("failed", code if code in (1, 2) else 1, told, None, step)


def again_command(arguments: Sequence[str]) -> str:
    """The typed command that goes on with the run: as it was, but without asking for a fresh start."""
    return shlex.join(["clusterkit", *(item for item in arguments if item != "recover_mode=disabled")])


def further_command(arguments: Sequence[str], trial: str, total_steps: int) -> str:
    """The command that trains a complete run for more steps."""
    kept = [item for item in arguments if not item.startswith(("trial_name=", "train.total_steps=", "recover_mode="))]
    return shlex.join(["clusterkit", *kept, f"trial_name={trial}", f"train.total_steps={total_steps}"])


def _recover_text(run: RunDirectory, history: History) -> str:
    if history.recovers and run.has_recover_checkpoint:
        return f"the last recover checkpoint is that after step {history.recovers[-1].get('global_step', '?')}"
    return "there is no recover checkpoint yet, so it starts again from the beginning"


def _tail_text(run: RunDirectory, attempt: int) -> str:
    lines = last_lines(run.console(attempt), SHOWN_CONSOLE_LINES)
    if not lines:
        return f" It had printed nothing; the log is {run.logs / 'main.log'}"
    return f" Its last lines ({run.console(attempt)}):\n" + "\n".join(f"  {line}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
