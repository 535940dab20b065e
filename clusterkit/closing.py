"""The closing table of a run: held-out accuracy before and after, where the time went, where the model is."""

from __future__ import annotations

import json
from typing import Any

from clusterkit.rundir import RunDirectory
from clusterkit.textplot import duration, shares


def read_summary(run: RunDirectory) -> dict[str, Any] | None:
    """summary.json, or None where the run has not written a readable one."""
    try:
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """The closing table as text."""
    (title, *heads), *rows = closing_rows(summary)
    width = max(len(label) for label, *_ in [(title, *heads), *rows])
    lines = [f"{label:<{width}}  {before:>7}  {after:>7}" for label, before, after in [(title, *heads), *rows]]
    lines.append("")
    if summary.get("seconds") is not None:
        split = {str(name): float(s) for name, s in (summary.get("time_split") or {}).items() if _is_number(s)}
        spent = shares(split)
        # Steps alone where the split is unknown, else everything that the split accounts for, the warm-up first.
        total = sum(split.values()) or float(summary["seconds"])
        lines.append(f"time        {duration(total)}" + (f": {spent}" if spent else ""))
    if summary.get("checkpoint"):
        lines.append(f"checkpoint  {summary['checkpoint']}")
    return lines


def closing_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Label, value before and value after of every row of the closing table, its heading first."""
    rows = [row for row in summary.get("table") or [] if isinstance(row, dict)]
    trained = [number for number in summary.get("trained_chunks") or [] if isinstance(number, int)]
    tasks = summary.get("num_tasks")
    lengths = any(row.get("chunks") for row in rows)
    found = [("held-out accuracy" + (f" ({tasks} tasks, greedy)" if tasks else " (greedy)"), "before", "after")]
    for row in rows:
        found.append((_label(row, trained), _percent(row.get("before")), _percent(row.get("after"))))
        if not lengths and not row.get("blank_memory"):  # one task without lengths has room for its other metrics
            found += _metrics(row)
    if summary.get("chance") is not None:
        found.append(("a blind guess", _percent(summary["chance"]), _percent(summary["chance"])))
    return found


def _label(row: dict[str, Any], trained: list[int]) -> str:
    chunks = row.get("chunks") or 0
    if not chunks:
        label = f"as trained, {trained[0]} to {trained[-1]} chunks" if trained else "as trained"
    else:
        label = f"{chunks} chunks"
        if trained and chunks > max(trained):
            label += f" ({chunks / max(trained):.3g} x the longest trained)"
    return f"{label}, memory blanked" if row.get("blank_memory") else label


def _metrics(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    before, after = row.get("metrics_before") or {}, row.get("metrics_after") or {}
    return [
        (f"  {name}", _percent(before.get(name)), _percent(after.get(name)))
        for name in dict.fromkeys([*before, *after])
    ]


def _percent(value: Any) -> str:
    if not _is_number(value):
        return "-"
    return f"{value:.2%}" if 0 < value < 0.01 else f"{value:.1%}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
