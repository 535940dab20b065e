"""End a run that is a job of a cluster's Ray."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from clusterkit.backends.ray.head import OnHead
from clusterkit.backends.ray.jobs import RayJob
from clusterkit.backends.stop import LiveRun
from clusterkit.hosts.model import Cluster
from clusterkit.provision import docker
from clusterkit.provision.ray.model import HEAD, LABEL_CLUSTER, LABEL_ROLE
from clusterkit.runs.directory import RunDirectory, resume_hint
from clusterkit.ssh.shell import first_of

KILL_SECONDS = 60.0


def job_run(cluster: Cluster, on_head: OnHead, job: RayJob) -> LiveRun:
    """A living run that is a Ray job. Its functions raise RunError where the cluster does not answer."""
    logs = Path(job.metadata["run_dir"])
    run = RunDirectory(logs.parents[3], *logs.parts[-3:])

    latest, started, done = (f"test -e {shlex.quote(str(path))}" for path in run.what_is_kept)

    def holds(test: str) -> bool:
        return on_head(lambda head: head.session.run(test, root=True)).ok

    # Ray waits as long as it was told when the job was submitted: only the processes themselves can be hurried.
    pattern = shlex.quote("trainer.* " + re.escape(f"{logs}/config.yaml"))
    kill = (
        first_of(docker.ps(f"label={LABEL_CLUSTER}={cluster.name}", f"label={LABEL_ROLE}={HEAD}"))
        + f'exec docker exec "$id" pkill -KILL -f -- {pattern}\n'
    )
    return LiveRun(
        job.run,
        interrupt=lambda: on_head(lambda head: head.ask(lambda jobs: jobs.stop(job.submission_id))),
        kill=lambda: on_head(lambda head: head.session.run(kill, root=True, timeout=KILL_SECONDS)),
        alive=lambda: on_head(lambda head: head.ask(lambda jobs: jobs.get(job.submission_id))).alive,
        resume_hint=lambda: resume_hint(holds(latest), holds(f"{started} || {done}")),
        stuck=lambda: "clusterkit down ends all of the cluster's Ray",
        poll_seconds=1.0,
    )
