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
from trainer.errors import UserError

_JUDGES = typer.Option(False, "--judges", help="The run's judge servers instead.")
_RUN = ("experiment", "trial", "fileroot", "here", "user")
takes_engine_run = takes_run("name", *_RUN)
app = new_app(
    "Engine servers of a run: list them, add one while it trains, end one.",
    no_args_is_help=True,
    examples="""
clusterkit serve list
clusterkit serve add --gpus 4,5
clusterkit serve judge --model-path /models/judge --gpus 3
""",
)


@app.command(
    "list",
    examples="""
clusterkit serve list
clusterkit serve list memalpha/run2 --judges --json
""",
)
@takes_hosts
@takes_engine_run
def list_servers(
    *,
    hosts: HostOptions,
    run: RunOptions,
    judges: bool = _JUDGES,
    as_json: bool = JSON_OPTION,
) -> None:
    """Show a run's servers: state, node, GPUs, address, and why one is not there.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    if judges:
        actions.serve_judge.judge(hosts, run, _judges_of(run), list_them=True, stop_them=False, as_json=as_json)
    else:
        actions.serve.list_servers(run, hosts, as_json=as_json)


@app.command(
    examples="""
clusterkit serve add --gpus 4,5
clusterkit serve add --cluster lab --json
"""
)
@takes_hosts
@takes_engine_run
def add(
    *,
    hosts: HostOptions,
    run: RunOptions,
    gpus: str = typer.Option(
        "", "--gpus", metavar="LIST", help="On this machine: the server's GPUs by number, such as 4,5."
    ),
    model_path: str = typer.Option(
        "", "--model-path", metavar="FOLDER", help="Folder of weights to start with; that of the other servers."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Add one server to a run, also while it trains: it is given the present weights and requests from then on.

    It stays until `clusterkit serve stop`, also when the trainer ends. On a cluster, Ray looks for its GPUs. Without a
    name it goes to the run that was started last, here or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    run = replace(run, here=run.here or (bool(gpus) and hosts.cluster is None))
    actions.serve.add(run, hosts, gpus=gpus, model=model_path, as_json=as_json)


@app.command(
    examples="""
clusterkit serve stop server-1
clusterkit serve stop memalpha/run2 --judges
"""
)
@takes_hosts
@takes_run(*_RUN)
def stop(
    *,
    hosts: HostOptions,
    run: RunOptions,
    names: list[str] = typer.Argument(  # noqa: B008
        None,
        metavar="EXPERIMENT/TRIAL|SERVER",
        help="The run, in one word, and servers to end; without these all of the run.",
    ),
    judges: bool = _JUDGES,
    as_json: bool = JSON_OPTION,
) -> None:
    """End servers of a run; what they were sampling is sampled again by the others.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    if names and "/" in names[0]:  # no server has such a name
        run, names = replace(run, name=names[0]), names[1:]
    if judges:
        if names:
            raise UserError("the judge servers of a run are ended together: leave the names out")
        actions.serve_judge.judge(hosts, run, _judges_of(run), list_them=False, stop_them=True, as_json=as_json)
    else:
        actions.serve.stop(run, hosts, names or [], as_json=as_json)


@app.command(
    examples="""
clusterkit serve judge --model-path /models/judge --gpus 3
clusterkit serve judge memalpha/run2 \\
  --model-path /models/judge --gpus 2,3
"""
)
@takes_hosts
@takes_judge_options
@takes_run("name", "fileroot", "here", hidden=("experiment", "trial"))
def judge(
    *,
    hosts: HostOptions,
    run: RunOptions,
    options: JudgeOptions,
    list_them: bool = typer.Option(False, "--list", hidden=True, help="As clusterkit serve list --judges."),
    stop_them: bool = typer.Option(False, "--stop", hidden=True, help="As clusterkit serve stop --judges."),
    as_json: bool = typer.Option(False, "--json", hidden=True, help="With --list or --stop: print JSON."),
) -> None:
    """Serve a reader and judge, registered for a run by its name: run1 of the preset's experiment when left out.

    It goes where train of the preset would go; --here and --cluster NAME say otherwise. On this machine it serves until
    Ctrl-C; on a cluster on GPUs that its Ray has free, until clusterkit serve stop --judges, and the command returns
    when they answer.
    `clusterkit train` of the same run (under the same --fileroot, or on the same cluster) finds them,
    checks their model, and waits for them when they are gone for a while.
    """
    actions.serve_judge.judge(hosts, run, options, list_them=list_them, stop_them=stop_them, as_json=as_json)


def _judges_of(run: RunOptions) -> JudgeOptions:
    """The other options of `serve judge`. Raises UserError where the run is another user's."""
    if run.user:
        raise UserError(f"--user {run.user}: judge servers are listed and ended by the user who started them")
    return JudgeOptions()
