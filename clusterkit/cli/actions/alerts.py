"""`clusterkit alerts`: look again and again, and send what happened."""

from __future__ import annotations

import typer

from clusterkit.cli.actions.target import RUNS, cluster_of_run, folder_of_runs
from clusterkit.hosts.folders import config_folder
from clusterkit.observe.alerts.delivery import command_from, webhook_from
from clusterkit.observe.alerts.watch import Watcher
from clusterkit.runs.status import find_run
from clusterkit.ui import output
from trainer.errors import UserError


def alerts(
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    cluster: str | None,
    here: bool,
    webhook: str | None,
    command: str | None,
    *,
    every: float,
    once: bool,
) -> None:
    """Watch a run until it is complete, or look once."""
    if command is not None and webhook is not None:
        raise UserError("--webhook and --command are two receivers: give one, and start a second watcher for the other")
    receiver = command_from(command) if command is not None else webhook_from(webhook)
    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    if cluster is None:
        run = find_run(folder_of_runs(fileroot), experiment, trial)
        _watch(Watcher(run, receiver, output.note), every, once)
        return
    from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

    with mirror_of(cluster, fileroot or RUNS) as mirror:
        run = mirror.find(experiment, trial)
        record = config_folder() / "clusters" / cluster / "alerts" / run.experiment / f"{run.trial}.json"
        _watch(Watcher(run, receiver, output.note, mirror=mirror, record=record), every, once)


def _watch(watcher: Watcher, every: float, once: bool) -> None:
    if once:
        _, sent = watcher.look()
        raise typer.Exit(0 if sent else 1)
    output.note(f"watching {watcher.run.experiment}/{watcher.run.trial} every {every:g} s; Ctrl-C ends it")
    try:
        watcher.watch(every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
