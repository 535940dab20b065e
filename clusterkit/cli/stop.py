"""`clusterkit stop`: end a training that goes on later, here or on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clusterkit.cli import output
from clusterkit.cli.hostoptions import HostOptions, select, takes_hosts

if TYPE_CHECKING:
    from clusterkit.cli.hostoptions import Selection

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
@takes_hosts
def stop(
    *,
    hosts: HostOptions,
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment, where several runs are alive."),
    trial: str | None = typer.Option(None, "--trial", help="Trial."),
    fileroot: str = typer.Option("runs", "--fileroot", help="Without --cluster: folder under which runs are."),
    deadline: float = typer.Option(600.0, "--deadline", min=1.0, help="Seconds until it is ended by force."),
    force: bool = typer.Option(False, "--force", help="End it at once; what came after the last checkpoint is lost."),
) -> None:
    """End a training: it writes a recover checkpoint first, and the same train command goes on from there.

    With --cluster NAME on that cluster, else on this machine.
    """
    if hosts.cluster is None and hosts.hostnames is None:
        from clusterkit.stopping import stop_here  # noqa: PLC0415

        root = Path(fileroot).expanduser().absolute()
        output.result(stop_here(root, experiment, trial, deadline=deadline, force=force, say=output.note))
        return
    import asyncio  # noqa: PLC0415

    output.result(asyncio.run(_stop(select(hosts), experiment, trial, deadline, force)))


async def _stop(selection: Selection, experiment: str | None, trial: str | None, deadline: float, force: bool) -> str:
    from clusterkit.dispatch.head import head_of  # noqa: PLC0415
    from clusterkit.dispatch.stop import chosen  # noqa: PLC0415
    from clusterkit.dispatch.stop import stop as stop_job  # noqa: PLC0415
    from trainer.errors import RunError, UserError  # noqa: PLC0415

    async with head_of(selection) as head, head.jobs() as jobs:
        found = chosen(await jobs.all(), experiment, trial)
        if not found:
            wanted = f" {experiment or '*'}/{trial or '*'}" if experiment or trial else ""
            raise RunError(
                f"no run{wanted} is alive on cluster {head.cluster.name}: clusterkit jobs --cluster "
                f"{head.cluster.name} lists what was there"
            )
        if len(found) > 1:
            names = ", ".join(f"{job.metadata.get('experiment')}/{job.metadata.get('trial')}" for job in found)
            raise UserError(f"several runs are alive: {names}. Name one with --experiment and --trial")
        return await stop_job(head, jobs, found[0], deadline=deadline, force=force, say=output.note)
