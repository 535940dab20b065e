"""Draw a chart as SVG, so that pages need no plotting library and work without scripts.

A library would add hundreds of kilobytes of script to every page (plotly: 4 MB). The drawing is stretched to the width
of the screen; its labels are HTML, so text keeps its size on a phone. page.js shows the values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clusterkit.observe.report.charts import Chart, Line, Mark
from clusterkit.observe.report.series import Series
from clusterkit.ui.markup import Html, json_data, tag

UNITS = 1000
"""Width and height of every drawing."""

FEW_POINTS = 60
"""A line with at most so many points has dots."""

COLOURS = 7
"""The number of colours in page.css."""

MARK_HEIGHTS = {"recover": 40, "save": 110, "restart": UNITS}


class Plotter:
    """Draws charts over one range of steps, and collects the grids of steps and the marks that they share."""

    def __init__(self, sections: Sequence[tuple[str, Sequence[Chart]]], marks: Sequence[Mark], runs: Sequence[str]):
        drawn = [line.series for _, charts in sections for chart in charts for line in chart.lines]
        steps = [step for series in drawn for step in (*series.first[:1], *series.last[-1:], *series.non_finite)]
        self.x = scale(min(steps, default=0), max(steps, default=1), whole=True, count=6, snug=True)
        self.marks = [mark for mark in marks if self.x.low <= mark.step <= self.x.high]
        self.runs = runs
        self._grids: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def shared(self) -> Html:
        """Return the data that all plots share; call this after `figure`."""
        data = {
            "x": [self.x.low, self.x.high],
            "runs": list(self.runs),
            "grids": [[first, last] if first != last else [first] for first, last in self._grids],
            "marks": [[mark.step, mark.kind, mark.run, mark.text] for mark in self.marks],
        }
        return json_data(data, id="shared")

    def figure(self, chart: Chart) -> Html:
        """Return one plot with its title, axes, legend and data."""
        y = _value_scale(chart)
        lines = _stacked(chart, self.x, y) if chart.stacked else _drawn(chart, self.x, y)
        # Areas belong to one run, and would hide its marks.
        ticks = self._ticks({line.run for line in chart.lines})
        svg = tag(
            "svg",
            *(tag("path", d=f"M0 {_y(y, tick)}H{UNITS}", cls="grid") for tick in y.ticks),
            *([*lines, *ticks] if chart.stacked else [*ticks, *lines]),
            tag("path", d=f"M0 0V{UNITS}", cls="cursor"),
            viewBox=f"0 0 {UNITS} {UNITS}",
            preserveAspectRatio="none",
            role="img",
            aria_label=_description(chart),
        )
        ticks_y = [tag("span", short(tick), style=f"top:{_y(y, tick) / 10}%") for tick in y.ticks]
        ticks_x = [tag("span", short(tick), style=f"left:{self.x.share(tick):.2%}") for tick in self.x.ticks]
        return tag(
            "figure",
            tag(
                "figcaption",
                tag("h3", chart.title, tag("small", chart.unit) if chart.unit else None),
                tag("p", chart.meaning) if chart.meaning else None,
            ),
            tag(
                "div",
                tag("div", *ticks_y, cls="y", aria_hidden="true"),
                tag("div", svg, cls="plot", tabindex="0"),
                tag("div", *ticks_x, cls="x", aria_hidden="true"),
                cls="frame",
            ),
            tag("div", *self._legend(chart), cls="legend"),
            *(tag("p", text, cls="odd") for text in _non_finite_notes(chart.lines, self.runs)),
            json_data([self._line_data(line, chart) for line in chart.lines]),
        )

    def _ticks(self, runs: set[int]) -> list[Html]:
        paths = []
        for kind, height in MARK_HEIGHTS.items():
            steps = sorted({mark.step for mark in self.marks if mark.kind == kind and mark.run in runs})
            if steps:
                drawn = "".join(f"M{_x(self.x, step)} {UNITS}v-{height}" for step in steps)
                paths.append(tag("path", d=drawn, cls=f"mark {kind}"))
        return paths

    def _legend(self, chart: Chart) -> list[Html]:
        return [
            tag("span", tag("i", cls=_style(line, chart)), line.label, self._whose(chart, line)) for line in chart.lines
        ]

    def _whose(self, chart: Chart, line: Line) -> Html | None:
        return tag("small", f" {self.runs[line.run]}") if len(self.runs) > 1 and not chart.stacked else None

    def _line_data(self, line: Line, chart: Chart) -> dict[str, object]:
        series = line.series
        grid = self._grids.setdefault((series.first, series.last), len(self._grids))
        data: dict[str, object] = {
            "label": line.label,
            "style": _style(line, chart),
            "run": line.run,
            "grid": grid,
            "mean": _brief(series.mean),
        }
        return data | ({"low": _brief(series.low), "high": _brief(series.high)} if series.thinned else {})


def _drawn(chart: Chart, x: Scale, y: Scale) -> list[Html]:
    """Draw bands from least to greatest value, lines over all bands, and dots if there are few points."""
    bands, paths = [], []
    for line in chart.lines:
        series, style = line.series, _style(line, chart)
        middle = _middle(series)
        points = [f"{_x(x, step)} {_y(y, value)}" for step, value in zip(middle, series.mean, strict=True)]
        if series.thinned:
            upper = [f"{_x(x, step)} {_y(y, value)}" for step, value in zip(middle, series.high, strict=True)]
            lower = [f"{_x(x, step)} {_y(y, value)}" for step, value in zip(middle, series.low, strict=True)]
            bands.append(tag("path", d=f"M{'L'.join([*upper, *reversed(lower)])}Z", cls=f"band {style}"))
        if points:
            paths.append(tag("path", d=f"M{'L'.join(points)}", cls=f"line {style}"))
            if len(points) <= FEW_POINTS:
                paths.append(tag("path", d="".join(f"M{point}h0" for point in points), cls=f"dots {style}"))
    return [*bands, *paths]


def _stacked(chart: Chart, x: Scale, y: Scale) -> list[Html]:
    """Draw stacked areas; the lines have the same steps."""
    areas: list[Html] = []
    base: tuple[float, ...] = ()
    for line in chart.lines:
        series = line.series
        base = base or (0.0,) * len(series.mean)
        top = tuple(under + value for under, value in zip(base, series.mean, strict=True))
        steps = [_x(x, step) for step in _middle(series)]
        if len(steps) == 1:  # an area needs a width
            steps, top, base = [0.0, float(UNITS)], top * 2, base * 2
        upper = [f"{step} {_y(y, value)}" for step, value in zip(steps, top, strict=True)]
        lower = [f"{step} {_y(y, value)}" for step, value in zip(steps, base, strict=True)]
        areas.append(tag("path", d=f"M{'L'.join([*upper, *reversed(lower)])}Z", cls=f"area {_style(line, chart)}"))
        base = top[: len(series.mean)]
    return areas


def _style(line: Line, chart: Chart) -> str:
    """Return the classes of page.css: the colour, and for lines the run, whose second one is dashed."""
    return f"c{line.colour % COLOURS}" if chart.stacked else f"c{line.colour % COLOURS} r{line.run}"


def _value_scale(chart: Chart) -> Scale:
    if chart.stacked:
        tops = [sum(values) for values in zip(*(line.series.mean for line in chart.lines), strict=True)]
        return scale(0.0, max(tops, default=0.0) or 1.0)
    low = min((min(line.series.low) for line in chart.lines if line.series.low), default=0.0)
    high = max((max(line.series.high) for line in chart.lines if line.series.high), default=1.0)
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            high = 1.0
    return scale(low, high)


def _middle(series: Series) -> list[float]:
    return [(first + last) / 2 for first, last in zip(series.first, series.last, strict=True)]


def _x(x: Scale, step: float) -> float:
    return round(x.share(step) * UNITS, 1)


def _y(y: Scale, value: float) -> int:
    return round((1 - y.share(value)) * UNITS)


def _brief(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _non_finite_notes(lines: Sequence[Line], runs: Sequence[str]) -> list[str]:
    notes = []
    for line in lines:
        steps = line.series.non_finite
        if steps:
            whose = f"{line.label} ({runs[line.run]})" if len(runs) > 1 else line.label
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first at step {steps[0]}"
            notes.append(f"{whose} was no finite number at {where}.")
    return notes


def _description(chart: Chart) -> str:
    """Describe the plot for screen readers."""
    parts = []
    for line in chart.lines:
        values = line.series.mean
        if values:
            parts.append(f"{line.label} from {short(values[0])} at step {line.series.first[0]} to {short(values[-1])} "
                         f"at step {line.series.last[-1]}")  # fmt: skip
    return f"{chart.title}: {'; '.join(parts)}"


LEAST_SPAN = 1e-3
"""An axis spans at least this share of its values: less is rounding, with equal ticks."""

SMALLEST = 1e-300
"""Smaller numbers count as 0: they lose their digits."""


@dataclass(frozen=True)
class Scale:
    """A range of values and the ticks in it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return the place of a value in the range, 0…1."""
        return (value - self.low) / (self.high - self.low)


def scale(low: float, high: float, whole: bool = False, count: int = 5, snug: bool = False) -> Scale:
    """Return a range around low…high with about `count` round ticks.

    Args:
        low: least value.
        high: greatest value.
        whole: ticks are integers.
        count: of ticks, about.
        snug: the range does not extend to the next tick.
    """
    size = max(abs(low), abs(high))
    if size < SMALLEST:
        low, high = low - 1.0, high + 1.0
    elif high - low < LEAST_SPAN * size:
        pad = size * LEAST_SPAN * 10
        low, high = low - pad, high + pad
    step = _round_up((high - low) / count)
    if whole:
        step = max(math.ceil(step), 1)
    if not snug:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(index * step for index in range(first, last + 1)))


def _round_up(value: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= value * 0.999)


def short(value: float) -> str:
    """Return a number for an axis or a tooltip: `0.25`, `12.3k`, `1.5e-06`."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, factor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / factor:.5g}{unit}" if size < 1e13 else f"{value:.4g}"
    return f"{value:.5g}" if size >= 1e-3 else f"{value:.4g}"
