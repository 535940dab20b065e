"""`clusterkit serve`: the engine servers of a run: which there are, one more, one less; judge servers for a run."""

from __future__ import annotations

from dataclasses import replace

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.judgeoptions import JudgeOptions, takes_judge_options
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
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


@app.command()
@takes_hosts
@takes_judge_options
@takes_run("fileroot", "here")
def judge(
    *,
    hosts: HostOptions,
    run: RunOptions,
    options: JudgeOptions,
    list_them: bool = typer.Option(False, "--list", help="Show the run's judge servers."),
    stop_them: bool = typer.Option(False, "--stop", help="End the run's judge servers."),
    as_json: bool = typer.Option(False, "--json", help="With --list: print JSON."),
) -> None:
    """Serve a reader and judge, registered for a run by experiment and trial.

    It goes where train of the preset would go; --here and --cluster NAME say otherwise. On this machine it serves until
    Ctrl-C; on a cluster on GPUs that its Ray has free, until --stop, and the command returns when they answer.
    `clusterkit train` of the same experiment and trial (under the same --fileroot, or on the same cluster) finds them,
    checks their model, and waits for them when they are gone for a while.
    """
    actions.serve_judge.judge(hosts, run, options, list_them=list_them, stop_them=stop_them, as_json=as_json)
