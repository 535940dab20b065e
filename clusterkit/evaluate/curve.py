"""Accuracy over training steps, with its 95 % interval, as one small drawing a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit.ui.markup import Html, join, tag
from evaluation.metrics import row_interval
from evaluation.steps import global_step

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 220, 46, 26
_MEASURES = (("greedy_acc", "--c0"), ("sample_pass@1", "--c1"))


@dataclass(frozen=True)
class Point:
    """A measurement: step, value and interval, 0 to 1."""

    step: int
    value: float
    low: float
    high: float


def points_of(results: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    """Dataset and measure -> points by step, from results in the order of their time; the latest of a step counts."""
    found: dict[tuple[str, str], dict[int, Point]] = {}
    for one in results:
        step = global_step(Path(one["model_path"]))
        if step is None:
            continue
        for row in one["rows"]:
            for measure, _ in _MEASURES:
                if (value := row.get(measure)) is not None:
                    low, high = row_interval(row, measure) or (value, value)
                    found.setdefault((row["dataset"], measure), {})[step] = Point(step, value, low, high)
    return {key: [points[step] for step in sorted(points)] for key, points in found.items()}


def curves(results: Sequence[dict[str, Any]]) -> Html | None:
    """A figure for every dataset of which two checkpoints or more were scored; None without one."""
    points = points_of(results)
    datasets = dict.fromkeys(dataset for (dataset, _), line in points.items() if len(line) > 1)
    figures = [_figure(name, {m: points[name, m] for m, _ in _MEASURES if (name, m) in points}) for name in datasets]
    return tag("div", *figures, cls="grid-of-plots") if figures else None


def _figure(dataset: str, lines: dict[str, list[Point]]) -> Html:
    every = [point for line in lines.values() for point in line]
    first, last = min(p.step for p in every), max(p.step for p in every)
    top = min(1.0, max(p.high for p in every) * 1.1 + 0.02)

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return (HEIGHT - BOTTOM) * (1 - value / top) + 4

    drawn: list[Html] = []
    for share in (0.0, 0.5, 1.0):
        value = share * top
        place = {"x1": LEFT, "x2": WIDTH - 10, "y1": f"{y(value):.1f}", "y2": f"{y(value):.1f}"}
        drawn.append(tag("line", style="stroke: var(--border)", **place))
        drawn.append(tag("text", f"{100 * value:.0f}", x=4, y=f"{y(value) + 4:.1f}", style=_text))
    for step in dict.fromkeys((first, last)):
        drawn.append(tag("text", str(step), x=f"{x(step) - 12:.1f}", y=HEIGHT - 4, style=_text))
    for measure, colour in _MEASURES:
        line = lines.get(measure, [])
        stroke = f"stroke: var({colour}); fill: none; stroke-width: 1.8"
        if len(line) > 1:
            path = " ".join(f"{'M' if i == 0 else 'L'}{x(p.step):.1f},{y(p.value):.1f}" for i, p in enumerate(line))
            drawn.append(tag("path", d=path, style=stroke))
        for p in line:
            bar = f"M{x(p.step):.1f},{y(p.low):.1f} L{x(p.step):.1f},{y(p.high):.1f}"
            title = f"step {p.step}: {measure} {100 * p.value:.1f} ({100 * p.low:.1f} to {100 * p.high:.1f})"
            drawn.append(tag("path", tag("title", title), d=bar, style=f"stroke: var({colour}); opacity: .6"))
            drawn.append(
                tag("circle", tag("title", title), cx=f"{x(p.step):.1f}", cy=f"{y(p.value):.1f}", r=3.5, style=stroke)
            )
    key = [
        tag("span", tag("b", "— ", style=f"color: var({colour})"), name, " ")
        for name, colour in _MEASURES
        if name in lines
    ]
    caption = tag("figcaption", tag("h3", dataset), tag("p", *key, "over training steps; bars: 95 %"))
    return tag("figure", caption, join(tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")))


_text = "fill: var(--quiet); font-size: 12px"
