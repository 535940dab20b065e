"""The plot of scores over the number of documents: its data from the closing table, and where it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter

from clusterkit.observe.report.page import content
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.final_evaluation import document_scores
from clusterkit.ui.interval_plot import Line, Point, interval_plot

TITLE = "Held-out accuracy by the number of documents"


def row(
    documents: int, before: float | None, after: float, *, blank: bool = False, chunks: int = 0, method: str = ""
) -> dict[str, Any]:
    """A row of the closing table; intervals are two points around the scores, and absent of a score of 0."""
    around = {
        f"interval_{name}": [value - 0.02, value + 0.02] if value else None
        for name, value in (("before", before), ("after", after))
    }
    facts = {"chunks": chunks, "documents": documents, "blank_memory": blank} | ({"method": method} if method else {})
    return {**facts, "before": before, "after": after, **around}


def reading(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"table": list(rows), "trained_documents": 12, "trained_chunks": [], "chance": None}


TABLE = reading(row(0, 0.24, 0.25), row(8, 0.35, 0.38), row(32, None, 0.0), row(0, 0.14, 0.13, blank=True))


def test_scores_are_by_the_number_of_documents_and_the_blank_memory_is_apart() -> None:
    scores = document_scores(TABLE)

    assert scores["before"] == {8: pytest.approx((0.35, 0.33, 0.37)), 12: pytest.approx((0.24, 0.22, 0.26))}
    assert list(scores["after"].items()) == [
        (8, pytest.approx((0.38, 0.36, 0.40))),
        (12, pytest.approx((0.25, 0.23, 0.27))),
        (32, (0.0, 0.0, 0.0)),
    ]
    assert scores["blank"] == {12: pytest.approx((0.13, 0.11, 0.15))}


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"table": None},
        {"table": [None, 3, {"documents": "8", "after": 0.5}, {"documents": 8, "after": "0.5"}]},
        reading(row(8, None, float("nan"))),
        reading(row(0, 0.5, 0.6, chunks=4)),
        {"table": [row(0, 0.5, 0.6)]},
    ],
    ids=["none", "null", "damaged", "no number", "chunks", "no documents"],
)
def test_what_has_no_number_of_documents_has_no_scores(summary: dict[str, Any]) -> None:
    assert document_scores(summary) == {"before": {}, "after": {}, "blank": {}}


def test_a_page_draws_them_below_the_table(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).summary(**TABLE)

    page = content([RunReader(writer.run).read()], writer.clock)

    assert page.index("as trained, 12 documents, memory blanked") < page.index(f"<h3>{TITLE}</h3>")
    for told in (
        "before training, documents 8: 35.0 (33.0 … 37.0)",
        "after training, documents 12: 25.0 (23.0 … 27.0)",
        "memory blanked, after training, documents 12: 13.0 (11.0 … 15.0)",
    ):
        assert told in page
    assert page.count("<circle") == 5  # and the blank memory is a level


def test_other_ways_to_read_are_thin_lines_with_their_names(tmp_path: Path) -> None:
    read = [row(n, 0.3, after, method="rag") for n, after in ((0, 0.22), (8, 0.31), (32, 0.2))]
    read += [row(0, 0.3, 0.12, method="long_context"), row(0, 0.3, 0.45, method="gold")]
    summary = {**TABLE, "table": [*TABLE["table"], *read]}
    scores = document_scores(summary)
    assert list(scores["rag"]) == [8, 12, 32]
    assert {name: scores[name] for name in ("before", "after", "blank")} == document_scores(TABLE)

    page = content([RunReader(RunWriter(tmp_path).summary(**summary).run).read()], 0.0)

    for told in (
        "BM25&#x27;s top 2, after training, documents 32: 20.0 (18.0 … 22.0)",
        "all at once, cut to the window, after training, documents 12: 12.0 (10.0 … 14.0)",
        "gold documents alone, after training, documents 12: 45.0 (43.0 … 47.0)",
    ):
        assert told in page
    assert "12 documents, BM25&#x27;s top 2" in page
    assert page.count("stroke-width: 1; stroke-dasharray") == 1, "a line where there are several points"
    assert page.count('r="2"') == 5


@pytest.mark.parametrize("rows", [[row(0, 0.2, 0.3), row(0, 0.1, 0.1, blank=True)], [row(0, 0.2, 0.3, chunks=4)]])
def test_one_number_of_documents_is_no_line(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    writer = RunWriter(tmp_path).summary(**reading(*rows))

    page = content([RunReader(writer.run).read()], writer.clock)

    assert "Before and after" in page
    assert TITLE not in page


def test_twice_as_many_are_as_far_whatever_their_number_and_crowded_numbers_are_left_out() -> None:
    points = [Point(at, 0.5, 0.4, 0.6) for at in (8, 16, 32, 62, 64)]

    drawn = interval_plot("t", "documents", [Line("a", 0, points)], logarithmic=True)

    at = [float(part.split('"')[0]) for part in drawn.split('cx="')[1:]]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2) == pytest.approx(at[4] - at[2], abs=0.2)
    assert ">64</text>" in drawn
    assert ">62</text>" not in drawn
