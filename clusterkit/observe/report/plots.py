"""The plots of a page: their captions, and the data that plots.js draws."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.observe.report.charts import MOST_MARKS, Chart, Numbers, marks, numbers_of, sections
from clusterkit.observe.report.drawing import still
from clusterkit.observe.report.series import Series
from clusterkit.observe.report.source import Run
from clusterkit.ui.markup import Html, join, json_data, tag

COLOURS = 7
"""The number of colours in page.css."""

_MARKS = (("recover", "recover checkpoint"), ("save", "checkpoint kept"), ("restart", "restart"))
_NONE = Html("No training step has ended yet: plots begin with the first one.")


@dataclass(frozen=True)
class Plots:
    """The plots of runs."""

    markup: Html  # those of the first section, whether it learns, with the data of all
    version: str  # changes with the content of any
    more: Html | None = None  # those of the further sections; None without any
    some: bool = True  # whether there are any plots


def plots(runs: Sequence[Run]) -> Plots:
    """Return the plots, which change only with the records."""
    numbers = numbers_of(runs)
    found = sections(runs, numbers)
    if not found:
        return Plots(tag("p", _NONE, cls="empty"), "none", some=False)
    charts = [chart for _, some in found for chart in some]
    data = _data(runs, charts, numbers)
    drawn: list[Html] = []
    for title, some in found:
        figures = tag(
            "div", *(_figure(charts.index(one), one, numbers, data["runs"]) for one in some), cls="grid-of-plots"
        )
        if title == "Other numbers":
            drawn.append(tag("details", tag("summary", title), figures, id="others"))
        else:
            drawn.append(tag("section", tag("h2", title), figures))
    kinds = {kind for _, kind, *_ in data["marks"]}
    thinned = any(series.thinned for lines in numbers.values() for series in lines.values())
    added = tag("div", cls="grid-of-plots", id="added")
    markup = join(_key(runs, kinds, thinned), added, drawn[0], json_data(data, id="shared"))
    more = join(*drawn[1:])
    return Plots(markup, hashlib.sha256((markup + more).encode()).hexdigest()[:16], more or None)


def tools(runs: Sequence[Run]) -> Html:
    """Return the controls above the plots, which plots.js shows and works with."""
    names = labels(runs)
    chosen = [
        tag(
            "label",
            tag("input", type="checkbox", data_run=name, checked=True),
            tag("i", cls="chip", data_chip=index),
            name,
        )
        for index, name in enumerate(names)
    ]
    return tag(
        "div",
        tag(
            "label",
            "Smoothing",
            tag("input", id="smooth", type="range", min=0, max=0.99, step=0.01, value=0),
            tag("output", id="smooth-value", aria_live="off"),
        ),
        tag("label", tag("input", id="log", type="checkbox"), "Log scale"),
        tag(
            "span",
            tag("label", "Steps", tag("input", id="from", type="number", step=1)),
            tag("label", "to", tag("input", id="to", type="number", step=1)),
            tag("button", "All steps", type="button", data_act="all-steps"),
            cls="steps",
        ),
        tag(
            "form",
            tag("input", list="names", placeholder="lr, grad_*, time/*", aria_label="Numbers to plot"),
            tag("button", "Add a plot"),
            tag("datalist", id="names"),
            id="add",
        ),
        tag("button", "All values as CSV", type="button", data_act="all-csv"),
        tag("div", *chosen, cls="runs", role="group", aria_label="Runs that are shown") if len(runs) > 1 else None,
        id="tools",
        cls="tools",
        hidden=True,
        data_version=hashlib.sha256(repr(names).encode()).hexdigest()[:16],
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the shortest names that tell the runs apart: their trials, unless two have the same."""
    trials = [run.directory.trial for run in runs]
    return trials if len({*trials}) == len(trials) else [run.name for run in runs]


def _data(runs: Sequence[Run], charts: Sequence[Chart], numbers: Numbers) -> dict[str, Any]:
    grids: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    steps = [
        step
        for lines in numbers.values()
        for series in lines.values()
        for step in (*series.first[:1], *series.last[-1:], *series.non_finite)
    ]
    low, high = min(steps), max(steps)
    values = {
        name: [
            {"run": run, "grid": grids.setdefault((series.first, series.last), len(grids)), **_values(series)}
            for run, series in lines.items()
        ]
        for name, lines in numbers.items()
    }
    return {
        "x": [low, high] if high > low else [low - 1, high + 1],
        "runs": labels(runs),
        "grids": [[first, last] if first != last else [first] for first, last in grids],
        "numbers": values,
        "charts": [
            {"names": chart.names, "from_zero": chart.from_zero, "stacked": chart.stacked} for chart in charts
        ],
        "marks": [[mark.step, mark.kind, mark.run, mark.text] for mark in marks(runs) if low <= mark.step <= high],
    }  # fmt: skip


def _values(series: Series) -> dict[str, list[float]]:
    values = {"mean": [float(f"{value:.6g}") for value in series.mean]}
    if series.thinned:
        values |= {"low": [float(f"{value:.4g}") for value in series.low]}
        values |= {"high": [float(f"{value:.4g}") for value in series.high]}
    return values


def _figure(number: int, chart: Chart, numbers: Numbers, runs: Sequence[str]) -> Html:
    lines = [
        (name if len(runs) == 1 or chart.stacked is not None else f"{name} {runs[run]}", place, run, series)
        for place, name in enumerate(chart.names)
        for run, series in numbers[name].items()
        if chart.stacked in (None, run)
    ]
    caption = tag(
        "figcaption",
        tag("h3", chart.title, join(" ", tag("small", chart.unit)) if chart.unit else None),
        tag("p", chart.meaning) if chart.meaning else None,
    )
    drawn = [
        (name, (place if len(runs) == 1 or chart.stacked is not None else run) % COLOURS, series)
        for name, place, run, series in lines
    ]
    return tag(
        "figure",
        caption,
        tag(
            "div",
            tag("noscript", still(drawn)),
            cls="plot",
            tabindex="0",
            role="group",
            aria_label=_description(chart.title, lines),
        ),
        *(tag("p", text, cls="odd") for text in _non_finite_notes(lines)),
        data_chart=number,
    )


def _description(title: str, lines: Sequence[tuple[str, int, int, Series]]) -> str:
    """Describe the plot for screen readers."""
    parts = [
        f"{name} from {series.mean[0]:.4g} at step {series.first[0]} to {series.mean[-1]:.4g} at step {series.last[-1]}"
        for name, _, _, series in lines
        if series.mean
    ]
    return f"{title}: {'; '.join(parts)}"


def _non_finite_notes(lines: Sequence[tuple[str, int, int, Series]]) -> list[str]:
    notes = []
    for name, _, _, series in lines:
        if steps := series.non_finite:
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first at step {steps[0]}"
            notes.append(f"{name} was no finite number at {where}.")
    return notes


def _key(runs: Sequence[Run], kinds: set[str], thinned: bool) -> Html:
    """Return the legend of marks, and how to work with plots."""
    some = {
        kind
        for run in runs
        for kind, written in (("recover", run.recovers()), ("save", run.history.saves))
        if len(written) > MOST_MARKS
    }
    items = [
        tag("span", tag("i", cls=f"mark {kind}"), text, " (not all drawn)" if kind in some else None)
        for kind, text in _MARKS
        if kind in kinds
    ]
    if thinned:
        items.append(tag("span", tag("i", cls="bandkey"), "least to greatest value; the line is the mean"))
    items.append(tag("span", "x: training steps; drag to zoom, double-click for all", cls="wide-only"))
    return tag("div", *items, cls="legend key")
