"""Start a run on a cluster, or attach to it where the same run is at work already."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit.backends.ray.jobs import DuplicateJobError, RayJob, RayJobs, jobs_of, origin, submit_or_attach
from clusterkit.backends.ray.storage import cache_of, drop_config, fetch_records, fileroot_of, put_code, put_config
from clusterkit.common.node_code import content_of
from clusterkit.hosts.model import Cluster
from clusterkit.provision.ray.ports import Ports
from clusterkit.runs.diagnose.applied import with_applied
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.trials import TrialState, choose_trial, completed_trial
from clusterkit.ssh.api import Session
from trainer.config import RunConfig
from trainer.errors import RunError, UserError

START_SECONDS = 180.0
STOP_SECONDS = 1800
POLL_SECONDS = 0.5
_KIND = "clusterkit-train"


@dataclass(frozen=True)
class RunRequest:
    """What to run where.

    config: resolved, with the paths of the cluster. named: the user chose the trial's name. once: do not start a new
    trial where the same run is complete. own_code: files of the user's own classes, path and content.
    """

    cluster: Cluster
    config: RunConfig
    named: bool = False
    once: bool = False
    own_code: tuple[tuple[str, bytes], ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of what defines the run, the same for the same command."""
        plain = fingerprint_of(self.config, self.named)
        return content_of(self.own_code, plain)[:16] if self.own_code else plain  # other code is another run


@dataclass(frozen=True)
class SubmittedRun:
    """What came of it. state: started, attached (it runs already) or complete (nothing is left to train)."""

    state: str
    run: RunDirectory
    submission_id: str = ""
    resume_step: int = 0

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
        name = f"{self.run.experiment}/{self.run.trial}"
        if self.state == "complete":
            return f"{name} is complete: nothing is left to train"
        if self.state == "attached":
            return f"{name} is being trained already, as job {self.submission_id}"
        after = f", going on after step {self.resume_step}" if self.resume_step else ""
        return f"training {name}{after}, as job {self.submission_id}"


def fingerprint_of(config: RunConfig, named: bool) -> str:
    """Hash of a resolved configuration, without the trial's name where that is not the user's choice."""
    values = config.model_dump(mode="json", exclude=None if named else {"trial_name"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def on_cluster(config: RunConfig, cluster: Cluster, own_fileroot: bool = False) -> RunConfig:
    """The configuration with the cluster's paths for runs and caches. own_fileroot: the user chose where runs lie.

    Raises:
        UserError: the chosen place is not on the storage that all hosts share.

    """
    fileroot = config.fileroot if own_fileroot else fileroot_of(cluster)
    if Path(cluster.storage) not in Path(fileroot).parents:
        raise UserError(f"fileroot={fileroot} is not below {cluster.storage}, which is all that the hosts share")
    places = {"mode": "ray", "fileroot": fileroot, "cache_dir": config.cache_dir or cache_of(cluster)}
    places["code_dir"] = ""  # the user's files are packed beside ours, where PYTHONPATH leads
    return config.model_copy(update=places)


async def dispatch(
    head: Session,
    order: RunRequest,
    token: str,
    *,
    ports: Ports | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SubmittedRun:
    """Start the run on the cluster; where the same run is alive, attach to it instead.

    Args:
        head: connection to the head node. order: what to run. token: of the cluster's Ray. ports: of its Ray.
        say: told what is being done.

    Raises:
        UserError: an unfinished run of other settings stands in the way, or another run has the trial.
        RunError: Ray refused the job, or it ended at once. HostError: the head was lost.

    """
    async with jobs_of(head, token, ports) as jobs:
        return await submit_or_attach(
            lambda: _dispatch(head, order, jobs, say),
            f"{head.host.name}: others keep submitting the same run; look with clusterkit ray-status",
        )


async def _dispatch(head: Session, order: RunRequest, jobs: RayJobs, say: Callable[[str], None]) -> SubmittedRun:
    config, user = order.config, user_name()
    known = [job for job in await jobs.all() if _belongs(job, user, config.experiment_name)]
    alive = [job for job in known if job.alive]
    for job in alive:
        if job.metadata.get("fingerprint") == order.fingerprint:
            return SubmittedRun("attached", _run_of(config, user, job.metadata["trial"]), job.submission_id)
    _refuse_busy(order, alive)
    say("looking at earlier runs")
    with tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
        await fetch_records(head, config.fileroot, user, config.experiment_name, Path(folder))
        here = config.model_copy(update={"fileroot": folder})
        if order.once and not order.named and (done := completed_trial(here)) is not None:
            return SubmittedRun("complete", _run_of(config, user, done.trial))
        try:
            trial = choose_trial(here, order.named)
            if trial.state is TrialState.COMPLETE:
                return SubmittedRun("complete", _run_of(config, user, trial.run.trial))
            config, notes = with_applied(config, trial.run)
            resume_step = trial.resume_step  # as long as the copy is there to look at
        except UserError as error:
            raise UserError(str(error).replace(folder, config.fileroot)) from None
    for note in notes:
        say(f"note: {note.replace(folder, config.fileroot)}")
    run = _run_of(config, user, trial.run.trial)
    say("sending code and configuration")
    code = await put_code(head, order.cluster, order.own_code)
    submitted, digest = await put_config(head, run, config.model_copy(update={"trial_name": run.trial}))
    prefix = f"{user}-{run.experiment}-{run.trial}-"
    numbers = [job.submission_id.removeprefix(prefix) for job in known if job.submission_id.startswith(prefix)]
    submission_id = f"{prefix}{max((int(n) for n in numbers if n.isdigit()), default=0) + 1}"
    say("submitting the job")
    try:
        await jobs.submit(
            submission_id,
            f"exec python3 -m trainer.launch.job {shlex.quote(str(run.config))} {shlex.quote(str(submitted))} {digest}",
            # The user's name, not the container's: runs of several people on one cluster lie beside each other.
            environment={
                "PYTHONPATH": code,
                "USER": user,
                "LOGNAME": user,
                # So long may a stopped run write its recover checkpoint before Ray kills it; Ray's own limit is 3 s.
                "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
            },
            metadata={
                "kind": _KIND,
                "user": user,
                "experiment": run.experiment,
                "trial": run.trial,
                "fingerprint": order.fingerprint,
                "run_dir": str(run.logs),
                **origin(),
            },
        )
    except DuplicateJobError:  # another command has the trial now, with settings that need not be ours
        await drop_config(head, submitted)
        raise
    say("waiting for the trainer to begin")
    await _begun(head, jobs, submission_id, run, submitted)
    return SubmittedRun("started", run, submission_id, resume_step)


def _belongs(job: RayJob, user: str, experiment: str) -> bool:
    data = job.metadata
    return (data.get("kind"), data.get("user"), data.get("experiment")) == (_KIND, user, experiment)


def _refuse_busy(order: RunRequest, alive: list[RayJob]) -> None:
    """Another run of the same experiment with other settings: beside it only under a name of its own."""
    for job in alive:
        trial = job.metadata.get("trial", "")
        if not order.named or trial == order.config.trial_name:
            raise UserError(
                f"{order.config.experiment_name}/{trial} is being trained with other settings, as job "
                f"{job.submission_id}. To train beside it: add trial_name=NEW"
            )


def _run_of(config: RunConfig, user: str, trial: str) -> RunDirectory:
    return RunDirectory(Path(config.fileroot), user, config.experiment_name, trial)


async def _begun(head: Session, jobs: RayJobs, submission_id: str, run: RunDirectory, submitted: Path) -> None:
    """Wait until the trainer has opened its log: Ray calls a job running whose first import is yet to fail.

    Raises:
        RunError: it ended before that, with its last lines, or it takes too long.

    """
    loop = asyncio.get_running_loop()
    end = loop.time() + START_SECONDS
    begun = f"[ {shlex.quote(str(run.logs / 'main.log'))} -nt {shlex.quote(str(submitted))} ]"
    while True:
        job = await jobs.get(submission_id)
        if job.status == "SUCCEEDED" or (await head.run(begun, root=True)).ok:
            return
        if not job.alive:
            lines = (await jobs.logs(submission_id)).strip().splitlines()[-8:]
            told = "\n".join(f"  {line}" for line in lines)
            raise RunError(f"job {submission_id} ended at once ({job.status}): {job.message}\n{told}".rstrip())
        if loop.time() > end:
            raise RunError(
                f"job {submission_id} has not begun to train within {START_SECONDS:.0f} s ({job.status} "
                f"{job.message}): clusterkit ray-status shows whether the head node is alive and what else runs"
            )
        await asyncio.sleep(POLL_SECONDS)
