"""The trials of a sweep: one after another on this machine, as jobs on a cluster or Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from clusterkit.backends.base import Backend, RunRequest, SubmittedRun
from clusterkit.ui import output
from clusterkit.ui.progress import showing
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError, RunError, UserError

MOST_JOBS = 16
"""Jobs of a sweep that wait or run at once: each that waits is a process on the cluster's head node."""
POLL_SECONDS = 5.0
MOST_TRIES = 4
"""Of a submission, where the place does not answer."""
RETRY_SECONDS = 10.0
"""Until the second try; twice as long until each further one."""


@dataclass(frozen=True)
class SweptRun:
    """One trial of a sweep, checked."""

    request: RunRequest
    plan: str  # where it begins, in one sentence
    complete: bool  # nothing is left to train
    stored: tuple[str, ...] = ()  # how the storage of its place has its model and data, a sentence each

    @property
    def name(self) -> str:
        """`EXPERIMENT/TRIAL`."""
        return f"{self.request.config.experiment_name}/{self.request.config.trial_name}"


def train_in_turn(backend: Backend, runs: Sequence[SweptRun], again: str, *, shown: bool) -> str:
    """Train on this machine what is not complete. One that fails does not keep the others from being trained.

    Returns how to go on after Ctrl-C; empty where all have ended.
    """
    for number, run in enumerate(runs, 1):
        output.note(f"[{number} of {len(runs)}] {run.plan}")
        if run.complete:
            continue
        try:
            submitted = backend.start(backend.plan(run.request))
            with showing(run.name, shown) as progress:
                outcome = backend.follow(submitted, progress, again)
        except (KeyboardInterrupt, InterruptedRunError):
            return f"interrupted before {run.name} was trained\nTo go on: {again}"
        except UserError as error:
            output.error(f"{run.name}: {error}")
            continue
        if outcome.status == "interrupted" or (outcome.stopped and outcome.exit_code):
            return outcome.message
        if outcome.stopped and number < len(runs):
            return f"interrupted when {run.name} was trained\nTo go on: {again}"
        if outcome.exit_code:
            output.error(f"{run.name}: {outcome.message.removeprefix('error: ')}")
    return ""


def submit_all(backend: Backend, runs: Sequence[SweptRun], again: str, *, detach: bool) -> str:
    """Have a job for every trial that is not complete, and wait until all have ended.

    Returns what goes on without us; empty where all have ended.
    """
    for run in runs:
        if run.complete:
            output.note(run.plan)
    waiting = [run for run in runs if not run.complete]
    most = jobs_at_once(backend.place.mode, [run.request.config for run in waiting])
    submitter, alive = _Submitter(backend), dict[str, SweptRun]()
    with suppress(KeyboardInterrupt):
        while waiting or alive:
            while waiting and len(alive) < most:
                submitted = submitter.submit(waiting[0])
                run = waiting.pop(0)
                if submitted is not None and submitted.submission_id:
                    alive[submitted.submission_id] = run
            if detach:
                break
            time.sleep(POLL_SECONDS)
            for ended in _ended(backend, alive):
                run = alive.pop(ended)
                output.note(f"{run.name} has ended; {len(alive) + len(waiting)} of the trials are left")
    if not waiting and not alive:
        return ""
    jobs = "1 job is" if len(alive) == 1 else f"{len(alive)} jobs are"
    parts = [f"{jobs} at work {backend.where}, without this command"]
    if waiting:
        parts.append(f"not submitted yet: {', '.join(run.name for run in waiting)}")
    return f"{'; '.join(parts)}\nTo submit what is left, and to wait for the table: {again}"


def jobs_at_once(mode: str, configs: Sequence[RunConfig]) -> int:
    """How many jobs may wait or run together.

    On Ray, ranks and engine servers with GPUs of their own are placed one after the other: two jobs that wait could
    each hold what the other one needs. Slurm gives a job all its nodes at once.
    """
    if mode != "ray":
        return max(len(configs), 1)
    apart = [one for one in configs if (it := one.allocation) is not None and it.rollout_gpus and not it.colocated]
    return 1 if apart else MOST_JOBS


class _Submitter:
    """Submits trials; tries again where the place does not answer, and once only after it has not for all tries."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._most = backend, MOST_TRIES

    def submit(self, run: SweptRun) -> SubmittedRun | None:
        """Start a trial or attach to it; None, with the reason on stderr, where that is not possible."""
        tries = 0
        while True:
            try:
                # What an earlier try may have submitted is attached to.
                submitted = self._backend.attach(run.request) or self._backend.start(self._backend.plan(run.request))
            except RunError as error:
                if not error.no_answer:
                    output.error(f"{run.name}: {error}")
                    return None
                tries += 1
                if tries >= self._most:
                    times = "once" if tries == 1 else f"{tries} times"
                    output.error(f"{run.name}: {error}\nIt was tried {times}; the same command tries it again")
                    self._most = 1
                    return None
                seconds = RETRY_SECONDS * 2 ** (tries - 1)
                first = str(error).splitlines()[0]
                output.note(f"{run.name} is not submitted ({first}); trying again in {seconds:.0f} s")
                time.sleep(seconds)
            except UserError as error:
                output.error(f"{run.name}: {error}")
                return None
            else:
                self._most = MOST_TRIES
                output.note(f"{submitted.sentence} {self._backend.where}")
                return submitted


def _ended(backend: Backend, alive: dict[str, SweptRun]) -> list[str]:
    """Jobs that have ended; none where the place does not answer for now."""
    try:
        known = {job.submission_id for job in backend.jobs() if job.alive}
    except RunError as error:
        output.note(f"cannot see the jobs for now ({str(error).splitlines()[0]}); trying again; they go on without us")
        return []
    return [submission_id for submission_id in alive if submission_id not in known]
