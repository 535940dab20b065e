"""Start a run on a cluster, or attach to it where the same run is at work already."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from pathlib import Path

from clusterkit.backends.base import RunRequest, Say, SubmittedRun, applied
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.jobs import (
    TRAINS,
    DuplicateJobError,
    RayJob,
    RayJobs,
    matching_jobs,
    next_id,
    origin,
    submit_or_attach,
)
from clusterkit.backends.ray.storage import drop_config, fetch_records, put_code, put_config
from clusterkit.common.origin import origin_environment
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.trials import TrialState, choose_trial, completed_trial, run_directory
from clusterkit.ssh.api import Session
from trainer.errors import RunError, UserError

START_SECONDS = 180.0
STOP_SECONDS = 1800
POLL_SECONDS = 0.5


async def dispatch(head: Head, request: RunRequest, say: Say = lambda _: None) -> SubmittedRun:
    """Start the run on the cluster; where the same run is alive, attach to it instead.

    Raises:
        UserError: an unfinished run of other settings stands in the way, or another run has the trial.
        RunError: Ray refused the job, or it ended at once. HostError: the head was lost.
    """
    async with head.jobs() as jobs:
        return await submit_or_attach(
            lambda: _dispatch(head, request, jobs, say),
            f"{head.session.host.name}: others keep submitting the same run; look with clusterkit ray-status",
        )


def attach(request: RunRequest, jobs: list[RayJob]) -> SubmittedRun | None:
    """The same run among living jobs; see `Backend.attach`."""
    config = request.config
    mine = matching_jobs(jobs, user_name(), config.experiment_name, None)
    for job in mine:
        if job.metadata.get("fingerprint") == request.fingerprint:
            return SubmittedRun("attached", run_directory(config, job.metadata["trial"]), job.submission_id)
    for job in mine:
        trial = job.metadata.get("trial", "")
        if not request.named or trial == config.trial_name:
            raise UserError(
                f"{config.experiment_name}/{trial} is being trained with other settings, as job {job.submission_id}. "
                "To train beside it: add trial_name=NEW"
            )
    return None


async def _dispatch(head: Head, request: RunRequest, jobs: RayJobs, say: Say) -> SubmittedRun:
    config, user, session = request.config, user_name(), head.session
    known = await jobs.all()
    if (found := attach(request, known)) is not None:
        return found
    say("looking at earlier runs")
    with tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
        await fetch_records(session, config.fileroot, user, config.experiment_name, Path(folder))
        here = config.model_copy(update={"fileroot": folder})
        if request.once and not request.named and (done := completed_trial(here)) is not None:
            return SubmittedRun("complete", run_directory(config, done.trial))
        try:
            trial = choose_trial(here, request.named)
            run = run_directory(config, trial.run.trial)
            if trial.state is TrialState.COMPLETE:
                return SubmittedRun("complete", run)
            config = applied(config, trial, lambda text: say(text.replace(folder, config.fileroot)))
            resume_step = trial.resume_step  # as long as the copy is there to look at
        except UserError as error:
            raise UserError(str(error).replace(folder, config.fileroot)) from None
    say("sending code and configuration")
    code = await put_code(session, head.cluster, request.own_code)
    submitted, digest = await put_config(session, run, config.model_copy(update={"trial_name": run.trial}))
    submission_id = next_id(f"{user}-{run.experiment}-{run.trial}-", known)
    say("submitting the job")
    try:
        await jobs.submit(
            submission_id,
            f"exec python3 -m trainer.launch.job {shlex.quote(str(run.config))} {shlex.quote(str(submitted))} {digest}",
            # The user's name, not the container's: runs of several people on one cluster lie beside each other.
            environment={
                **origin_environment(),
                "PYTHONPATH": code,
                "USER": user,
                "LOGNAME": user,
                # So long may a stopped run write its recover checkpoint before Ray kills it; Ray's own limit is 3 s.
                "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
            },
            metadata={
                "kind": TRAINS,
                "user": user,
                "experiment": run.experiment,
                "trial": run.trial,
                "fingerprint": request.fingerprint,
                "run_dir": str(run.logs),
                **origin(),
            },
        )
    except DuplicateJobError:  # another command has the trial now, with settings that need not be ours
        await drop_config(session, submitted)
        raise
    say("waiting for the trainer to begin")
    try:
        await _wait_until_started(session, jobs, submission_id, run, submitted)
    except asyncio.CancelledError:  # Ctrl-C
        named = f"{run.word} --cluster {head.cluster.name}"
        say(f"job {submission_id} is submitted and goes on; to end it: clusterkit stop {named}")
        raise
    return SubmittedRun("started", run, submission_id, resume_step)


async def _wait_until_started(
    head: Session, jobs: RayJobs, submission_id: str, run: RunDirectory, submitted: Path
) -> None:
    """Wait until the trainer has opened its log: Ray calls a job running whose first import is yet to fail.

    Raises:
        RunError: it ended before that, with its last lines, or it takes too long.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + START_SECONDS
    has_started = f"[ {shlex.quote(str(run.logs / 'main.log'))} -nt {shlex.quote(str(submitted))} ]"
    while True:
        job = await jobs.get(submission_id)
        if job.status == "SUCCEEDED" or (await head.run(has_started, root=True)).ok:
            return
        if not job.alive:
            lines = (await jobs.logs(submission_id)).strip().splitlines()[-8:]
            shown = "\n".join(f"  {line}" for line in lines)
            raise RunError(f"job {submission_id} ended at once ({job.status}): {job.message}\n{shown}".rstrip())
        if loop.time() > end:
            raise RunError(
                f"job {submission_id} has not begun to train within {START_SECONDS:.0f} s ({job.status} "
                f"{job.message}): clusterkit ray-status shows whether the head node is alive and what else runs"
            )
        await asyncio.sleep(POLL_SECONDS)
