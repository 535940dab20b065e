"""`clusterkit serve`: the engine servers of a run: which there are, one more, one less."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import FILEROOT_OPTION, HERE_OPTION, USER_OPTION
from clusterkit.cli.serve_judge import judge
from clusterkit.ssh.host_options import HostOptions

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Engine servers of a run: list them, add one while it trains, end one.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXPERIMENT = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out.")
_TRIAL = typer.Option(None, "--trial", help="Trial; the newest when left out.")


@app.command("list")
@takes_hosts
def list_servers(
    *,
    hosts: HostOptions,
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show a run's servers: state, node, GPUs, address, and why one is not there.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    actions.serve.list_servers(hosts, experiment, trial, fileroot, here, user, as_json)


@app.command()
@takes_hosts
def add(
    *,
    hosts: HostOptions,
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
    gpus: str = typer.Option("", "--gpus", help="On this machine: the server's GPUs by number, such as 4,5."),
    model: str = typer.Option("", "--model", help="Folder of weights to start with; that of the other servers."),
) -> None:
    """Add one server to a run, also while it trains: it is given the present weights and requests from then on.

    It stays until `clusterkit serve stop`, also when the trainer ends. On a cluster, Ray looks for its GPUs. Without a
    name it goes to the run that was started last, here or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    actions.serve.add(hosts, experiment, trial, fileroot, here, user, gpus=gpus, model=model)


@app.command()
@takes_hosts
def stop(
    *,
    hosts: HostOptions,
    names: list[str] = typer.Argument(None, help="Servers to end; without names all of the run."),  # noqa: B008
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
) -> None:
    """End servers of a run; what they were sampling is sampled again by the others.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    actions.serve.stop(hosts, names or [], experiment, trial, fileroot, here, user)


app.command()(takes_hosts(judge))
