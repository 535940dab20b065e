"""Numbers as short text."""

from __future__ import annotations

import math

import pytest

from clusterkit.common.text_plot import count, duration, progress_bar, shares, size, sparkline


def test_a_sparkline_rises_with_its_numbers_and_keeps_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), width=20)) == 20
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([]) == ""
    assert sparkline([math.nan, 1.0, math.inf, 2.0]) == "▁█"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.25, "0.2 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (97200, "1 d 3 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_counts_and_sizes_have_units() -> None:
    assert [count(950), count(12_345), count(4_560_000)] == ["950", "12.3 k", "4.56 M"]
    assert [size(None), size(10), size(12_000_000)] == ["unknown size", "10 B", "12 MB"]


def test_shares_are_ordered_and_leave_out_what_rounds_to_nothing() -> None:
    assert shares({"train": 30.0, "rollout": 70.0, "publish": 0.1}) == "rollout 70%, train 30%"
    assert shares({}) == ""


def test_bar_of_bytes() -> None:
    assert progress_bar(0, 2e9) == "░░░░░░░░░░ 0.00 of 2.00 GB"
    assert progress_bar(1.5e9, 2e9) == "███████░░░ 1.50 of 2.00 GB"
    assert progress_bar(3e9, 2e9) == "██████████ 3.00 of 2.00 GB"
    assert progress_bar(1.5e9, 0) == "1.50 GB"
