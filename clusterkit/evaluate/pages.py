"""Results as web pages: the tables, the curve over checkpoints, and every question that was answered wrongly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from clusterkit.evaluate.answers import Answer, Entry, RowAnswers, read_row
from clusterkit.evaluate.curve import curves
from clusterkit.ui.markup import Html, join, table, tag
from clusterkit.ui.page_file import write_page
from evaluation.table import COLUMNS, areal_cells, comparison_notes, too_long_notes

PAGE = "index.html"
MOST_QUESTIONS, MOST_ANSWERS, MOST_CHARACTERS = 300, 3, 4000
"""What a row shows: so many questions, so many wrong answers of each, so much of a text. The record has all."""


def write_pages(folder: Path) -> Path:
    """Write the page of one evaluation, and that of the output folder around it; the first one's path."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    page = write_page(evaluation_page(results, folder), folder / PAGE)
    write_page(overview_page(folder.parent), folder.parent / PAGE)
    return page


def evaluation_page(results: dict[str, Any], folder: Path) -> str:
    """One evaluation: tables, what defines it, and the questions with a wrong answer."""
    rows = results["rows"]
    parts: list[object] = [
        _heading(f"{Path(results['model_path']).name}", f"{results['status']}; {results['model_path']}"),
        table(COLUMNS, [areal_cells(row) for row in rows]),
        *(tag("p", note) for note in too_long_notes(rows)),
        _comparisons(results["comparisons"]),
    ]
    for row in rows:
        parts.append(_wrong(read_row(results, folder, row["dataset"])))
    parts.append(tag("h2", "What defines these scores"))
    settings = [[key, json.dumps(value, ensure_ascii=False)] for key, value in results["config"].items()]
    versions = [[key, value] for key, value in results["versions"].items()]
    base = [["base_model", results["base_model"]]] if results.get("base_model") else []
    facts = [["checkpoint_sha256", results["checkpoint_sha256"]], *base, ["engine", results["engine"]]]
    facts += [*versions, *settings]
    parts.append(tag("details", tag("summary", "Settings and versions"), table(["setting", "value"], facts)))
    return _document(f"Evaluation of {Path(results['model_path']).name}", parts)


def overview_page(output: Path) -> str:
    """All evaluations in an output folder: the curve over checkpoints and a line for each."""
    found = []
    for path in sorted(output.glob("*/results.json"), key=lambda p: p.stat().st_mtime):
        try:
            found.append((path.parent, json.loads(path.read_text(encoding="utf-8"))))
        except ValueError:
            continue
    body = [
        [_link(folder, results), *areal_cells(row)] for folder, results in reversed(found) for row in results["rows"]
    ]
    return _document(
        "Evaluations",
        [
            _heading("Evaluations", str(output)),
            curves([results for _, results in found]),
            tag("h2", "All of them, the latest first"),
            table(["checkpoint", *COLUMNS], body),
        ],
    )


def _link(folder: Path, results: dict[str, Any]) -> Html:
    return tag("a", Path(results["model_path"]).name, href=f"{folder.name}/{PAGE}")


def _comparisons(comparisons: Sequence[dict[str, Any]]) -> Html | None:
    if not comparisons:
        return None
    header = ["dataset", "against", "measure", "questions", "then", "now", "p", "newly right", "newly wrong"]
    body = [
        [
            c["dataset"],
            c["against"],
            c["measure"],
            c["questions"],
            f"{100 * c['before']:.1f}",
            f"{100 * c['after']:.1f}",
            f"{c['p_value']:.3g} ({c['test']})",
            ", ".join(c["flips"]["gained"]) or "-",
            ", ".join(c["flips"]["lost"]) or "-",
        ]
        for c in comparisons
    ]
    notes = [tag("p", note) for note in comparison_notes(comparisons)]
    return join(tag("h2", "Against earlier results"), table(header, body), *notes)


def _wrong(row: RowAnswers) -> Html:
    wrong = [(entry, [a for a in entry.answers if a.verdict != "right"]) for entry in row.entries]
    wrong = [(entry, answers) for entry, answers in wrong if answers]
    shown = wrong[:MOST_QUESTIONS]
    more = (
        tag("p", f"{len(wrong) - len(shown)} more are in the record.", cls="quiet") if len(wrong) > len(shown) else None
    )
    title = f"{row.dataset}: {len(wrong)} of {len(row.entries)} questions with a wrong answer"
    first = tag("details", tag("summary", "The first prompt, as it was sent"), tag("pre", _clipped(row.first_prompt)))
    return join(tag("h2", title), first, *(_question(*one) for one in shown), more)


def _question(entry: Entry, wrong: Sequence[Answer]) -> Html:
    right = len(entry.answers) - len(wrong)
    summary = join(
        tag("b", f"{entry.number}. "),
        f"{right}/{len(entry.answers)} right; truth {', '.join(entry.truths)}; ",
        f"first wrong: {wrong[0].answer or wrong[0].reason} ",
        tag("small", " ".join(entry.question.split())[:120], cls="quiet"),
    )
    return tag(
        "details", tag("summary", summary), tag("pre", _clipped(entry.question)), *map(_shown, wrong[:MOST_ANSWERS])
    )


def _shown(answer: Answer) -> Html:
    head = f"{answer.sample}: {answer.verdict}, {answer.reason}; extracted: {answer.answer or '(nothing)'}"
    return join(tag("p", tag("b", head), f" {answer.length} tokens {answer.finish}"), tag("pre", _clipped(answer.text)))


def _clipped(text: str) -> str:
    return (
        text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS // 2]}\n…\n{text[-MOST_CHARACTERS // 2 :]}"
    )


def _heading(title: str, below: str) -> Html:
    return tag("header", tag("h1", title), tag("p", below, cls="quiet"))


def _document(title: str, parts: Sequence[object]) -> str:
    """A page that loads nothing and runs nothing: what a model wrote can do no harm."""
    style = resources.files("clusterkit.observe.report").joinpath("page.css").read_text(encoding="utf-8")
    style += "\nh1, p, summary, td, pre { overflow-wrap: anywhere; }"
    style += "\npre { white-space: pre-wrap; background: var(--soft); padding: 8px 12px; margin: 1em 0; }\n"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *parts)), lang='en')}\n"
