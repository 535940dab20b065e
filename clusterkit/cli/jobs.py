"""`clusterkit jobs`: what a place works on, and what it has worked on."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from clusterkit.ssh.host_options import HostOptions

app = new_app()


@app.command(
    examples="""
clusterkit jobs
clusterkit jobs --alive --cluster lab
clusterkit jobs --slurm --user ada --json
"""
)
@takes_hosts
@takes_run("fileroot", "here", "user")
def jobs(
    *,
    hosts: HostOptions,
    run: RunOptions,
    slurm: bool = typer.Option(False, "--slurm", help="Those in Slurm's queue."),
    alive: bool = typer.Option(False, "--alive", help="Only those that wait or run."),
    as_json: bool = JSON_OPTION,
) -> None:
    """List your jobs, the oldest first; those of others are counted, and listed with --user.

    It goes to the current cluster (clusterkit use), without one to this machine; --here, --cluster NAME and --slurm say
    which. A cluster's Ray also lists jobs that have ended, until its head is started anew; Slurm lists its queue, this
    machine what is at work: runs under --fileroot, and evaluations of this folder. --fileroot FOLDER: only its runs.
    """
    actions.jobs.jobs(run, hosts, slurm=slurm, alive=alive, as_json=as_json)
