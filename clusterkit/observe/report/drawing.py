"""A plot as a small SVG, for readers whose browser runs no scripts; all others see uPlot's."""

from __future__ import annotations

from collections.abc import Sequence

from clusterkit.observe.report.series import Series
from clusterkit.ui.markup import Html, join, tag

WIDTH, HEIGHT = 400, 120
MOST_POINTS = 80
"""Points of a line here: the page has the values once already."""


def still(lines: Sequence[tuple[str, int, Series]]) -> Html | None:
    """Return the lines in one frame, with their names and ends; None without a finite value.

    Args:
        lines: name, number of the colour in page.css, and values.
    """
    drawn = [line for line in lines if line[2].mean]
    if not drawn:
        return None
    steps = [step for _, _, series in drawn for step in (series.first[0], series.last[-1])]
    low, high = (edge(value for _, _, series in drawn for value in series.mean) for edge in (min, max))
    left, wide, tall = min(steps), max(max(steps) - min(steps), 1), (high - low) or 1.0
    paths, texts = [], []
    for name, colour, series in drawn:
        places = range(0, len(series.mean), -(-len(series.mean) // MOST_POINTS))
        points = [
            f"{(series.last[at] - left) / wide * WIDTH:.0f} {(high - series.mean[at]) / tall * HEIGHT:.0f}"
            for at in places
        ]
        paths.append(tag("path", d=f"M{'L'.join([*points, points[-1]])}", cls=f"line c{colour}"))
        ends = f" {series.mean[0]:.4g} … {series.mean[-1]:.4g}"
        texts.append(tag("span", tag("i", cls=f"c{colour}"), name, ends))
    svg = tag("svg", *paths, viewBox=f"-4 -4 {WIDTH + 8} {HEIGHT + 8}", preserveAspectRatio="none", cls="still")
    return join(svg, tag("div", *texts, cls="legend"))
