"""Scores of a run's checkpoints, which evaluations keep in the run's own folder, drawn for its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterkit.evaluate.curve import curves
from clusterkit.runs.directory import RunDirectory
from clusterkit.ui.markup import Html, join, table
from evaluation.steps import SCORES, global_step
from evaluation.table import COLUMNS, areal_cells


def read_scores(run: RunDirectory) -> list[dict[str, Any]]:
    """What was kept of a run's evaluations, by their time; a damaged file is passed over."""
    found = []
    for path in (run.logs / SCORES).glob("*.json"):
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
