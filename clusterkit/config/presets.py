"""Presets: YAML files of sizes and tasks, merged with overrides; each value keeps its origin.

Later layers win: RunConfig defaults < the task's base < task < size < the size's section for that task < overrides.
If an override chooses another algorithm.name, `ROW_SETTINGS` of the files are dropped. So are their settings of a task,
agent or reward that is not chosen; an override of such a setting stays, so that validation refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from clusterkit.common.suggest import did_you_mean
from clusterkit.config.fields import applies
from trainer.config_parts import AlgorithmConfig
from trainer.errors import UserError

ROW_SETTINGS = frozenset(
    {
        *(f"algorithm.{name}" for name in ("advantage", "loss_norm", "clip_low", "clip_high", "dual_clip", "kl_coef")),
        "rollout.refill",
    }
)
"""Settings that belong to an algorithm: a preset's values are for its own algorithm only."""


@dataclass(frozen=True)
class TaskPreset:
    """One file of presets/tasks: settings of a task for all sizes of model. `base`: the task that it extends."""

    name: str
    description: str
    values: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)
    base: str = ""


@dataclass(frozen=True)
class Measured:
    """A published measurement of a preset."""

    gpus: int  # total number
    step_seconds: float
    source: str
    gpu: str = ""  # their kind; empty if unknown
    steps: int | None = None  # until convergence; None if unknown
    hours: float | None = None  # until convergence; None if unknown


@dataclass(frozen=True)
class WholeRun:
    """How long a preset's command took, nearly as the preset stands."""

    low_s: float
    high_s: float
    source: str  # on what, what was not as it stands, and where that is written


@dataclass(frozen=True)
class SizePreset:
    """One file of presets/sizes: a model and the machine that it fits."""

    name: str
    description: str
    task: str  # the default among `tasks`, which are allowed
    tasks: tuple[str, ...]
    values: dict[str, Any]
    needs: str = ""
    per_task: dict[str, dict[str, Any]] = field(default_factory=dict)  # further values by task
    notes: dict[str, str] = field(default_factory=dict)  # reasons of values, by dotted key
    task_notes: dict[str, dict[str, str]] = field(default_factory=dict)  # reasons of the values of per_task
    measured: dict[str, Measured] = field(default_factory=dict)  # by task
    whole_run: dict[str, WholeRun] = field(default_factory=dict)  # by task
    gpu_memory_gib: float = 0  # of the GPUs that the values are for; 0 if none are needed
    suggested: bool = True
    """Whether `setup` may name it as what comes next; false where it needs data that are made first."""


@dataclass(frozen=True)
class Setting:
    """The value of a dotted key, what set it, and the file's reason for it."""

    value: Any
    origin: str
    note: str = ""


@cache
def folder() -> Path:
    """Return the folder of the preset files: of an installed package, else of the repository."""
    package = Path(__file__).parents[1]
    packed = package / "_presets"
    return packed if packed.is_dir() else package.parent / "presets"


@cache
def size_names() -> list[str]:
    """Return all size presets, those for a laptop first, then by size and number of hosts."""
    names = [path.stem for path in (folder() / "sizes").glob("*.yaml")]
    return sorted(names, key=lambda name: (name != "tiny", not name.endswith("_cpu"), _numbers(name), name))


@cache
def task_names() -> list[str]:
    """Return all task presets."""
    return sorted(path.stem for path in (folder() / "tasks").glob("*.yaml"))


def load_size(name: str) -> SizePreset:
    """Read presets/sizes/NAME.yaml; UserError names the nearest preset and lists all."""
    if name not in size_names():
        raise UserError(
            f"unknown preset '{name}'.{did_you_mean(name, size_names())}\n"
            f"Presets: {', '.join(size_names())}. What each is for: clusterkit presets"
        )
    data = _read(folder() / "sizes" / f"{name}.yaml")
    measured = {task: Measured(**values) for task, values in data.get("measured", {}).items()}
    whole = {task: WholeRun(**values) for task, values in data.get("whole_run", {}).items()}
    return SizePreset(name=name, **{**data, "tasks": tuple(data["tasks"]), "measured": measured, "whole_run": whole})


def load_task(name: str) -> TaskPreset:
    """Read presets/tasks/NAME.yaml; UserError names the nearest task and lists all."""
    if name not in task_names():
        raise UserError(f"unknown task '{name}'.{did_you_mean(name, task_names())}\nTasks: {', '.join(task_names())}")
    return TaskPreset(name=name, **_read(folder() / "tasks" / f"{name}.yaml"))


def task_chain(name: str) -> list[TaskPreset]:
    """Return a task and those that it extends, the most general first."""
    task = load_task(name)
    return [*(task_chain(task.base) if task.base else []), task]


def config_task(name: str) -> str:
    """Return the `task.name` of a task preset: memagent is hotpotqa at its full length."""
    return next(str(task.values["task"]["name"]) for task in task_chain(name) if "name" in task.values.get("task", {}))


def choose_task(size: SizePreset, task: str | None) -> str:
    """Return the task named `task`, or the size's default; UserError if the size does not allow it."""
    if task is None or task in size.tasks:
        return task or size.task
    load_task(task)  # its error names the nearest task
    fitting = [name for name in size_names() if task in load_size(name).tasks]
    raise UserError(
        f"preset {size.name} trains on {' or '.join(size.tasks)}, not on {task}: leave --task out, or use "
        + " or ".join(f"--preset {name}" for name in fitting)
    )


def collect(size: SizePreset, task: str, overrides: dict[str, Any] | None = None) -> dict[str, Setting]:
    """Return every key that the task, the size or an override sets, with its origin; later layers win."""
    own = {"preset": size.name, "experiment_name": f"{size.name}-{task}"}
    notes_of_task = {**size.notes, **size.task_notes.get(task, {})}
    layers: list[tuple[dict[str, Any], str, dict[str, str]]] = [
        (own, "the preset's name", {}),
        *((dict(leaves(link.values)), f"task {link.name}", link.notes) for link in task_chain(task)),
        (dict(leaves(size.values)), f"preset {size.name}", size.notes),
        (dict(leaves(size.per_task.get(task, {}))), f"preset {size.name} for {task}", notes_of_task),
        (overrides or {}, "override", {}),
    ]
    settings: dict[str, Setting] = {}
    for values, origin, notes in layers:
        name = values.get("algorithm.name")
        if origin == "override" and name is not None and name != _algorithm(settings):
            # These values of a preset would change what another algorithm is.
            settings = {key: setting for key, setting in settings.items() if key not in ROW_SETTINGS}
        for key, value in values.items():
            settings[key] = Setting(value, origin, notes.get(key, ""))
    chosen = {key: setting.value for key, setting in settings.items()}
    # A preset also has values for tasks, agents and rewards that are not chosen.
    return {k: setting for k, setting in settings.items() if setting.origin == "override" or applies(k, chosen)}


def _algorithm(settings: dict[str, Setting]) -> str:
    given = settings.get("algorithm.name")
    return str(AlgorithmConfig().name if given is None else given.value)


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """Turn {'train.total_steps': 5} into {'train': {'total_steps': 5}}."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        target = nested
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return nested


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested mapping, with their values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _numbers(name: str) -> tuple[float, ...]:
    return tuple(float(number) for number in re.findall(r"\d+(?:\.\d+)?", name))


@cache
def _read(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise UserError(f"preset file {path} is not a YAML mapping: reinstall clusterkit, or repair the file")
    return data
