"""`clusterkit trace`: print a recorded trajectory turn by turn, or a held-out task before and after training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from clusterkit.backends.records import Runs, errors_with_original_paths
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run
from clusterkit.cli.runoptions import RunOptions
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.trace.heldout import choose_task, heldout_tasks, learned_task
from clusterkit.runs.trace.heldout_view import heldout_lines
from clusterkit.runs.trace.model import trace_of
from clusterkit.runs.trace.source import find_group
from clusterkit.runs.trace.view import lines_of
from clusterkit.ui import output
from trainer.errors import UserError


def trace(run: RunOptions, task: str, step: int | None, sample: int, *, full: bool, as_json: bool) -> None:
    """Print what became of the memory in one trajectory."""
    with _chosen_run(run) as (runs, chosen):
        runs.index_steps(chosen)
        with errors_with_original_paths(runs):
            number, group = find_group(chosen, step, task, runs.fetch_step)
    if sample >= len(group):
        raise UserError(f"the task has {len(group)} trajectories: choose --sample 0 to {len(group) - 1}")
    found = trace_of(number, group, sample)

    def text() -> str:  # an agent of the user's own may have left what cannot be shown so
        return "\n".join([chosen.name, *lines_of(found, full)])

    output.outcome(text, {"run": chosen.name, **asdict(found)}, as_json=as_json)


def trace_heldout(run: RunOptions, task: str | None, *, full: bool, as_json: bool) -> None:
    """Print how a held-out task was read before and after training.

    Args:
        task: its number among those that are recorded, or its id; None for the first whose answer became better.
    """
    with _chosen_run(run) as (runs, chosen):
        runs.fetch_heldout(chosen)
        with errors_with_original_paths(runs):
            tasks = heldout_tasks(chosen)
    number = learned_task(tasks) if task is None else choose_task(tasks, task)
    facts = {"run": chosen.name, "tasks": [one.task for one in tasks], **asdict(tasks[number])}

    def text() -> str:
        lines = heldout_lines(tasks, number, shutil.get_terminal_size((100, 24)).columns, full)
        return "\n".join([chosen.name, *lines])

    output.outcome(text, facts, as_json=as_json)


@contextmanager
def _chosen_run(run: RunOptions) -> Iterator[tuple[Runs, RunDirectory]]:
    """The runs of the place that the options mean, and the one of them that they name."""
    with open_backend(place_of_run(run), output.note) as backend:
        runs = backend.runs()
        (chosen,) = runs.choose(run.experiment, run.trial)
        yield runs, chosen
