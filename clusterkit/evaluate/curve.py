"""Accuracy over training steps, with its 95 % interval, as one small drawing a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterkit.ui.interval_plot import Line, Point, interval_plot
from clusterkit.ui.markup import Html, tag
from evaluation.metrics import row_interval
from evaluation.steps import global_step

_MEASURES = ("greedy_acc", "sample_pass@1")


def points_of(results: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    """Dataset and measure -> points by step, from results in the order of their time; the latest of a step counts."""
    found: dict[tuple[str, str], dict[int, Point]] = {}
    for one in results:
        step = global_step(Path(one["model_path"]))
        if step is None:
            continue
        for row in one["rows"]:
            for measure in _MEASURES:
                if (value := row.get(measure)) is not None:
                    low, high = row_interval(row, measure) or (value, value)
                    found.setdefault((row["dataset"], measure), {})[step] = Point(step, value, low, high)
    return {key: [points[step] for step in sorted(points)] for key, points in found.items()}


def curves(results: Sequence[dict[str, Any]]) -> Html | None:
    """A figure for every dataset of which two checkpoints or more were scored; None without one."""
    points = points_of(results)
    datasets = dict.fromkeys(dataset for (dataset, _), line in points.items() if len(line) > 1)
    figures = [
        interval_plot(
            name,
            "training steps",
            [Line(m, colour, points[name, m]) for colour, m in enumerate(_MEASURES) if (name, m) in points],
        )
        for name in datasets
    ]
    return tag("div", *figures, cls="grid-of-plots") if figures else None
