"""Find recorded trajectories of a run by step and task."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import newest_history, whole
from trainer.errors import RunError, UserError

_STEP = re.compile(r"^step_(\d+)\.jsonl\.zst$")

Record = dict[str, Any]


def recorded_steps(run: RunDirectory) -> list[int]:
    """Return the steps whose trajectories are on disk, in order.

    A run that went back, to its recover checkpoint or its beginning, leaves files of steps that it has not done again
    yet: those are left out.
    """
    names = (_STEP.match(path.name) for path in (run.logs / "rollouts").glob("step_*.jsonl.zst"))
    last = _last_step(run)
    return sorted(step for match in names if match and (step := int(match.group(1))) <= last)


def _last_step(run: RunDirectory) -> float:
    """Return the last step that counts; infinite where no record says which that is."""
    try:
        history, _ = newest_history(run.metrics, evaluates=False)
    except OSError:
        return math.inf
    if not history.attempts and not history.steps:
        return math.inf
    return max(history.global_step, *(whole(attempt, "resume_step") for attempt in history.attempts[-1:]), 0)


def find_group(
    run: RunDirectory, step: int | None, task: str, fetch: Callable[[Path], None] = lambda _: None
) -> tuple[int, list[Record]]:
    """Return the step and the recorded trajectories of one task.

    Args:
        step: None for the newest one that has the task.
        task: its id, or its number within the step.
        fetch: brings the file of a step before it is read.

    Raises:
        UserError: that step or task is not recorded.
        RunError: nothing is recorded, or a record cannot be read.
    """
    steps = recorded_steps(run)
    if not steps:
        raise RunError(
            f"{run.logs / 'rollouts'} holds no trajectories: they are written with rollout.save_trajectories=true (the "
            "default) once a step ends"
        )
    if step is not None and step not in steps:
        raise UserError(f"step {step} is not recorded; there are {_ranges(steps)}")
    for number in [step] if step is not None else reversed(steps):
        file = run.logs / "rollouts" / f"step_{number}.jsonl.zst"
        fetch(file)
        groups = read_groups(file)
        if task in groups:
            return number, groups[task]
        if task.isdecimal() and int(task) < len(groups):
            return number, list(groups.values())[int(task)]
        if task.isdecimal() or step is not None:
            some = ", ".join(list(groups)[:5])
            raise UserError(
                f"step {number} has {len(groups)} tasks, none of them {task}: give a number from 0 to "
                f"{len(groups) - 1}, or an id such as {some}"
            )
    raise UserError(
        f"no recorded step has a task {task}: clusterkit trace --task-id 0 shows the newest step's first one"
    )


def read_groups(
    path: Path, otherwise: str = "look at another step with --step", most: int | None = None
) -> dict[str, list[Record]]:
    """Return the trajectories of a file by task, in the order of the file.

    Args:
        otherwise: what to do where it cannot be read.
        most: only the first tasks, so many; a file has those of a task one after the other.
    """
    groups: dict[str, list[Record]] = {}
    for record in _read(path, otherwise):
        if len(groups) == most and str(record["task_id"]) not in groups:
            break
        groups.setdefault(str(record["task_id"]), []).append(record)
    return groups


def _read(path: Path, otherwise: str) -> Iterator[Record]:
    try:
        with zstandard.open(path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise RunError(f"{path} cannot be read ({error}): {otherwise}") from error


def _ranges(steps: list[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
