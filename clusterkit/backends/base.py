"""The interface of a place where runs live (`Backend`), and what passes between it and the commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from clusterkit.backends.records import Runs
from clusterkit.common.node_code import content_of
from clusterkit.runs.diagnose.applied import with_applied
from clusterkit.runs.directory import RUNS as RUNS  # noqa: PLC0414 (backends and commands have it from here)
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.directory import folder_of_runs as folder_of_runs  # noqa: PLC0414
from clusterkit.runs.final_evaluation import read_summary
from clusterkit.runs.log.metrics import History, read_history
from clusterkit.runs.trials import Trial, TrialState
from trainer.config import RunConfig
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.provision.assets.model import NodeAsset
    from clusterkit.ssh.host_options import HostOptions
    from clusterkit.ui.progress import Progress

ALIVE = ("PENDING", "RUNNING")
"""States of a job that has not ended."""

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a command goes."""

    mode: str = "local"  # key of `clusterkit.backends.table.BACKENDS`
    hosts: HostOptions | None = None  # how the hosts of a cluster are reached; None for this machine
    fileroot: str | None = None  # --fileroot as typed; None for the place's own
    options: object = None  # what the place itself is asked for, such as `SlurmOptions`


@dataclass(frozen=True)
class RunSelector:
    """Which run a command means: the newest, or the one that is alive, among those that fit."""

    experiment: str | None = None  # its experiment; None for any
    trial: str | None = None  # its trial; None for any
    user: str | None = None  # whose; None for our own
    fileroot: str | None = None  # the folder of runs that it is in; None for the place's own

    def __str__(self) -> str:
        return f"{self.experiment or '*'}/{self.trial or '*'}"


@dataclass(frozen=True)
class LogName:
    """Which of a run's logs: main.log, or what the newest attempt, one of its ranks or an engine server printed."""

    console: bool = False
    rank: int | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        typed = {"--console": self.console, "--rank": self.rank is not None, "--engine": self.engine is not None}
        if len(named := [name for name, is_typed in typed.items() if is_typed]) > 1:
            raise UserError(f"{' and '.join(named)} are different logs: choose one")
        if self.engine is not None and ("/" in self.engine or self.engine.startswith(".")):
            raise UserError(f"--engine {self.engine}: give a server's name or number; clusterkit serve list shows them")

    def path(self, run: RunDirectory, attempt: int) -> Path:
        """The file of a run whose newest attempt has that number."""
        if self.engine is not None:
            name = f"server-{self.engine}" if self.engine.isdigit() else self.engine
            return run.logs / "servers" / f"{name}.log"
        if self.rank is not None:
            return run.logs / f"attempt_{attempt}" / f"rank_{self.rank}.log"
        return run.console(attempt) if self.console else run.logs / "main.log"


@dataclass(frozen=True)
class RunRequest:
    """A run as it was typed, resolved for its place."""

    config: RunConfig  # with the paths of the place
    named: bool = False  # the user chose the trial's name
    once: bool = False  # do not start a new trial where the same run is complete
    own_code: tuple[tuple[str, bytes], ...] = ()  # files of the user's own classes to be sent along, path and content
    typed: RunConfig | None = None  # the configuration with the paths of this machine; `config` where that is the same
    assets: tuple[NodeAsset, ...] = ()  # models and data sets that the place has to have

    @property
    def fingerprint(self) -> str:
        """Hash of what defines the run, the same for the same command."""
        values = self.config.model_dump(mode="json", exclude=None if self.named else {"trial_name"})
        plain = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        return content_of(self.own_code, plain)[:16] if self.own_code else plain  # other code is another run


@dataclass(frozen=True)
class StoredInput:
    """A model or data set of a run, as the storage of its place has it."""

    text: str
    problem: str = ""  # why a run would be refused for it; empty where it is there, or can be brought


@dataclass(frozen=True)
class PlannedRun:
    """What `start` would do; nothing is written yet."""

    request: RunRequest
    trial: Trial | None = None  # the trial that is meant; None where only the place knows
    facts: tuple[tuple[str, str], ...] = ()  # what `train --dry-run --json` tells of the place besides
    script: str = ""  # text of the batch script that would be submitted
    look: Callable[[], Sequence[StoredInput]] = tuple
    """Asks the place for the models and data that the run needs. Raises UserError where it cannot be asked."""


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was started."""

    state: str  # started, attached (it runs already) or complete (nothing is left to train)
    run: RunDirectory  # its folder, as the place names it
    submission_id: str = ""  # its job, which goes on without us; empty where the command itself trains
    resume_step: int = 0  # the step after which it goes on; 0 for the beginning

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "state": self.state,
            "experiment": self.run.experiment,
            "trial": self.run.trial,
            "run_dir": str(self.run.logs),
            "submission_id": self.submission_id,
            "resume_step": self.resume_step,
        }

    @property
    def sentence(self) -> str:
        """For people."""
        name = self.run.name
        if self.state == "complete":
            return f"{name} is complete: nothing is left to train"
        if self.state == "attached":
            return f"{name} is being trained already, as job {self.submission_id}"
        after = f", going on after step {self.resume_step}" if self.resume_step else ""
        return f"training {name}{after}" + (f", as job {self.submission_id}" if self.submission_id else "")

    @property
    def knows_records(self) -> bool:
        """Whether records were written before this command, which are no news to it."""
        return self.state == "attached" or self.resume_step > 0


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    status: str  # completed, interrupted, failed or killed
    exit_code: int  # of the command
    message: str  # what to tell on stderr
    summary: dict[str, Any] | None  # its closing table, where it has one
    global_step: int  # its last step
    stopped: bool = False  # this command was told to end, which a trainer may answer in any way

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


@dataclass(frozen=True)
class StoppedRun:
    """A run that was ended. The fields are those of `clusterkit stop --json`."""

    run: str  # its name
    forced: bool  # it was given no time for a recover checkpoint, or took too long for it
    message: str  # how that went, and what the same train command does now


@dataclass(frozen=True)
class Observation:
    """One look at a run and its place."""

    facts: dict[str, Any]  # for --json
    lines: list[str]  # for people
    exit_code: int  # of `clusterkit status`
    over: bool  # whether nothing will change any more


@dataclass(frozen=True)
class Log:
    """A log file of a run. Both functions raise RunError where it cannot be read."""

    path: Path  # as the place names it
    size: Callable[[], int]  # gives the bytes that it has now
    read: Callable[[int, int], bytes]  # gives at most so many bytes from an offset on; fewer only at its end


@dataclass(frozen=True)
class Job:
    """What a place works on, or has worked on. The fields are those of `clusterkit jobs --json`."""

    submission_id: str  # names it there: an ID, a number, `process 123`
    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED
    message: str = ""  # why it is so, in the place's words
    started: float | None = None  # Unix seconds; None where it has not been
    ended: float | None = None  # Unix seconds; None where it has not
    user: str | None = None  # whose; None where that is not known
    submitted_from: str | None = None  # user and machine that submitted it
    experiment: str | None = None  # of its run; `eval` for an evaluation
    trial: str | None = None  # of its run; the name of an evaluation's folder
    run_dir: str | None = None  # folder of its run

    @property
    def alive(self) -> bool:
        """Whether it waits or runs."""
        return self.status in ALIVE

    @property
    def run(self) -> str:
        """`EXPERIMENT/TRIAL`, after the user's name where that is not ours."""
        name = f"{self.experiment or '-'}/{self.trial or '-'}"
        return name if self.user == user_name() else f"{self.user or 'somebody'}'s {name}"


class Backend(Protocol):
    """A place where runs live. It is entered for the length of a command; connections and locks are given back then.

    Attributes:
        where: names the place in sentences, such as `on cluster lab`; empty for this machine.
    """

    place: Place
    say: Say
    where: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def words(self, run: RunDirectory) -> str:
        """Words that name a run of this place in a command, itself first: `tiny-recall/run1 --cluster lab`."""

    def request(self, preset: str | None, task: str | None, settings: Sequence[str]) -> RunRequest:
        """Resolve what was typed for this place.

        Args:
            task: its name; None for the preset's own.

        Raises:
            UserError: a setting that is not allowed, or that this place cannot have.
        """

    def attach(self, request: RunRequest) -> SubmittedRun | None:
        """The same run, where it waits or is at work here and can be followed.

        Raises:
            UserError: another run of its experiment with other settings is. RunError: the place does not answer.
        """

    def plan(self, request: RunRequest) -> PlannedRun:
        """What `start` would do. Writes nothing.

        Raises:
            UserError: an unfinished run of other settings stands in the way.
        """

    def start(self, planned: PlannedRun) -> SubmittedRun:
        """Start the run, or attach to it where the same run has been started meanwhile.

        Raises:
            UserError: another run is in the way. RunError: the place refuses, or the run ended at once.
        """

    def follow(self, submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
        """Show a run until it ends. A Ctrl-C is raised as KeyboardInterrupt where the run goes on without us.

        Args:
            again: the command that goes on with it.
        """

    def stop(self, selector: RunSelector, *, deadline: float, force: bool) -> StoppedRun:
        """End the run that is alive.

        Args:
            deadline: seconds for its recover checkpoint, until it is ended by force.

        Raises:
            RunError: none is alive, or it cannot be ended. UserError: several are alive.
        """

    def log(self, selector: RunSelector, name: LogName, *, patient: bool = False) -> Log:
        """A log of the newest run.

        Args:
            patient: once it was found, wait where the place does not answer.

        Raises:
            RunError: there is no such run, or it cannot be read.
        """

    def status(self, selector: RunSelector) -> Observation:
        """Look at the newest run; again and again at the same one. Raises RunError where there is no such run."""

    def jobs(self) -> list[Job]:
        """What the place works on and, where it keeps that, has worked on, for all users; the oldest first.

        Only the runs in `Place.fileroot`, where that is given.
        """

    def runs(self, fileroot: str | None = None) -> Runs:
        """The place's runs as files of this machine, until the backend is left.

        Args:
            fileroot: where they lie; None for `Place.fileroot`.

        Raises:
            UserError: the place has no such folder.
        """


def applied(config: RunConfig, trial: Trial, say: Say) -> RunConfig:
    """A configuration with what `clusterkit diagnose --apply` left beside the run that it goes on with."""
    if trial.state is TrialState.COMPLETE:
        return config
    config, notes = with_applied(config, trial.run)
    for note in notes:
        say(f"note: {note}")
    return config


def completed(run: RunDirectory) -> RunOutcome:
    """The outcome of a run that was complete before this command."""
    return RunOutcome("completed", 0, "", read_summary(run), read_history(run.metrics).global_step)


def outcome_of_job(
    history: History, *, done: bool, ended: str, summary: Callable[[], dict[str, Any] | None], again: str
) -> RunOutcome:
    """How the run of a job ended: by its own last record, where the word of Ray or Slurm does not contradict it.

    Args:
        done: whether Ray or Slurm takes the job for a success.
        ended: how the job ended, for a run that says nothing itself.
        again: the command that goes on with it.
    """
    finish, step, on = history.finish or {}, history.global_step, f"To go on: {again}"
    status, message = str(finish.get("status") or "killed"), str(finish.get("message") or "")
    if status == "completed" and done:
        return RunOutcome("completed", 0, "", summary(), step)
    if status == "interrupted":
        return RunOutcome("interrupted", 130, f"{message}\n{on}", None, step)
    if status == "failed" and message:
        return RunOutcome("failed", 1, f"{message}\n{on}", None, step)
    return RunOutcome("killed", 1, f"{ended}\n{on}", None, step)
