"""Watch a run on Slurm until its job ends: its records lie on the shared file system, its state in the queue."""

from __future__ import annotations

import time

from clusterkit.backends.base import RunOutcome, SubmittedRun, outcome_of_job
from clusterkit.runs.final_evaluation import read_summary
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.slurm.commands import SlurmError
from clusterkit.runs.slurm.queue import FOLDER, SlurmJob, find_job
from clusterkit.runs.slurm.queue_state import startup_failure, waiting_text
from clusterkit.ui.progress import Progress

POLL_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""Between questions to the controller."""


def follow(submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
    """See `Backend.follow`."""
    run, number = submitted.run, submitted.submission_id
    tail, history, told, asked = MetricsTail(run.metrics), History(), "", 0.0
    job: SlurmJob | None = None
    known = submitted.knows_records
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
            return _outcome(submitted, history, job, again)
        time.sleep(POLL_SECONDS)


def _outcome(submitted: SubmittedRun, history: History, job: SlurmJob | None, again: str) -> RunOutcome:
    run, number = submitted.run, submitted.submission_id
    state = "forgotten by Slurm" if job is None else job.state
    log = run.logs / FOLDER / f"job_{number}.log"
    ended = f"job {number} ended ({state}); what it printed is in {log}"
    if not run.attempt_numbers() and log.exists():
        ended = f"{startup_failure(log)}\nSlurm's word: {state}"
    done = job is None or job.state == "COMPLETED"
    return outcome_of_job(history, done=done, ended=ended, summary=lambda: read_summary(run), again=again)
