"""Watch a run on Slurm until its job ends: its records lie on the shared file system, its state in the queue."""

from __future__ import annotations

import time

from clusterkit.backends.local.train import RunOutcome
from clusterkit.backends.ray.submit import SubmittedRun
from clusterkit.runs.final_evaluation import read_summary
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.slurm.commands import SlurmError
from clusterkit.runs.slurm.queue import FOLDER, SlurmJob, find_job
from clusterkit.runs.slurm.queue_state import startup_failure, waiting_text
from clusterkit.ui.progress import Progress

POLL_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""Between questions to the controller."""


def follow(dispatched: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
    """Show the run until its job ends, and say how that was.

    Args:
        dispatched: the run. progress: where to show it. again: the command that goes on with it.

    """
    run, number = dispatched.run, dispatched.submission_id
    tail, history, told, asked = MetricsTail(run.metrics), History(), "", 0.0
    job: SlurmJob | None = None
    known = dispatched.state == "attached" or dispatched.resume_step > 0  # what was written before is no news
    while True:
        alive = True
        if time.monotonic() - asked > LOOK_SECONDS:
            asked = time.monotonic()
            try:
                job = find_job(number)
                alive = job is not None and job.alive
                said = waiting_text(job) if job is not None and job.waiting else ""
            except SlurmError as error:
                said = f"{error}; trying again, the run goes on without us"
            if said and said != told:
                progress.say(said)
            told = said
        news = tail.read()
        for record in news:
            history.add(record)
        progress.show(history, [] if known else news)
        known = False
        if not alive:
            return _outcome(dispatched, history, job, again)
        time.sleep(POLL_SECONDS)


def _outcome(dispatched: SubmittedRun, history: History, job: SlurmJob | None, again: str) -> RunOutcome:
    """How it ended: by the run's own last record, where Slurm's word on the job does not contradict it."""
    run, number = dispatched.run, dispatched.submission_id
    finish = history.finish or {}
    status, step, on = str(finish.get("status") or "killed"), history.global_step, f"To go on: {again}"
    ended = "forgotten by Slurm" if job is None else job.state
    if status == "completed" and (job is None or job.state == "COMPLETED"):
        return RunOutcome("completed", 0, "", read_summary(run), step)
    if status == "interrupted":
        return RunOutcome("interrupted", 130, f"{finish.get('message')}\n{on}", None, step)
    said = str(finish.get("message") or "") if status == "failed" else ""
    log = run.logs / FOLDER / f"job_{number}.log"
    why = said or f"job {number} ended ({ended}); what it printed is in {log}"
    if not run.attempt_numbers() and log.exists():
        why = f"{startup_failure(log)}\nSlurm's word: {ended}"
    return RunOutcome("failed" if said else "killed", 1, f"{why}\n{on}", None, step)
