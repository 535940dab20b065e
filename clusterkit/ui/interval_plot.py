"""A drawing of measurements with their 95 % intervals: SVG in the colours of a page, which needs no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterkit.ui.markup import Html, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 240, 34, 12, 8, 24
NARROW = 24.0
"""Pixels between two numbers below the axis; those that would be nearer are left out."""
BESIDE = 7.0
"""Pixels between the bars of two lines at the same place."""
STEPS = (1, 2, 5, 10, 20)
"""Percent between two lines of the grid."""
_TEXT = "fill: var(--quiet); font-size: 12px"


@dataclass(frozen=True)
class Point:
    """A measurement: its place on the axis (a step, a number of documents); value and interval, 0 to 1."""

    at: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """Measurements of one kind.

    colour: its number in page.css.
    level: whether it has one point, which holds for the whole axis: a dashed line with a band.
    thin: whether it is something to compare with: a thin dashed line, whose intervals show where it is pointed at.
    """

    name: str
    colour: int
    points: Sequence[Point]
    level: bool = False
    thin: bool = False


def interval_plot(title: str, unit: str, lines: Sequence[Line], *, logarithmic: bool = False) -> Html:
    """Return a figure of lines, at least one with points.

    Args:
        unit: what the axis counts, such as "step" or "documents".
        logarithmic: whether the axis is; its places are above 0 then.
    """
    places = sorted({point.at for line in lines if not line.level for point in line.points})
    scale = math.log if logarithmic else float
    first, last = scale(places[0]), scale(places[-1])
    most = 100 * max(point.high for line in lines for point in line.points)
    step = next(step for step in STEPS if 5 * step >= most or step == STEPS[-1])
    top = step * max(math.ceil(most / step - 1e-9), 1)

    def x(at: int) -> float:
        inside = LEFT + 16, WIDTH - RIGHT - 16
        return inside[0] + (inside[1] - inside[0]) * ((scale(at) - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - 100 * value / top)

    drawn: list[Html] = []
    for percent in range(0, top + 1, step):
        at = f"{y(percent / 100):.1f}"
        drawn.append(tag("path", d=f"M{LEFT} {at}H{WIDTH - RIGHT}", style="stroke: var(--border)"))
        drawn.append(_text(LEFT - 6, y(percent / 100) + 4, str(percent), "end"))
    drawn += [_text(x(at), HEIGHT - 5, str(at), "middle") for at in _apart(places, x)]
    barred = [line for line in lines if not line.level and not line.thin]
    for line in sorted(lines, key=lambda one: one in barred):  # what matters lies on top
        shift = BESIDE * (barred.index(line) - (len(barred) - 1) / 2) if line in barred else 0.0
        drawn += _level(line, y) if line.level else _curve(line, [x(p.at) + shift for p in line.points], y, unit)
    styles = [f"c{line.colour}{' dashed' * (line.level or line.thin)}" for line in lines]
    key = [tag("span", tag("i", cls=style), line.name) for line, style in zip(lines, styles, strict=True)]
    band = " and band" * any(line.level for line in lines)
    thin = "; point at a thin line for its own" * any(line.thin for line in lines)
    about = f"percent over {unit}{' (log scale)' * logarithmic}; bars{band}: 95 %{thin}"
    told = "; ".join(_told(line, point, unit) for line in lines for point in line.points)
    svg = tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title}: {told}")
    return tag("figure", tag("figcaption", tag("h3", title), tag("p", about)), svg, tag("div", *key, cls="legend"))


def _curve(line: Line, across: Sequence[float], y: Callable[[float], float], unit: str) -> list[Html]:
    """Draw a line through its points, each with its interval as a bar. across: places of the points, in pixels."""
    stroke, width, radius = f"stroke: var(--c{line.colour})", "stroke-width: 1.8", 3.5
    if line.thin:
        width, radius = "stroke-width: 1; stroke-dasharray: 5 4", 2
    drawn: list[Html] = []
    if len(line.points) > 1:
        path = "L".join(f"{at:.1f} {y(point.value):.1f}" for at, point in zip(across, line.points, strict=True))
        drawn.append(tag("path", d=f"M{path}", style=f"{stroke}; {width}"))
    for at, point in zip(across, line.points, strict=True):
        bar = f"M{at:.1f} {y(point.low):.1f}V{y(point.high):.1f}"
        fill = f"fill: var(--c{line.colour})"
        dot = tag("circle", cx=f"{at:.1f}", cy=f"{y(point.value):.1f}", r=radius, style=fill)
        whisker = None if line.thin else tag("path", d=bar, style=f"{stroke}; stroke-width: 1.5; opacity: .6")
        drawn.append(tag("g", tag("title", _told(line, point, unit)), whisker, dot))
    return drawn


def _level(line: Line, y: Callable[[float], float]) -> list[Html]:
    point = line.points[0]
    band = f"M{LEFT} {y(point.low):.1f}H{WIDTH - RIGHT}V{y(point.high):.1f}H{LEFT}Z"
    dashes = f"stroke: var(--c{line.colour}); stroke-width: 1.5; stroke-dasharray: 5 4"
    return [
        tag("path", d=band, style=f"fill: var(--c{line.colour}); opacity: .15"),
        tag("path", d=f"M{LEFT} {y(point.value):.1f}H{WIDTH - RIGHT}", style=dashes),
    ]


def _told(line: Line, point: Point, unit: str) -> str:
    return f"{line.name}, {unit} {point.at}: {100 * point.value:.1f} ({100 * point.low:.1f} … {100 * point.high:.1f})"


def _apart(places: Sequence[int], x: Callable[[int], float]) -> list[int]:
    """Return the places whose numbers have room: the first and the last, and those between."""
    kept = [places[0]]
    for at in places[1:-1]:
        if x(at) - x(kept[-1]) >= NARROW and x(places[-1]) - x(at) >= NARROW:
            kept.append(at)
    return [*kept, places[-1]] if len(places) > 1 else kept


def _text(across: float, down: float, text: str, anchor: str) -> Html:
    return tag("text", text, x=f"{across:.1f}", y=f"{down:.1f}", text_anchor=anchor, style=_TEXT)
