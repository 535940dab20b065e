"""`clusterkit stop` of a training on a cluster."""

from __future__ import annotations

import asyncio

from clusterkit.backends.ray.head import head_of
from clusterkit.backends.ray.stop import matching_jobs, of_others
from clusterkit.backends.ray.stop import stop as stop_job
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output
from trainer.errors import RunError, UserError


def stop(
    hosts: HostOptions, experiment: str | None, trial: str | None, user: str, *, deadline: float, force: bool
) -> None:
    """End the run that is meant, and say how it ended."""
    output.result(asyncio.run(_stop(select(hosts), user, experiment, trial, deadline, force)))


async def _stop(
    selection: Selection, user: str, experiment: str | None, trial: str | None, deadline: float, force: bool
) -> str:
    async with head_of(selection) as head, head.jobs() as jobs:
        known = await jobs.all()
        found = matching_jobs(known, user, experiment, trial)
        if not found:
            wanted = f" {experiment or '*'}/{trial or '*'}" if experiment or trial else ""
            others = ", ".join(f"{job.run} (--user {job.user})" for job in of_others(known, user) if job.user)
            raise RunError(
                f"no run{wanted} is alive on cluster {head.cluster.name} of user {user}"
                + (f"; of others: {others}. To end one of those, name its user" if others else "")
                + f": clusterkit jobs --cluster {head.cluster.name} lists what was there"
            )
        if len(found) > 1:
            names = ", ".join(job.run for job in found)
            raise UserError(f"several runs are alive: {names}. Name one with --experiment and --trial")
        return await stop_job(head, jobs, found[0], deadline=deadline, force=force, say=output.note)
