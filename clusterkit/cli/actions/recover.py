"""`clusterkit recover`: look at what a run would go on from."""

from __future__ import annotations

from pathlib import Path

import typer

from clusterkit.cli.actions.target import RUNS, Typed, cluster_of_run, folder_of_runs, told
from clusterkit.cli.actions.target_of_run import for_training
from clusterkit.config.aliases import translation_notes
from clusterkit.config.resolve import Resolved, resolve
from clusterkit.runs.holder import holder_of
from clusterkit.runs.recovery import Check, own_config
from clusterkit.runs.status import find_run
from clusterkit.ui import output
from trainer.checkpoint.slots import look


def check(
    typed: list[str],
    preset: str | None,
    task: str | None,
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    cluster: str | None,
    here: bool,
    *,
    as_json: bool,
) -> None:
    """Print whether a start would go on, and from what. typed: the settings of that start."""
    output.notes(translation_notes(typed))
    resolved = resolve(preset, task, typed) if preset is not None else None
    if resolved is None:
        cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    else:
        cluster = told(for_training(resolved, Typed(cluster, here, fileroot), start=False))
    found = (
        _on_cluster(cluster, preset, task, typed, experiment, trial, fileroot or RUNS)
        if cluster is not None
        else _here(resolved, typed, experiment, trial, fileroot)
    )
    if as_json:
        output.result_json(found.as_dict())
    else:
        output.result("\n".join(found.lines()))
    if not found.fits:
        raise typer.Exit(1)


def _here(
    resolved: Resolved | None, typed: list[str], experiment: str | None, trial: str | None, fileroot: str | None
) -> Check:
    root = folder_of_runs(fileroot)
    if resolved is None:
        run = find_run(root, experiment, trial)
        config = own_config(run, typed)
    else:
        config = resolved.config
        root = Path(config.fileroot) if "fileroot" in resolved.settings else root
        named = trial or (config.trial_name if resolved.trial_is_named else None)
        run = find_run(root, experiment or config.experiment_name, named)
    return Check(run, look(run.recover), config, holder_of(run))


def _on_cluster(
    cluster: str,
    preset: str | None,
    task: str | None,
    typed: list[str],
    experiment: str | None,
    trial: str | None,
    fileroot: str,
) -> Check:
    from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415 (asyncssh, only for runs of a cluster)
    from clusterkit.backends.ray.train import order_of  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

    with mirror_of(cluster, fileroot) as mirror:
        if preset is None:
            run = mirror.find(experiment, trial)
            config = own_config(run, typed)
        else:
            order, _, _ = order_of(mirror.cluster, preset, task, typed)
            config = order.config
            named = trial or (config.trial_name if order.named else None)
            run = mirror.find(experiment or config.experiment_name, named)
        return Check(run, mirror.look(run), config, holder_of(run))
