"""`clusterkit recover`: what a run would go on from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterkit.cli.target import (
    FILEROOT_OPTION,
    HERE_OPTION,
    RUNS,
    Typed,
    cluster_of_run,
    folder_of_runs,
    for_training,
    told,
)
from clusterkit.runs.holder import holder_of
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.config.resolve import Resolved
    from clusterkit.runs.recovery import Check

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _recover() -> None:
    """Look at what runs would go on from."""


@app.command()
def check(
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that the run would be started with, as for train."),
    ] = None,
    preset: str | None = typer.Option(
        None, "--preset", help="Preset of the command that it would be started with; as last time when left out."
    ),
    task: str | None = typer.Option(None, "--task", help="Task of that command."),
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="A run of that cluster; its files are read there."
    ),
    here: bool = HERE_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what a run would go on from, whether that is whole, and whether it fits; changes nothing.

    Every byte is compared with what was written, as the trainer does at its start. Exit codes: 0 a start would go on
    from a checkpoint, 1 it would not (none is there or whole, or settings differ), 2 bad usage. With --preset it goes
    where train would go, else to the run that was started last; --here and --cluster NAME say which.
    """
    from clusterkit.config.aliases import notes_of  # noqa: PLC0415
    from clusterkit.config.resolve import resolve  # noqa: PLC0415

    typed = list(overrides or [])
    output.notes(notes_of(typed))
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
    from clusterkit.runs.recovery import Check, own_config  # noqa: PLC0415
    from clusterkit.runs.status import find_run  # noqa: PLC0415
    from trainer.checkpoint.slots import look  # noqa: PLC0415

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
    from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415
    from clusterkit.backends.ray.train import order_of  # noqa: PLC0415
    from clusterkit.runs.recovery import Check, own_config  # noqa: PLC0415

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
