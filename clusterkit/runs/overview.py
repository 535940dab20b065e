"""How all runs of a folder are doing, from the ends of their files: quick for hundreds of runs of any length."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clusterkit.common.text_plot import iso_time
from clusterkit.runs.directory import RunDirectory, require_listable, runs
from clusterkit.runs.log.metrics import History, newest_history, number, score_name
from clusterkit.runs.slurm.queue import was_submitted
from clusterkit.runs.status import ENDED, UNREADABLE, Status, observe
from clusterkit.runs.train_command import recorded_command

NAMES = {"experiment_name", "trial_name", "fileroot", "cache_dir", "code_dir"}
"""Settings that say where a run is, not what it does."""


@dataclass(frozen=True)
class RunOverview:
    """One run among many."""

    run: RunDirectory
    state: str  # as in `Status`, or unreadable, or submitted (to Slurm, which was not asked)
    message: str = ""  # the reason of the state, where there is one
    global_step: int = 0  # its last step
    total_steps: int = 0  # planned steps; 0 if unknown
    eta: float | None = None  # seconds to its last step; None unless it is alive
    left: float | None = None  # seconds to its end, as `Status.left`
    reward: float | None = None  # task_reward of its last step
    loss: float | None = None  # of its last held-out evaluation, or of its last step, where it learns from examples
    accuracy: float | None = None  # of its last held-out evaluation, 0…1
    score_name: str | None = None  # what that is: accuracy, F1 or score; None without an evaluation
    started: float | None = None  # Unix seconds of its last start
    last_record: float | None = None  # Unix seconds of its newest record
    settings: dict[str, Any] = field(default_factory=dict)  # its configuration, by dotted key
    problems: tuple[str, ...] = ()  # what is damaged in its folder
    again: str = ""  # the command that goes on with a run of this machine; empty where the end of its records has none

    @property
    def name(self) -> str:
        """`EXPERIMENT/TRIAL`."""
        return self.run.name

    @property
    def alive(self) -> bool:
        """Whether something works on it, or it waits for nodes."""
        return self.state in ("pending", "running", "stalled")

    def as_dict(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the shape of `clusterkit runs --json`. keys: the settings to have in it."""
        return {
            "experiment": self.run.experiment,
            "trial": self.run.trial,
            "user": self.run.user,
            "run_dir": str(self.run.logs),
            "state": self.state,
            "message": self.message,
            "global_step": self.global_step,
            "total_steps": self.total_steps or None,
            "eta_s": self.eta,
            "left_s": self.left,
            "reward": self.reward,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "score_name": self.score_name,
            "started": None if self.started is None else iso_time(self.started),
            "last_record": None if self.last_record is None else iso_time(self.last_record),
            "settings": {key: self.settings[key] for key in keys if key in self.settings},
            "problems": list(self.problems),
        }


def overviews(
    fileroot: Path,
    experiment: str | None = None,
    trial: str | None = None,
    user: str | None = None,
    *,
    ask_queue: bool = True,
) -> Iterator[RunOverview]:
    """Yield the runs of a user (None: of this one), the one that was started last first.

    Args:
        experiment: a name or a pattern such as `tiny-*`; None for any.
        trial: the same.
        ask_queue: ask Slurm about its jobs; without that, the state of one that has not ended is `submitted`.
    """
    require_listable(fileroot, user)
    now = time.time()
    for run in reversed(runs(fileroot, user=user)):
        if fnmatchcase(run.experiment, experiment or "*") and fnmatchcase(run.trial, trial or "*"):
            yield overview(run, now, ask_queue=ask_queue)


def overview(run: RunDirectory, now: float, *, ask_queue: bool = True) -> RunOverview:
    """Look at one run. A damaged folder is no error: what is wrong with it is in `problems`.

    Args:
        now: Unix seconds.
        ask_queue: see `overviews`.
    """
    started = None
    with suppress(OSError):  # every start writes it
        started = run.config.stat().st_mtime
    try:
        settings, problems = _settings(run)
        history, damaged = newest_history(run.metrics, evaluates=settings.get("eval.every_steps") != 0)
        seen = observe(run, now, history) if ask_queue or not was_submitted(run) else _recorded(run, now, history)
    except OSError as error:
        reason = f"{error.filename or run.logs} cannot be read: {error.strerror}"
        return RunOverview(run, UNREADABLE, reason, started=started, problems=(reason,))
    if damaged and not (history.steps or history.attempts or history.last_time):
        problems.append(f"{run.metrics} has no readable record")
    last = history.steps[-1] if history.steps else {}
    measured = history.held_out[-1] if history.held_out else {}
    stats = last.get("stats") or {}
    loss, accuracy = number(measured, "loss"), number(measured, "accuracy")
    return RunOverview(
        run,
        seen.state,
        seen.message,
        history.global_step,
        seen.total_steps,
        seen.eta if seen.alive else None,
        seen.left,
        number(stats, "task_reward"),
        number(stats, "loss") if loss is None else loss,
        accuracy,
        None if accuracy is None else score_name(measured),
        started,
        history.last_time,
        settings,
        tuple(problems),
        recorded_command(history, run),
    )


def differing(listed: Sequence[RunOverview]) -> list[str]:
    """Return the settings in which runs of one experiment differ, in the order of the configuration.

    Runs of different experiments differ in what their presets say. A setting that a run does not have, because it is
    of another version or task, is no difference.
    """
    values: dict[tuple[str, str], set[str]] = {}
    for one in listed:
        for key, value in one.settings.items():
            values.setdefault((key, one.run.experiment), set()).add(json.dumps(value, sort_keys=True, default=str))
    return list(dict.fromkeys(key for (key, _), found in values.items() if len(found) > 1 and key not in NAMES))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _recorded(run: RunDirectory, now: float, history: History) -> Status:
    """Return what a run of Slurm says itself."""
    finish = {"status": "submitted"} if history.finish is None or run.restart_waits else history.finish
    state = str(finish.get("status"))
    return Status(run, history, ENDED.get(state, state), "", None, history.total_steps, now)


def _settings(run: RunDirectory) -> tuple[dict[str, Any], list[str]]:
    """Return a run's settings, and what is wrong with the file that has them."""
    values, problem = run.read_config()
    settings = flat(values)
    if settings or problem:
        return settings, [problem] if problem else []
    started = bool(run.attempt_numbers()) or run.metrics.exists()
    return {}, [f"{run.config} is missing"] if started else []
