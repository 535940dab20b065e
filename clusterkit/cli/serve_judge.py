"""`clusterkit serve judge`: servers that answer from memories and judge them, for a run with reward.name=memalpha."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import FILEROOT_OPTION, HERE_OPTION, LOOPBACK
from clusterkit.ssh.host_options import HostOptions


def judge(
    *,
    hosts: HostOptions,
    model: str = typer.Option(
        "", "--model", help="Folder of the model, an asset's name; on a cluster also org/name. Needed to start."
    ),
    preset: str = typer.Option("memalpha-4B", "--preset", help="Preset of the run: gives its experiment's name."),
    experiment: str = typer.Option("", "--experiment", help="Experiment of the run; the preset's when left out."),
    trial: str = typer.Option("run1", "--trial", help="Trial of the run."),
    gpus: str = typer.Option("", "--gpus", help="How many GPUs, such as 3, or which, such as 2,3,4; none: the CPU."),
    per_server: int = typer.Option(1, "--per-server", min=1, help="GPUs of one server (tensor parallel)."),
    engine: str = typer.Option("sglang", "--engine", metavar="sglang|vllm", help="Kind of server."),
    address: str = typer.Option(
        LOOPBACK, "--address", help="Address to listen on: this host's private one where the run is on another."
    ),
    context_length: int = typer.Option(0, "--context-length", min=0, help="Longest request; 0: the model's own."),
    flags: str = typer.Option("", "--flags", help="More options of the server's own, in one quoted text."),
    fileroot: str | None = FILEROOT_OPTION,
    cache_dir: str = typer.Option("", "--cache-dir", help="On this machine: cache folder of assets."),
    here: bool = HERE_OPTION,
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
    options = actions.serve_judge.Options(
        model=model,
        preset=preset,
        experiment=experiment,
        trial=trial,
        gpus=gpus,
        per_server=per_server,
        engine=engine,
        address=address,
        context_length=context_length,
        flags=flags,
        fileroot=fileroot,
        cache_dir=cache_dir,
    )
    actions.serve_judge.judge(hosts, options, here=here, list_them=list_them, stop_them=stop_them, as_json=as_json)
