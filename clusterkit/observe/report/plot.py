"""A chart as markup: SVG made here, so that a page needs no plotting library, and is drawn where scripts are off.

A library would be hundreds of kilobytes of somebody else's script in every page (plotly: 4 MB) for lines on axes.
The drawing is stretched to the width of the screen and its labels are HTML beside it, so that text keeps its size on
a phone; a little script (page.js) shows values under the pointer from the data that goes with each plot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from clusterkit.observe.report.charts import Chart, Line, Mark
from clusterkit.observe.report.scale import Scale, scale, short
from clusterkit.observe.report.series import Series
from clusterkit.ui.markup import Html, tag

UNITS = 1000
"""Width and height of every drawing in its own units."""

FEW_POINTS = 60
"""Up to here each point of a line gets a dot."""

COLOURS = 7
"""Those of page.css."""

MARK_HEIGHTS = {"recover": 40, "save": 110, "restart": UNITS}


class Plotter:
    """Draws charts over one range of steps, and collects what they share: the grid of steps, and the marks."""

    def __init__(self, sections: Sequence[tuple[str, Sequence[Chart]]], marks: Sequence[Mark], runs: Sequence[str]):
        courses = [line.course for _, charts in sections for chart in charts for line in chart.lines]
        steps = [step for course in courses for step in (*course.first[:1], *course.last[-1:], *course.odd)]
        self.x = scale(min(steps, default=0), max(steps, default=1), whole=True, count=6, snug=True)
        self.marks = [mark for mark in marks if self.x.low <= mark.step <= self.x.high]
        self.runs = runs
        self._grids: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def shared(self) -> Html:
        """What all plots refer to; to be put on the page after they were drawn."""
        data = {
            "x": [self.x.low, self.x.high],
            "runs": list(self.runs),
            "grids": [[first, last] if first != last else [first] for first, last in self._grids],
            "marks": [[mark.step, mark.kind, mark.run, mark.text] for mark in self.marks],
        }
        return _data(data, id="shared")

    def figure(self, chart: Chart) -> Html:
        """One plot with its title, axes, legend and data."""
        y = _value_scale(chart)
        lines = _stacked(chart, self.x, y) if chart.stacked else _drawn(chart, self.x, y)
        # Areas of one run would hide its marks, and have nothing to do with those of the other.
        ticks = self._ticks({line.run for line in chart.lines})
        svg = tag(
            "svg",
            *(tag("path", d=f"M0 {_y(y, tick)}H{UNITS}", cls="grid") for tick in y.ticks),
            *([*lines, *ticks] if chart.stacked else [*ticks, *lines]),
            tag("path", d=f"M0 0V{UNITS}", cls="cursor"),
            viewBox=f"0 0 {UNITS} {UNITS}",
            preserveAspectRatio="none",
            role="img",
            aria_label=_spoken(chart),
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
            *(tag("p", text, cls="odd") for text in _odd(chart.lines, self.runs)),
            _data([self._line_data(line, chart) for line in chart.lines]),
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
        course = line.course
        grid = self._grids.setdefault((course.first, course.last), len(self._grids))
        data: dict[str, object] = {
            "label": line.label,
            "style": _style(line, chart),
            "run": line.run,
            "grid": grid,
            "mean": _brief(course.mean),
        }
        return data | ({"low": _brief(course.low), "high": _brief(course.high)} if course.thinned else {})


def _drawn(chart: Chart, x: Scale, y: Scale) -> list[Html]:
    """Bands from least to greatest below all lines, lines, and dots where there are few points."""
    bands, paths = [], []
    for line in chart.lines:
        course, style = line.course, _style(line, chart)
        middle = _middle(course)
        points = [f"{_x(x, step)} {_y(y, value)}" for step, value in zip(middle, course.mean, strict=True)]
        if course.thinned:
            upper = [f"{_x(x, step)} {_y(y, value)}" for step, value in zip(middle, course.high, strict=True)]
            lower = [f"{_x(x, step)} {_y(y, value)}" for step, value in zip(middle, course.low, strict=True)]
            bands.append(tag("path", d=f"M{'L'.join([*upper, *reversed(lower)])}Z", cls=f"band {style}"))
        if points:
            paths.append(tag("path", d=f"M{'L'.join(points)}", cls=f"line {style}"))
            if len(points) <= FEW_POINTS:
                paths.append(tag("path", d="".join(f"M{point}h0" for point in points), cls=f"dots {style}"))
    return [*bands, *paths]


def _stacked(chart: Chart, x: Scale, y: Scale) -> list[Html]:
    """Areas on one another; the lines have the same steps."""
    areas: list[Html] = []
    base: tuple[float, ...] = ()
    for line in chart.lines:
        course = line.course
        base = base or (0.0,) * len(course.mean)
        top = tuple(under + value for under, value in zip(base, course.mean, strict=True))
        steps = [_x(x, step) for step in _middle(course)]
        if len(steps) == 1:  # an area wants a width
            steps, top, base = [0.0, float(UNITS)], top * 2, base * 2
        upper = [f"{step} {_y(y, value)}" for step, value in zip(steps, top, strict=True)]
        lower = [f"{step} {_y(y, value)}" for step, value in zip(steps, base, strict=True)]
        areas.append(tag("path", d=f"M{'L'.join([*upper, *reversed(lower)])}Z", cls=f"area {_style(line, chart)}"))
        base = top[: len(course.mean)]
    return areas


def _style(line: Line, chart: Chart) -> str:
    """Classes of page.css: the colour, and dashes for the run that is compared; areas need none."""
    return f"c{line.colour % COLOURS}" if chart.stacked else f"c{line.colour % COLOURS} r{line.run}"


def _value_scale(chart: Chart) -> Scale:
    if chart.stacked:
        tops = [sum(values) for values in zip(*(line.course.mean for line in chart.lines), strict=True)]
        return scale(0.0, max(tops, default=0.0) or 1.0)
    low = min((min(line.course.low) for line in chart.lines if line.course.low), default=0.0)
    high = max((max(line.course.high) for line in chart.lines if line.course.high), default=1.0)
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            high = 1.0
    return scale(low, high)


def _middle(course: Series) -> list[float]:
    return [(first + last) / 2 for first, last in zip(course.first, course.last, strict=True)]


def _x(x: Scale, step: float) -> float:
    return round(x.share(step) * UNITS, 1)


def _y(y: Scale, value: float) -> int:
    return round((1 - y.share(value)) * UNITS)


def _brief(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _odd(lines: Sequence[Line], runs: Sequence[str]) -> list[str]:
    said = []
    for line in lines:
        steps = line.course.odd
        if steps:
            whose = f"{line.label} ({runs[line.run]})" if len(runs) > 1 else line.label
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first at step {steps[0]}"
            said.append(f"{whose} was no finite number at {where}.")
    return said


def _spoken(chart: Chart) -> str:
    """The plot in words, for those who do not see it."""
    parts = []
    for line in chart.lines:
        values = line.course.mean
        if values:
            parts.append(f"{line.label} from {short(values[0])} at step {line.course.first[0]} to {short(values[-1])} "
                         f"at step {line.course.last[-1]}")  # fmt: skip
    return f"{chart.title}: {'; '.join(parts)}"


def _data(value: object, **attributes: object) -> Html:
    """JSON for the script; `<` is written so that no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)
