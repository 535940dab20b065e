"""`clusterkit alerts`: send failures, stalls and the end of a run to a webhook or a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clusterkit.cli.target import CLUSTER_OPTION, FILEROOT_OPTION, HERE_OPTION, RUNS, cluster_of_run, folder_of_runs
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.observe.alerts.watch import Watcher

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def alerts(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = CLUSTER_OPTION,
    here: bool = HERE_OPTION,
    webhook: str | None = typer.Option(
        None,
        "--webhook",
        metavar="SOURCE",
        help="Where the webhook's address is: file:PATH or env:NAME [env:CLUSTERKIT_WEBHOOK].",
    ),
    command: str | None = typer.Option(None, "--command", help="Run this instead, with the JSON on its input."),
    every: float = typer.Option(60.0, "--every", min=0.1, help="Seconds between two looks."),
    once: bool = typer.Option(False, "--once", help="Look once; for cron."),
) -> None:
    """Watch a run; send a failure, a stall, a stop and the end, each once, as JSON.

    Goes on until the run is complete or Ctrl-C. What was delivered is noted beside the run (for one of a cluster, in
    the configuration folder of this machine): a second watcher does not repeat it. Without a name it goes to the
    run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    """
    from clusterkit.observe.alerts.delivery import command_from, webhook_from  # noqa: PLC0415
    from clusterkit.observe.alerts.watch import Watcher  # noqa: PLC0415
    from clusterkit.runs.status import find_run  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    if command is not None and webhook is not None:
        raise UserError("--webhook and --command are two receivers: give one, and start a second watcher for the other")
    receiver = command_from(command) if command is not None else webhook_from(webhook)
    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    if cluster is None:
        run = find_run(folder_of_runs(fileroot), experiment, trial)
        _watch(Watcher(run, receiver, output.note), every, once)
        return
    from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415
    from clusterkit.hosts.folders import config_folder  # noqa: PLC0415

    with mirror_of(cluster, fileroot or RUNS) as mirror:
        run = mirror.find(experiment, trial)
        kept = config_folder() / "clusters" / cluster / "alerts" / run.experiment / f"{run.trial}.json"
        _watch(Watcher(run, receiver, output.note, elsewhere=mirror, kept=kept), every, once)


def _watch(watcher: Watcher, every: float, once: bool) -> None:
    if once:
        _, sent = watcher.look()
        raise typer.Exit(0 if sent else 1)
    output.note(f"watching {watcher.run.experiment}/{watcher.run.trial} every {every:g} s; Ctrl-C ends it")
    try:
        watcher.watch(every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
