"""`clusterkit recover`: look at what a run would go on from."""

from __future__ import annotations

import typer

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import announce, place_of, place_of_run
from clusterkit.cli.actions.target_of_run import for_training
from clusterkit.cli.runoptions import RunOptions
from clusterkit.config.aliases import translation_notes
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import numbered_trials
from clusterkit.runs.holder import holder_of
from clusterkit.runs.recovery import Check, own_config
from clusterkit.ui import output


def check_run(settings: list[str], preset: str | None, task: str | None, run: RunOptions, *, as_json: bool) -> None:
    """Print whether a start would go on, and from what."""
    output.notes(translation_notes(settings))
    if preset is None:
        place = place_of_run(run)
    else:
        cluster = announce(for_training(resolve(preset, task, settings), run, start=False))
        place = place_of(cluster, run.fileroot)
    with open_backend(place, output.note) as backend:
        if preset is None:
            runs = backend.runs()
            found = runs.find(run.experiment, run.trial)
            config = own_config(found, settings)
        else:
            request = backend.request(preset, task, settings)
            config = request.config
            runs = backend.runs(run.fileroot or config.fileroot)
            experiment = run.experiment or config.experiment_name
            runs.index()
            # As train chooses: a run of another name is older or newer, and never gone on with unless it is named.
            numbers = numbered_trials(runs.folder, experiment)
            latest = f"run{numbers[-1]}" if numbers else None
            found = runs.find(experiment, run.trial or (config.trial_name if request.named else latest))
        check = Check(found, runs.look(found), config, holder_of(found))
    output.outcome("\n".join(check.lines()), check.as_dict(), as_json=as_json)
    if not check.fits:
        raise typer.Exit(1)
