"""Train a chosen trial: prepare its folder, follow the trainer, and say how it ended and what to type next."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from clusterkit.backends.base import RunOutcome
from clusterkit.backends.local.launch import (
    Ending,
    new_attempt,
    noting_signals,
    run_trainer,
    wait_or_signal,
    write_config,
)
from clusterkit.common.origin import origin_environment
from clusterkit.runs.diagnose.view import explain_failure
from clusterkit.runs.directory import FILEROOT, RunDirectory, hold_lock, lock_holder
from clusterkit.runs.final_evaluation import read_summary
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.log.tail import failure_message, last_lines
from clusterkit.runs.status import recover_text
from clusterkit.runs.trials import Trial, require_free, require_unchanged
from clusterkit.ui.progress import Progress
from trainer.config import RunConfig
from trainer.disk import disk_of, file_failures, is_full
from trainer.errors import UserError
from trainer.files import append_line, last_records, write_atomic
from trainer.launch.job import end_mark, ended, last_step
from trainer.launch.retries import REFUSED, Ended, judge, retries_of

SHOWN_CONSOLE_LINES = 10


@contextmanager
def prepared(run: RunDirectory, config: RunConfig, trial: Trial | None = None) -> Iterator[int]:
    """Hold the run against other `train` commands, write its configuration, and yield the number of a new attempt.

    An attempt with other settings that its trainer refuses before it records anything leaves the run as it was.

    trial: the run as it was chosen.

    Raises:
        UserError: another command trains it, or has begun to since it was chosen.
    """
    with file_failures(run.logs, FILEROOT):
        run.logs.mkdir(parents=True, exist_ok=True)
    with hold_lock(run.logs / "launch.lock") as ours:
        if not ours or lock_holder(run.logs / "run.lock"):
            require_free(run)
        if not ours:  # it was let go this very moment
            raise UserError(f"{run.name} is being started by another command: give yours again")
        if trial is not None:
            require_unchanged(trial)
        former = run.config.read_bytes() if run.config.exists() else None
        write_config(run, config)
        began, before, attempt = time.time(), last_step(run.metrics), new_attempt(run)
        try:
            yield attempt
        except KeyboardInterrupt:
            if not run.console(attempt).exists():  # its trainer would have told it
                _record_interruption(
                    run, attempt, -signal.SIGINT, began, before, "interrupted before the trainer was started"
                )
            raise
        if former not in (None, run.config.read_bytes()) and _was_refused(run, attempt):
            write_atomic(run.config, former)
            shutil.rmtree(run.exit_mark(attempt).parent)


def _was_refused(run: RunDirectory, attempt: int) -> bool:
    """Whether a trainer ended with code 2 and no record: what it said is what the command says."""
    try:
        code = json.loads(run.exit_mark(attempt).read_text(encoding="utf-8"))["code"]
    except (OSError, ValueError, KeyError):
        return False
    return code == REFUSED and all(record.get("attempt") != attempt for record in last_records(run.metrics))


@dataclass(frozen=True)
class Restarts:
    """How a trainer that crashed is started again."""

    most: int = 0  # starts in a row without a new step
    first_wait: float = 0.0  # seconds before the first of them

    @classmethod
    def of(cls, config: RunConfig) -> Restarts:
        """As the run's settings say; none where every start is to be a fresh one."""
        return cls(retries_of(config), config.recover_after)


def follow(
    run: RunDirectory,
    argv: Sequence[str],
    attempt: int,
    progress: Progress,
    again: str,
    restarts: Restarts = Restarts(),
) -> RunOutcome:
    """Run the trainer to its end while showing what it records, and start it again where it crashed.

    Args:
        run: the run, which the caller holds.
        attempt: number of the first attempt, whose folder is there.
    """
    tail = MetricsTail(run.metrics)
    history = History(tail.read())  # of earlier attempts

    def poll() -> None:
        news = tail.read()
        history.extend(news)
        progress.show(history, news)

    def interrupted() -> None:
        doing = "the step under way is finished, then a recover checkpoint is written"
        if history.is_closing:
            doing = "the measurement of held-out tasks is given up"
        elif history.is_before_first_step:
            doing = f"a measurement of held-out tasks is given up, or {doing}"
        progress.say(f"stopping: {doing}; interrupt again to kill the trainer at once")

    ends: list[Ended] = []
    with noting_signals() as noted:
        while True:
            before, began = last_step(run.metrics), time.time()
            ending = run_trainer(argv, run.console(attempt), attempt, poll, interrupted, noted)
            outcome = replace(_outcome(run, attempt, ending, history, again), stopped=ending.interrupts > 0)
            if outcome.status not in ("failed", "killed"):
                told = history.finish is not None and history.finish.get("attempt") == attempt
                if outcome.status == "interrupted" and not told:  # during its imports, or killed by a second signal
                    _record_interruption(
                        run, attempt, ending.returncode, began, before, f"interrupted: {recover_text(run, history)}"
                    )
                return replace(outcome, stopped=outcome.stopped or noted() > 0)
            ends.append(ended(run.metrics, attempt, ending.returncode, before))
            verdict = judge(ends, restarts.most, restarts.first_wait)
            taken_before = ends[-1].code == REFUSED and len(ends) > 1
            again_wanted = restarts.most and not outcome.stopped
            wait = verdict.wait if again_wanted and (ends[-1].crash or taken_before) else None
            command = origin_environment()["CLUSTERKIT_COMMAND"]
            mark = end_mark(ends[-1], began, command, stopping=outcome.stopped)
            _record_end(run, attempt, mark, wait)
            if wait is None:
                outcome = replace(outcome, stopped=outcome.stopped or noted() > 0)
                break
            message = f"the trainer died ({ends[-1].message}): {verdict.reason}; {recover_text(run, history)}"
            progress.say(f"{message}. Ctrl-C stops here")
            _record_warning(run, attempt, message)
            if wait_or_signal(wait, noted):
                _record_end(run, attempt, mark, None)
                kept = f"interrupted while waiting to start the trainer again: {recover_text(run, history)}"
                return RunOutcome("interrupted", 130, f"{kept}\nTo go on: {again}", None, history.global_step)
            attempt = new_attempt(run)
    reasons = explain_failure(run, killed=ending.returncode == -signal.SIGKILL)
    if len(ends) > 1:
        reasons = [
            f"It was started {len(ends)} times: {verdict.reason or 'this error is not one that passes'}.",
            *reasons,
        ]
    return replace(outcome, message="\n".join([outcome.message, *reasons]))


def _record_end(run: RunDirectory, attempt: int, mark: dict[str, Any], wait: float | None) -> None:
    """Keep how an attempt ended, as a dispatched one does: a signal leaves no other trace.

    Args:
        wait: seconds until the next start; None: there is none.
    """
    with suppress(OSError):  # a full disk
        write_atomic(run.exit_mark(attempt), json.dumps({**mark, "restart_s": wait}))


def _record_interruption(run: RunDirectory, attempt: int, code: int, began: float, before: int, message: str) -> None:
    """Tell, in the words of a trainer that was interrupted, of one that could not do so itself.

    Args:
        code: how it ended.
        began: Unix seconds.
        before: last step of earlier attempts.
    """
    command = origin_environment()["CLUSTERKIT_COMMAND"]
    end = ended(run.metrics, attempt, code, before)
    record = {"kind": "finish", "time": time.time(), "attempt": attempt, "status": "interrupted"}
    record |= {"global_step": end.step, "message": message, "crashed": False, "command": command}
    with suppress(OSError):  # a full disk
        append_line(run.metrics, json.dumps(record))
    _record_end(run, attempt, end_mark(end, began, command), None)


def _record_warning(run: RunDirectory, attempt: int, message: str) -> None:
    """Tell it in the run's log and numbers, which no trainer writes now; a full disk takes neither."""
    now = time.time()
    record = {"kind": "warning", "time": now, "attempt": attempt, "message": message}
    stamp = f"{time.strftime('%Y%m%d-%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d}"
    lines = {run.metrics: json.dumps(record), run.logs / "main.log": f"{stamp} clusterkit WARNING: {message}"}
    for path, line in lines.items():
        with suppress(OSError):
            append_line(path, line)


def _outcome(run: RunDirectory, attempt: int, ending: Ending, history: History, again: str) -> RunOutcome:
    code, console, step = ending.returncode, run.console(attempt), history.global_step
    on = f"To go on: {again}"
    if code == 0:
        return RunOutcome("completed", 0, "", read_summary(run), step)
    message = failure_message(console)
    finish = history.finish or {}
    told = finish.get("attempt") == attempt and finish.get("status") == "interrupted"
    if code == 130 or ending.by_interrupt or (code < 0 and told):
        kept = (
            message.removeprefix("error: ") if message and code == 130 else f"interrupted: {recover_text(run, history)}"
        )
        return RunOutcome("interrupted", 130, f"{kept}\n{on}", None, step)
    if code < 0:
        name = _signal_name(-code)
        often = " (often the kernel, out of memory, or kill -9)" if -code == signal.SIGKILL else ""
        stopping = " while it stopped" if ending.interrupts else ""
        text = f"the trainer was ended by signal {-code}, {name}{often}{stopping}; {recover_text(run, history)}"
        return RunOutcome("killed", 1, f"{text}.{_tail_text(run, attempt)}\n{on}", None, step)
    if message is None:
        without = "and no message"
        if is_full(run.logs):
            without = f"and there was no room for its message under {run.logs}: free some space there. "
            without += disk_of(run.logs)
        text = f"the trainer ended with code {code} {without}; {recover_text(run, history)}"
        return RunOutcome("failed", 1, f"{text}.{_tail_text(run, attempt)}\n{on}", None, step)
    return RunOutcome("failed", code if code in (1, 2) else 1, message, None, step)


def _tail_text(run: RunDirectory, attempt: int) -> str:
    lines = last_lines(run.console(attempt), SHOWN_CONSOLE_LINES)
    if not lines:
        return f" It printed nothing. Its log: {run.logs / 'main.log'}"
    return f" Its last lines ({run.console(attempt)}):\n" + "\n".join(f"  {line}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
