"""Tables as text: AReaL's, cell by cell, and ours beside it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.metrics import row_interval

COLUMNS = (
    "dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1", "pass@8", "pass@16",
)  # fmt: skip
"""AReaL v0.2's columns (tutorial, "Evaluation Results")."""
COUNTS = ("no_answer", "cut_off", "grading_gave_up", "missing")
PIPED = (
    *COLUMNS, "maj@n", "greedy_acc_low", "greedy_acc_high", "sample_pass@1_low", "sample_pass@1_high", *COUNTS,
    "memory_tokens", "checkpoint",
)  # fmt: skip
"""Columns for a pipe: always these, so that `cut` finds them."""
ABSENT = "-"


def areal_cells(row: dict[str, Any]) -> list[str]:
    """Cells of a row of the results: counts as they are, accuracies times 100, one decimal; - for what is absent."""
    shown = []
    for name in COLUMNS[2:]:
        value, scale = row.get(name), 1 if name.endswith("length") else 100
        shown.append(ABSENT if value is None else f"{scale * value:.1f}")
    return [str(row["dataset"]), str(row["num_questions"]), *shown]


def areal_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table that AReaL v0.2 prints, in its shape."""
    return boxed(COLUMNS, [areal_cells(row) for row in rows])


def piped_rows(results: dict[str, Any]) -> list[str]:
    """A line for each row of the results: the cells of `PIPED` between tabs, accuracies times 100."""
    lines = []
    for row in results["rows"]:
        bounds = [
            bound for name in ("greedy_acc", "sample_pass@1") for bound in row_interval(row, name) or (None, None)
        ]
        hundredths = [ABSENT if value is None else f"{100 * value:.1f}" for value in (row.get("maj"), *bounds)]
        counts = [str(row[name]) for name in COUNTS]
        memory = ABSENT if row.get("memory_tokens") is None else f"{row['memory_tokens']:.0f}"
        checkpoint = Path(results["model_path"]).name
        lines.append("\t".join([*areal_cells(row), *hundredths, *counts, memory, checkpoint]))
    return lines


def detail_table(rows: Sequence[dict[str, Any]]) -> str:
    """What AReaL's table lacks: intervals, majority, and counts of problems."""
    header = ("dataset", "greedy_acc 95 %", "sample_pass@1 95 %", "maj@n", "no answer", "cut off", "gave up", "missing")
    body = []
    for row in rows:
        majority = ABSENT if row.get("maj") is None else f"{100 * row['maj']:.1f} (n={row['samples']})"
        spans = [_span(row_interval(row, name)) for name in ("greedy_acc", "sample_pass@1")]
        counts = [str(row[name]) for name in COUNTS]
        body.append([str(row["dataset"]), *spans, majority, *counts])
    return boxed(header, body)


def qa_table(rows: Sequence[dict[str, Any]]) -> str:
    """Question answering by all metrics, of the greedy answers where there are some; empty without such a row."""
    kept = [row for row in rows if row.get("metrics")]
    if not kept:
        return ""
    names = list(kept[0]["metrics"])
    return boxed(
        ["dataset", *names], [[row["dataset"], *(f"{100 * row['metrics'][n]:.1f}" for n in names)] for row in kept]
    )


def f1_table(rows: Sequence[dict[str, Any]]) -> str:
    """F1 with its interval (`evaluation.intervals`), yes/no questions apart; empty without a row that has it."""
    body = [
        [row["dataset"], one["form"], str(one["questions"]), f"{100 * one['em']:.1f}", f"{100 * one['f1']:.1f}",
         _span(one["interval"])]
        for row in rows for one in row.get("f1") or ()
    ]  # fmt: skip
    return boxed(("dataset", "form", "questions", "em", "f1", "f1 95 %"), body) if body else ""


def difference_table(differences: Sequence[dict[str, Any]]) -> str:
    """F1 of a suite's first way of reading less that of the others, question by question; empty without any."""
    body = [
        [d["dataset"], d["less"], str(d["questions"]), f"{100 * d['difference']:+.1f}", _span(d["interval"])]
        for d in differences
    ]  # fmt: skip
    return boxed(("dataset", "less", "questions", "f1 difference", "95 %"), body) if body else ""


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """Score and length of the memory by data source, and their means over the sources; empty without such a row.

    Methods that read the same sources without a memory have lines and a mean of their own.
    """
    sources = {row["suite"] for row in rows if row.get("memory_tokens") is not None}
    kept = [row for row in rows if row["suite"] in sources]
    body = [[row["dataset"], *_memory_cells([row])] for row in kept]
    for method in dict.fromkeys(row["method"] for row in kept):
        name = "average" if method == "memagent" else f"average {method}"
        body.append([name, *_memory_cells([row for row in kept if row["method"] == method])])
    return boxed(("source", "perf", "mem, tokens"), body) if body else ""


def _memory_cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Means over rows: score times 100, length of the memory where there is one."""
    scores = [row["greedy_acc"] if row["greedy_acc"] is not None else row["sample_pass@1"] for row in rows]
    lengths = [row["memory_tokens"] for row in rows if row.get("memory_tokens") is not None]
    mean = f"{sum(lengths) / len(lengths):.0f}" if lengths else ABSENT
    return [f"{100 * sum(scores) / len(scores):.1f}", mean]


def too_long_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is told of rows with questions that are too long to be asked (`evaluation.results.too_long_note`)."""
    return [row["notes"][-1] for row in rows if row.get("too_long")]


def comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Against earlier results: accuracies, questions that changed, p-values, `comparison_notes`; empty without any."""
    header = ("dataset", "against", "measure", "then", "now", "difference", "95 %", "gained", "lost", "p")
    body = [
        [
            c["dataset"], c["against"], c["measure"], f"{100 * c['before']:.1f}", f"{100 * c['after']:.1f}",
            f"{100 * c['difference']:+.1f}", _span(c["interval"]), str(c["gained"]), str(c["lost"]),
            f"{c['p_value']:.3g}",
        ]
        for c in comparisons
    ]  # fmt: skip
    return "\n\n".join([boxed(header, body), *comparison_notes(comparisons)]) if body else ""


def comparison_notes(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """How many of the compared questions were too long to be asked, on both sides, wherever some were."""
    notes = {
        f"{c['dataset']}: of {c['questions']} compared questions {then} were too long for {c['against']} and {now} are "
        "now: they count as wrong"
        for c in comparisons
        for then, now in [c.get("too_long", (0, 0))]
        if then or now
    }
    return sorted(notes)


def boxed(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of centred cells between + and |, as prettytable draws it."""
    widths = [max(len(str(line[i])) for line in (header, *body)) for i in range(len(header))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [_line(line, widths) for line in body]
    return "\n".join([rule, _line(header, widths), rule, *lines, rule])


def split_wide(text: str, width: int) -> str:
    """Tables of `boxed`, those wider than a terminal as several below one another, each with the first column."""
    return "\n\n".join(_split(block, width) if block.startswith("+-") else block for block in text.split("\n\n"))


def _split(table: str, width: int) -> str:
    lines = table.strip("\n").split("\n")
    if len(lines[0]) <= width:
        return table
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    parts: list[list[int]] = []
    part = [0]
    for column in range(1, len(rows[0])):
        if len(part) > 1 and sum(max(len(row[i]) for row in rows) + 3 for i in (*part, column)) + 1 > width:
            parts, part = [*parts, part], [0]
        part = [*part, column]
    kept = [[[row[i] for i in part] for row in rows] for part in (*parts, part)]
    return "\n".join(boxed(head, body) for head, *body in kept)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # str.center puts an odd space where prettytable does: behind a text of odd length, before one of even length.
    return "|" + "|".join(f" {str(cell).center(width)} " for cell, width in zip(cells, widths, strict=True)) + "|"


def _span(interval: Sequence[float] | None) -> str:
    return f"{100 * interval[0]:.1f} … {100 * interval[1]:.1f}" if interval else ABSENT


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """All single numbers of the rows as CSV, accuracies from 0 to 1."""
    flat = [{**{k: v for k, v in row.items() if not isinstance(v, list | dict)}, **_flat_metrics(row)} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat_metrics(row: dict[str, Any]) -> dict[str, Any]:
    flat = dict(row.get("metrics") or {})
    for name in ("greedy_acc", "sample_pass@1"):
        if interval := row_interval(row, name):
            flat[f"{name}_low"], flat[f"{name}_high"] = interval
    return flat
