"""`clusterkit stop`: end a training that goes on later, here or on a cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import FILEROOT_OPTION, HERE_OPTION, USER_OPTION
from clusterkit.ssh.host_options import HostOptions

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
    target = actions.target
    whose, kind = target.checked_user(user), target.kind_for(user, target.Kind.LIVING_RUN)
    there = target.hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind)
    if there is None:
        actions.stop.stop(experiment, trial, fileroot, whose, deadline=deadline, force=force)
    else:
        actions.stop_cluster.stop(there, experiment, trial, whose, deadline=deadline, force=force)
