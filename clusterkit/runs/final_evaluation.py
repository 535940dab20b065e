"""The final evaluation of a run: held-out scores before and after, the time, and the checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

from clusterkit.common.text_plot import duration, shares
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import score_name
from trainer.config_parts import METHOD_LABELS


def read_summary(run: RunDirectory) -> dict[str, Any] | None:
    """Return summary.json, or None if it is missing or damaged."""
    try:
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Return the final evaluation as text."""
    rows = summary_rows(summary)
    width = max(len(label) for label, *_ in rows)
    cells = max(7, *(len(value) for _, *values in rows for value in values))
    lines = [f"{label:<{width}}  {before:>{cells}}  {after:>{cells}}" for label, before, after in rows]
    lines.append("")
    if told := supervised_text(summary):
        lines.append(f"start       {told}")
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


def supervised_text(summary: dict[str, Any]) -> str:
    """Return what a supervised start has done, in one line; empty if the run had none."""
    facts = summary.get("supervised")
    if not isinstance(facts, dict):
        return ""
    losses = facts.get("heldout_loss")
    before, after = (losses.get("before"), losses.get("after")) if isinstance(losses, dict) else (None, None)
    return f"{facts.get('global_step', '?')} supervised steps, held-out loss {_plain(before)} → {_plain(after)}"


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return label, value before and value after of every row of the table, its heading first."""
    if isinstance(totals := summary.get("rollouts"), dict):
        return _rollout_rows(totals)
    if isinstance(losses := summary.get("heldout_loss"), dict):
        return _loss_rows(losses, summary.get("num_tasks"))
    rows = [row for row in summary.get("table") or [] if isinstance(row, dict)]
    trained = [number for number in summary.get("trained_chunks") or [] if isinstance(number, int)]
    documents = summary.get("trained_documents") or 0
    tasks = summary.get("num_tasks")
    if not rows and tasks == 0:
        return [("nothing was held out to evaluate on; clusterkit eval scores the checkpoint", "", "")]
    lengths = any(row.get("chunks") for row in rows)
    intervals = any(row.get("documents") for row in rows)
    counted = f"{tasks} tasks, greedy" if tasks else "greedy"
    found = [(f"held-out {score_name(summary)} ({counted})", "before", "after")]
    for row in rows:
        values = [_percent(row.get(name)) + (_interval(row, name) if intervals else "") for name in ("before", "after")]
        found.append((_label(row, trained, documents), values[0], values[1]))
        # Where rows are few there is room for the task's other metrics.
        if not lengths and not any(map(row.get, ("documents", "blank_memory", "method"))):
            found += _metrics(row)
    if summary.get("chance") is not None:
        found.append(("a blind guess", _percent(summary["chance"]), _percent(summary["chance"])))
    return found


Score = tuple[float, float, float]
"""A value and the bounds of its 95 % interval, 0 to 1; both bounds are the value where they are not known."""


def document_scores(summary: dict[str, Any]) -> dict[str, dict[int, Score]]:
    """Return held-out scores by the number of documents, in its order.

    Returns:
        Scores `before` and `after` training, and after it alone `blank`, with the memory blanked, and those of every
        other way to read that was asked, by its name. What was not measured is left out.
    """
    found: dict[str, dict[int, Score]] = {"before": {}, "after": {}, "blank": {}}
    for row in summary.get("table") or []:
        documents = (row.get("documents") or summary.get("trained_documents")) if isinstance(row, dict) else None
        if not isinstance(documents, int) or documents < 1 or row.get("chunks"):
            continue
        other = "blank" if row.get("blank_memory") else _method(row)
        for name in ("after",) if other else ("before", "after"):
            if _is_number(value := row.get(name)) and math.isfinite(value):
                low, high = _bounds(row, name) or (value, value)
                found.setdefault(other or name, {})[documents] = (value, low, high)
    return {name: dict(sorted(scores.items())) for name, scores in found.items()}


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


def _interval(row: dict[str, Any], name: str) -> str:
    """Return the 95 % interval of a value, as " (21.0 … 27.5)"; empty if it is not known."""
    bounds = _bounds(row, name)
    return f" ({100 * bounds[0]:.1f} … {100 * bounds[1]:.1f})" if bounds else ""


def _bounds(row: dict[str, Any], name: str) -> tuple[float, float] | None:
    bounds = row.get(f"interval_{name}")
    if not isinstance(bounds, list) or not all(_is_number(one) and math.isfinite(one) for one in bounds):
        return None
    return (bounds[0], bounds[1]) if len(bounds) == 2 else None


def _label(row: dict[str, Any], trained: list[int], documents: int) -> str:
    chunks, others, method = row.get("chunks") or 0, row.get("documents") or 0, _method(row)
    if others or (method and documents):
        others = others or documents
        label = f"{others} documents"
    elif not chunks and documents:
        label = f"as trained, {documents} documents"
    elif not chunks:
        label = f"as trained, {trained[0]} to {trained[-1]} chunks" if trained else "as trained"
    else:
        label = f"{chunks} chunks"
        if trained and chunks > max(trained):
            label += f" ({chunks / max(trained):.3g} x the longest trained)"
    label += f", {method_label(method)}" if method else ""
    return f"{label}, memory blanked" if row.get("blank_memory") else label


def _method(row: dict[str, Any]) -> str:
    """Return the way to read that a row is about; empty if that is the memory, and in older runs."""
    return str(row.get("method") or "")


def method_label(method: str) -> str:
    """Return what people are told a way to read is."""
    return METHOD_LABELS.get(method, method)


def _metrics(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    before, after = row.get("metrics_before") or {}, row.get("metrics_after") or {}
    return [
        (f"  {_metric(name)}", _percent(before.get(name)), _percent(after.get(name)))
        for name in dict.fromkeys([*before, *after])
    ]


def _metric(name: str) -> str:
    """Return a metric as the table calls it: a reward's F1 takes the whole answer where none is marked, f1 nothing."""
    return f"{name} of marked answers" if name.rpartition("/")[2] == "f1" else name


def _percent(value: Any) -> str:
    if not _is_number(value):
        return "-"
    return f"{value:.2%}" if 0 < value < 0.01 else f"{value:.1%}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
