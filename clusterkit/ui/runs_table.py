"""Many runs as a table that fits the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from clusterkit.common.text_plot import columns, duration
from clusterkit.runs.overview import RunOverview

MOST_SETTINGS = 8
"""Settings that are shown; --json has all."""
NOTHING = "-"


def runs_lines(listed: Sequence[RunOverview], keys: Sequence[str], width: int | None) -> list[str]:
    """Return the runs as lines.

    Args:
        keys: settings to show.
        width: columns of the terminal; None for any. Where a line is longer, settings go to a line of their own below
            the run, then the run's name to one above.
    """
    keys = keys[:MOST_SETTINGS]
    facts = _facts(listed)
    settings = [[*keys], *([value_text(one.settings.get(key, None)) for key in keys] for one in listed)]
    names = ["run", *(one.name for one in listed)]
    whole = columns([[name, *fact, *more] for name, fact, more in zip(names, facts, settings, strict=True)])
    if width is None or _longest(whole) <= width:
        return whole
    table = columns([[name, *fact] for name, fact in zip(names, facts, strict=True)])
    apart = _longest(table) > width
    if apart:
        table = [f"  {line}" for line in columns(facts)]
    lines = table[:1]
    for one, line in zip(listed, table[1:], strict=True):
        lines += [one.name, line] if apart else [line]
        words = " ".join(f"{key}={value_text(one.settings[key])}" for key in keys if key in one.settings)
        lines += textwrap.wrap(words, max(width, 20), initial_indent="    ", subsequent_indent="    ")
    return lines


def runs_rows(listed: Sequence[RunOverview], keys: Sequence[str]) -> list[str]:
    """Return the runs for a pipe: a line each under the names of the columns, tabs between them, all settings.

    The columns before the settings are always the same, so that `cut` finds them.
    """
    facts = _facts(listed, empty=True)
    lines = ["\t".join(["run", *facts[0], *keys])]
    for one, fact in zip(listed, facts[1:], strict=True):
        lines.append("\t".join([one.name, *fact, *(_one_line(value_text(one.settings.get(key))) for key in keys)]))
    return lines


def value_text(value: Any) -> str:
    """Return a setting's value as it would be typed."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(value_text(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(listed: Sequence[RunOverview], *, empty: bool = False) -> list[list[str]]:
    """Return the columns that all runs have, with those that any of them has a value for, or with all of them.

    empty: for a pipe, where the columns and their names are always the same.
    """
    scores = {one.score_name for one in listed if one.score_name}
    mixed = len(scores) > 1 and not empty  # then each run says what its score is
    score = "accuracy" if empty else "score" if mixed else next(iter(scores), "accuracy")
    rows = {
        "state": [one.state for one in listed],
        "step": [f"{one.global_step}/{one.total_steps or '?'}" for one in listed],
        "left": [duration(one.left) if one.left else "" for one in listed],
        "reward": [_number(one.reward) for one in listed],
        "loss": [_number(one.loss) for one in listed],
        score: [_score(one, named=mixed) for one in listed],
    }
    kept = {name: cells for name, cells in rows.items() if empty or any(cells)}
    return [list(kept), *([cell or NOTHING for cell in row] for row in zip(*kept.values(), strict=True))]


def _score(one: RunOverview, *, named: bool) -> str:
    if one.accuracy is None:
        return ""
    return f"{one.score_name} {one.accuracy:.1%}" if named else f"{one.accuracy:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _longest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)
