"""`clusterkit train --slurm`: submit the run, or attach to it, and follow it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import yaml

from clusterkit.backends.local.train import again_command
from clusterkit.backends.slurm.follow import follow
from clusterkit.backends.slurm.script import Wishes
from clusterkit.backends.slurm.submit import container, for_slurm, planned, require_python, require_slurm, submit
from clusterkit.capacity.plan import remote_plan
from clusterkit.capacity.runnable import require_runnable
from clusterkit.cli.actions import submitted
from clusterkit.config.resolve import resolve, shown_values
from clusterkit.runs.diagnose.applied import with_applied
from clusterkit.runs.directory import RunDirectory
from clusterkit.ui import output
from trainer.config import RunConfig


def train_on_slurm(
    preset: str | None,
    task: str | None,
    overrides: Sequence[str],
    wishes: Wishes,
    *,
    image: str,
    mounts: Sequence[str],
    dry_run: bool,
    detach: bool,
    as_json: bool,
    shown: bool,
) -> None:
    """Do what `clusterkit train --slurm` says. Exit codes as for a run of this machine; 0 for a run detached from.

    Raises:
        UserError, RunError: with what to do.

    """
    resolved = for_slurm(resolve(preset, task, overrides))
    require_runnable(resolved.config)
    require_slurm()
    if image:
        wishes = replace(wishes, container=container(image, tuple(mounts)))
    else:
        require_python()
        wishes = replace(wishes, python=sys.executable)
    if dry_run:
        _print_plan(resolved.config, planned(resolved, wishes).text, as_json)
        return
    dispatched = submit(resolved, wishes, _applied, output.note)
    output.note(f"{dispatched.sentence}. Folder: {dispatched.run.logs}")
    again = again_command(sys.argv[1:])
    submitted.show(
        dispatched,
        f"--fileroot {dispatched.run.fileroot}",
        lambda progress: follow(dispatched, progress, again),
        detach=detach,
        as_json=as_json,
        shown=shown,
    )


def _applied(config: RunConfig, run: RunDirectory) -> RunConfig:
    config, notes = with_applied(config, run)
    for note in notes:
        output.note(f"note: {note}")
    return config


def _print_plan(config: RunConfig, text: str, as_json: bool) -> None:
    if as_json:
        output.result_json({"config": shown_values(config), "script": text})
        return
    output.result(yaml.safe_dump(shown_values(config), sort_keys=False, allow_unicode=True))
    plan = remote_plan(config).remote_lines("on Slurm")
    lines = [
        "The plan",
        *plan,
        "",
        "To be submitted with sbatch (nothing has been written or submitted)",
        "",
        *text.splitlines(),
    ]
    output.result("\n".join(f"# {line}".rstrip() for line in lines))
