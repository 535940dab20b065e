"""The final evaluation of a run: held-out accuracy before and after, the time, and the checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

from clusterkit.common.text_plot import duration, shares
from clusterkit.runs.directory import RunDirectory


def read_summary(run: RunDirectory) -> dict[str, Any] | None:
    """Return summary.json, or None if it is missing or damaged."""
    try:
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Return the final evaluation as text."""
    (title, *heads), *rows = summary_rows(summary)
    width = max(len(label) for label, *_ in [(title, *heads), *rows])
    lines = [f"{label:<{width}}  {before:>7}  {after:>7}" for label, before, after in [(title, *heads), *rows]]
    lines.append("")
    if summary.get("seconds") is not None:
        split = {str(name): float(s) for name, s in (summary.get("time_split") or {}).items() if _is_number(s)}
        spent = shares(split)
        # If the split is unknown, this is the time of the steps; else all that the split covers, with the warm-up.
        total = sum(split.values()) or float(summary["seconds"])
        lines.append(f"time        {duration(total)}" + (f": {spent}" if spent else ""))
    if summary.get("rollouts_table"):
        lines.append(f"table       {summary['rollouts_table']}")
    if summary.get("checkpoint"):
        lines.append(f"checkpoint  {summary['checkpoint']}")
    return lines


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return label, value before and value after of every row of the table, its heading first."""
    if isinstance(totals := summary.get("rollouts"), dict):
        return _rollout_rows(totals)
    if isinstance(losses := summary.get("heldout_loss"), dict):
        return _loss_rows(losses, summary.get("num_tasks"))
    rows = [row for row in summary.get("table") or [] if isinstance(row, dict)]
    trained = [number for number in summary.get("trained_chunks") or [] if isinstance(number, int)]
    tasks = summary.get("num_tasks")
    if not rows and tasks == 0:
        return [("nothing was held out to evaluate on; clusterkit eval scores the checkpoint", "", "")]
    lengths = any(row.get("chunks") for row in rows)
    found = [("held-out accuracy" + (f" ({tasks} tasks, greedy)" if tasks else " (greedy)"), "before", "after")]
    for row in rows:
        found.append((_label(row, trained), _percent(row.get("before")), _percent(row.get("after"))))
        if not lengths and not row.get("blank_memory"):  # few rows: there is room for the task's other metrics
            found += _metrics(row)
    if summary.get("chance") is not None:
        found.append(("a blind guess", _percent(summary["chance"]), _percent(summary["chance"])))
    return found


def _rollout_rows(totals: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the results of trajectories: means over tasks, and the best of each task's trajectories."""
    found = [(f"{totals.get('tasks', '?')} tasks, {totals.get('trajectories', '?')} trajectories", "mean", "best")]
    found.append(("reward", _plain(totals.get("mean_reward")), _plain(totals.get("best_reward"))))
    found += [(name, _percent(value), "-") for name, value in (totals.get("metrics") or {}).items()]
    found.append(("response tokens", _plain(totals.get("mean_response_tokens"), 1), "-"))
    found.append(("turns", _plain(totals.get("mean_turns"), 1), "-"))
    for name in ("failed", "truncated"):
        if totals.get(name):
            found.append((f"{name} trajectories: {totals[name]}", "-", "-"))
    return found


def _loss_rows(losses: dict[str, Any], count: Any) -> list[tuple[str, str, str]]:
    before, after = losses.get("before"), losses.get("after")
    return [
        (f"held-out examples ({count})", "before", "after"),
        ("loss per token", _plain(before), _plain(after)),
        ("perplexity", _perplexity(before), _perplexity(after)),
    ]


def _perplexity(loss: Any) -> str:
    return _plain(math.exp(min(loss, 700.0))) if _is_number(loss) else "-"


def _plain(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if _is_number(value) else "-"


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
