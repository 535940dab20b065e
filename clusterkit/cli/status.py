"""`clusterkit status`: how a run on this machine is doing, or any run whose log is at hand."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import FILEROOT_OPTION, HERE_OPTION, USER_OPTION

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def status(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON (with --watch: one line per observation)."),
    watch: bool = typer.Option(False, "--watch", help="Go on showing it until the run ends or Ctrl-C."),
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="A run on that cluster, and the cluster: hosts, Ray, storage, job."
    ),
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
    log: str | None = typer.Option(
        None, "--log", metavar="FILE", help="Read this log instead: AReaL's of any version, or ours; - for stdin."
    ),
) -> None:
    """Show how a run is doing: step, reward trend, ETA, checkpoints, and whether it is alive.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which. Exit codes for scripts: 0 all is well, 1 the run failed, was killed or stands still (or
    there is none); on a cluster also 3, something could not be seen or is missing.
    """
    if log is not None:
        actions.status.show_log(log, experiment, trial, as_json=as_json, watch=watch)
        return
    target = actions.target
    whose, kind = target.checked_user(user), target.kind_for(user, target.Kind.NEWEST_RUN)
    cluster = target.cluster_of_run(cluster, here, fileroot, experiment, trial, kind=kind)
    if cluster is not None:
        actions.status_cluster.show(cluster, experiment, trial, whose, as_json=as_json, watch=watch)
        return
    actions.status.show(experiment, trial, fileroot, user, as_json=as_json, watch=watch)
