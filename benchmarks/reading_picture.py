"""Picture of `benchmarks/reading.py`: F1 over the number of documents, a line an arm, as a file of SVG."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reading_records import Arm, Records

from clusterkit.ui.markup import Html, tag
from evaluation.intervals import bootstrap

SHOWN = {
    Arm("trained", "memagent"): ("#1f6feb", ""),
    Arm("supervised", "memagent"): ("#d29922", ""),
    Arm("trained", "gold"): ("#2da44e", "6 4"),
    Arm("trained", "rag"): ("#8250df", "6 4"),
    Arm("trained", "long_context"): ("#cf222e", "6 4"),
    Arm("shuffled", "memagent"): ("#bf5aa5", ""),
    Arm("trained", "blank_memory"): ("#57606a", "2 3"),
    Arm("trained", "no_context"): ("#afb8c1", "2 3"),
}
"""Colour and dashes of the lines, in the order of the legend. The table has all arms."""
LEFT, TOP, WIDE, HIGH, LINE = 56.0, 44.0, 520.0, 320.0, 24.0
LEGEND = 330.0
"""Sizes in pixels: margins, the plot, a line of the legend, which is right of the plot."""
STEPS = (1, 2, 5, 10, 20)
"""Points of F1 between two lines of the grid."""


@dataclass(frozen=True)
class Point:
    """Mean F1 at a number of documents, with its interval; in points."""

    documents: int
    mean: float
    low: float
    high: float


def picture(records: Records) -> str:
    """The whole file."""
    lines = {arm: points for arm in SHOWN if (points := points_of(records, arm))}
    most = max((point.high for points in lines.values() for point in points), default=1.0)
    step = next(step for step in STEPS if 5 * step >= most)
    top = step * max(1, math.ceil(most / step))
    asked = sum(form != "yes_no" for form in records.forms)
    title = f"F1 of {asked} questions about real documents, 95 % intervals"
    parts = [
        tag("rect", width="100%", height="100%", fill="#ffffff"),
        _text(LEFT, 24, title, size=15),
        *_axes(records.documents, top, step),
    ]
    for number, (arm, points) in enumerate(lines.items()):
        parts += [*_line(arm, points, records.documents, top), *_entry(number, arm)]
    width, height = LEFT + WIDE + LEGEND, TOP + HIGH + 52
    style = "font-family:system-ui,sans-serif"
    view = f"0 0 {width:.0f} {height:.0f}"
    box = {"viewBox": view, "width": f"{width:.0f}", "height": f"{height:.0f}", "style": style}
    return f"{tag('svg', *parts, xmlns='http://www.w3.org/2000/svg', role='img', aria_label=title, **box)}\n"


def points_of(records: Records, arm: Arm) -> list[Point]:
    """The arm's points, yes/no questions left out."""
    found = []
    for documents in records.documents:
        if scores := records.scores(arm, documents):
            low, high = bootstrap(scores)
            found.append(Point(documents, 100 * statistics.mean(scores), 100 * low, 100 * high))
    return found


def _axes(documents: list[int], top: int, step: int) -> list[Html]:
    parts = []
    for tick in range(0, top + 1, step):
        at = _y(tick, top)
        parts.append(tag("path", d=f"M{LEFT} {at}h{WIDE}", stroke="#d0d7de"))
        parts.append(_text(LEFT - 8, at + 4, str(tick), anchor="end"))
    parts += [_text(_x(number, documents), TOP + HIGH + 20, str(number), anchor="middle") for number in documents]
    parts.append(_text(LEFT + WIDE / 2, TOP + HIGH + 42, "documents of a question", anchor="middle"))
    return parts


def _line(arm: Arm, points: list[Point], documents: list[int], top: int) -> list[Html]:
    colour, dashes = SHOWN[arm]
    places = [(_x(point.documents, documents), _y(point.mean, top)) for point in points]
    bars = "".join(f"M{x} {_y(p.low, top)}V{_y(p.high, top)}" for p, (x, _) in zip(points, places, strict=True))
    drawn = [tag("path", d=bars, stroke=colour, stroke_width="1.5", opacity="0.5")]
    if len(points) > 1:
        joined = "M" + "L".join(f"{x} {at}" for x, at in places)
        drawn.append(
            tag("path", d=joined, stroke=colour, stroke_width="2.5", fill="none", stroke_dasharray=dashes or None)
        )
    return [*drawn, *(tag("circle", cx=x, cy=at, r="3.5", fill=colour) for x, at in places)]


def _entry(number: int, arm: Arm) -> list[Html]:
    colour, dashes = SHOWN[arm]
    at, left = TOP + 10 + LINE * number, LEFT + WIDE + 24
    path = tag("path", d=f"M{left} {at}h28", stroke=colour, stroke_width="2.5", stroke_dasharray=dashes or None)
    return [path, _text(left + 36, at + 4, arm.label)]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> Html:
    return tag("text", text, x=x, y=y, text_anchor=anchor, font_size=size, fill="#1f2328")


def _x(number: int, documents: list[int]) -> float:
    """Place of a number of documents, on a logarithmic axis."""
    low, high = math.log(documents[0]), math.log(documents[-1])
    share = (math.log(number) - low) / (high - low) if high > low else 0.5
    return round(LEFT + 16 + share * (WIDE - 32), 1)


def _y(value: float, top: int) -> float:
    return round(TOP + (1 - value / top) * HIGH, 1)
