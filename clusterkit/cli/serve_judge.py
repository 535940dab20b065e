"""`clusterkit serve judge`: servers that answer from memories and judge them, for a run with reward.name=memalpha."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes
from clusterkit.cli.judgeoptions import OPTIONS, JudgeOptions
from clusterkit.cli.runoptions import RunOptions, takes_run
from clusterkit.ssh.host_options import HostOptions


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


judge = takes(judge, "options", JudgeOptions, OPTIONS)
