"""What the value of an option or an argument may be, for completion: presets, tasks, clusters, runs, settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydantic import BaseModel

from clusterkit.config.fields import fields
from clusterkit.config.presets import load_size, load_task, size_names, task_names
from clusterkit.data.assets import CATALOGUE
from clusterkit.hosts.inventory import cluster_names
from clusterkit.runs.directory import RunDirectory, folder_of_runs, runs
from evaluation.config import EvalConfig
from trainer.config import RunConfig

Candidates = list[tuple[str, str]]
"""Words that may come, each with what it means."""


def values(path: list[str], name: str, typed: dict[str, str], last: str) -> Candidates:
    """Return what may be the value of an option or an argument; none where it may be anything.

    Args:
        path: the command's words.
        typed: values that options before it were given.
        last: what is typed of it.
    """
    for place in (" ".join(path), *path[:1]):
        if name in _OF_COMMAND.get(place, {}):
            return _OF_COMMAND[place][name](typed, last)
    return _VALUES[name](typed, last) if name in _VALUES else []


def _presets(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001 (every one of them has both)
    return [(name, load_size(name).description) for name in size_names()]


def _tasks(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    names = load_size(typed["preset"]).tasks if typed.get("preset") in size_names() else task_names()
    return [(name, load_task(name).description) for name in names]


def _clusters(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    return [(name, "cluster") for name in cluster_names()]


def _assets(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    return [(name, asset.description) for name, asset in CATALOGUE.items()]


def _found_runs(typed: dict[str, str]) -> list[RunDirectory]:
    return runs(folder_of_runs(typed.get("fileroot")), typed.get("experiment"))[::-1]


def _experiments(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    kept = {name: value for name, value in typed.items() if name != "experiment"}
    return [(name, "experiment") for name in dict.fromkeys(run.experiment for run in _found_runs(kept))]


def _trials(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    return [(run.trial, f"of {run.experiment}") for run in _found_runs(typed)]


def _runs(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    return [(run.name, "run of this machine") for run in _found_runs(typed)]


def _settings(typed: dict[str, str], last: str, model: type[BaseModel] = RunConfig) -> Candidates:  # noqa: ARG001
    key, equals, _ = last.partition("=")
    known = fields(model)
    if not equals:
        return [(f"{name}=", one.help) for name, one in known.items()]
    one = known.get(key)
    words = () if one is None else ("true", "false") if one.kind == "bool" else one.choices
    return [(f"{key}={word}", "") for word in words]


def _keys(typed: dict[str, str], last: str) -> Candidates:  # noqa: ARG001
    sections = dict.fromkeys(name.partition(".")[0] for name in fields() if "." in name)
    return [*((name, "section") for name in sections), *((name, one.help) for name, one in fields().items())]


_Values = Callable[[dict[str, str], str], Candidates]
_VALUES: dict[str, _Values] = {
    "name": _runs,
    "preset": _presets,
    "first": _presets,
    "second": _presets,
    "task": _tasks,
    "cluster": _clusters,
    "experiment": _experiments,
    "trial": _trials,
    "compare": _runs,
    "recover_from": _runs,
    "model_path": _runs,
    "watch": _runs,
    "overrides": _settings,
    "setting": _settings,
    "settings": _settings,
}
"""What the value of an option or argument of a name may be, in every command that has it."""
_OF_COMMAND: dict[str, dict[str, _Values]] = {
    "presets": {"name": _presets},
    "presets explain": {"key": _keys},
    "use": {"name": _clusters},
    "assets": {"name": _assets},
    "eval": {"setting": partial(_settings, model=EvalConfig)},
    "ask": {"setting": partial(_settings, model=EvalConfig)},
}
"""The same of a command alone."""
