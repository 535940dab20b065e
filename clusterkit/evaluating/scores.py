"""Scores of a run's checkpoints, kept in the run's own folder so that its report can draw them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterkit.evaluating.curve import curves
from clusterkit.evaluating.request import global_step, run_of
from clusterkit.launch import disk_errors
from clusterkit.report.markup import Html, join, table
from clusterkit.rundir import RunDirectory
from evaluation.table import COLUMNS, areal_cells
from trainer.files import write_atomic

FOLDER = "scores"
_LEFT_OUT = ("questions", "inputs", "notes")


def keep_scores(results: dict[str, Any], place: Path) -> None:
    """Write a result's numbers to the run that its checkpoint is of; nothing where it is of none.

    Raises:
        UserError: the run's folder cannot be written.

    """
    run = run_of(Path(results["model_path"]))
    if run is None:
        return
    rows = [{key: value for key, value in row.items() if key not in _LEFT_OUT} for row in results["rows"]]
    summary = {key: results[key] for key in ("status", "model_path", "time", "engine")} | {"rows": rows}
    folder = run.logs / FOLDER
    with disk_errors(run.logs):
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"{place.name}.json", json.dumps(summary, ensure_ascii=False) + "\n")


def read_scores(run: RunDirectory) -> list[dict[str, Any]]:
    """What was kept of a run's evaluations, by their time; a damaged file is passed over."""
    found = []
    for path in (run.logs / FOLDER).glob("*.json"):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda one: one.get("time", 0.0))


def scores_of(runs: Sequence[RunDirectory]) -> Html | None:
    """Curve and table of the scores of every run; None without one."""
    parts: list[object] = []
    for run in runs:
        results = read_scores(run)
        if not results:
            continue
        body = [
            [f"{run.trial} {global_step(Path(one['model_path'])) or Path(one['model_path']).name}", *areal_cells(row)]
            for one in sorted(results, key=lambda one: global_step(Path(one["model_path"])) or 0)
            for row in one["rows"]
        ]
        parts += [curves(results), table(["checkpoint of step", *COLUMNS], body)]
    return join(*parts) if parts else None
