"""`clusterkit stop`: end a training that goes on later, here or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.target import (
    FILEROOT_OPTION,
    HERE_OPTION,
    USER_OPTION,
    Kind,
    checked_user,
    folder_of_runs,
    hosts_of_run,
    kind_for,
)
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
@takes_hosts
def stop(
    *,
    hosts: HostOptions,
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment, where several runs are alive."),
    trial: str | None = typer.Option(None, "--trial", help="Trial."),
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    deadline: float = typer.Option(600.0, "--deadline", min=1.0, help="Seconds until it is ended by force."),
    force: bool = typer.Option(False, "--force", help="End it at once; what came after the last checkpoint is lost."),
    user: str | None = USER_OPTION,
) -> None:
    """End a training: it writes a recover checkpoint first, and the same train command goes on from there.

    Without a name it goes to the run that is alive, on this machine or on the current cluster; where one is on each,
    --here and --cluster NAME say which. Only your own runs, unless --user names somebody else.
    """
    whose = checked_user(user)
    there = hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind_for(user, Kind.LIVING_RUN))
    if there is None:
        from clusterkit.backends.stop import stop_here  # noqa: PLC0415

        root = folder_of_runs(fileroot)
        output.result(stop_here(root, experiment, trial, deadline=deadline, force=force, say=output.note, user=whose))
        return
    import asyncio  # noqa: PLC0415

    output.result(asyncio.run(_stop(select(there), whose, experiment, trial, deadline, force)))


async def _stop(
    selection: Selection, user: str, experiment: str | None, trial: str | None, deadline: float, force: bool
) -> str:
    from clusterkit.backends.ray.head import head_of  # noqa: PLC0415
    from clusterkit.backends.ray.stop import chosen, of_others  # noqa: PLC0415
    from clusterkit.backends.ray.stop import stop as stop_job  # noqa: PLC0415
    from trainer.errors import RunError, UserError  # noqa: PLC0415

    async with head_of(selection) as head, head.jobs() as jobs:
        known = await jobs.all()
        found = chosen(known, user, experiment, trial)
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
