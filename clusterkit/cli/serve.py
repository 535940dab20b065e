"""`clusterkit serve`: the engine servers of a run: which there are, one more, one less."""

from __future__ import annotations

from dataclasses import replace

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from clusterkit.cli.serve_judge import judge
from clusterkit.ssh.host_options import HostOptions

takes_engine_run = takes_run("experiment", "trial", "fileroot", "here", "user")
app = new_app("Engine servers of a run: list them, add one while it trains, end one.", no_args_is_help=True)


@app.command("list")
@takes_hosts
@takes_engine_run
def list_servers(
    *,
    hosts: HostOptions,
    run: RunOptions,
    as_json: bool = JSON_OPTION,
) -> None:
    """Show a run's servers: state, node, GPUs, address, and why one is not there.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    actions.serve.list_servers(run, hosts, as_json=as_json)


@app.command()
@takes_hosts
@takes_engine_run
def add(
    *,
    hosts: HostOptions,
    run: RunOptions,
    gpus: str = typer.Option("", "--gpus", help="On this machine: the server's GPUs by number, such as 4,5."),
    model: str = typer.Option("", "--model", help="Folder of weights to start with; that of the other servers."),
) -> None:
    """Add one server to a run, also while it trains: it is given the present weights and requests from then on.

    It stays until `clusterkit serve stop`, also when the trainer ends. On a cluster, Ray looks for its GPUs. Without a
    name it goes to the run that was started last, here or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    run = replace(run, here=run.here or (bool(gpus) and hosts.cluster is None))
    actions.serve.add(run, hosts, gpus=gpus, model=model)


@app.command()
@takes_hosts
@takes_engine_run
def stop(
    *,
    hosts: HostOptions,
    run: RunOptions,
    names: list[str] = typer.Argument(None, help="Servers to end; without names all of the run."),  # noqa: B008
) -> None:
    """End servers of a run; what they were sampling is sampled again by the others.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    actions.serve.stop(run, hosts, names or [])


app.command()(takes_hosts(judge))
