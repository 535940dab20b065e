"""`clusterkit logs`: what a run has logged, here or on a cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import FILEROOT_OPTION, HERE_OPTION, USER_OPTION
from clusterkit.ssh.host_options import HostOptions

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
@takes_hosts
def logs(
    *,
    hosts: HostOptions,
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on showing what is added, until Ctrl-C."),
    lines: int = typer.Option(200, "--lines", "-n", min=0, help="Begin with so many lines of its end; 0: with all."),
    console: bool = typer.Option(False, "--console", help="What the newest attempt printed, instead of main.log."),
    rank: int | None = typer.Option(None, "--rank", min=0, help="What that rank of the newest attempt printed."),
    engine: str | None = typer.Option(
        None, "--engine", help="What that engine server printed: its name or number (clusterkit serve list)."
    ),
    user: str | None = USER_OPTION,
) -> None:
    """Print a run's log: main.log, or what an attempt, one of its ranks or an engine server printed.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which. Only your own runs, unless --user names somebody else.
    """
    which = (console, rank, engine)
    target = actions.target
    whose, kind = target.checked_user(user), target.kind_for(user, target.Kind.NEWEST_RUN)
    there = target.hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind)
    if there is None:
        actions.logs.show(experiment, trial, fileroot, user, which, lines=lines, follow=follow)
    else:
        actions.logs_cluster.show(there, experiment, trial, whose, which, lines=lines, follow=follow)
