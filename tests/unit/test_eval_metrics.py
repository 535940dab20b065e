"""pass@k, majority, intervals, paired tests against closed forms; AReaL's table from recorded answers, cell by cell."""

from __future__ import annotations

import json
import random
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest

from clusterkit.evaluate.curve import points_of
from evaluation import metrics, table
from evaluation.intervals import compare
from evaluation.record import Lines, RowRecord, text_sha
from evaluation.results import row_results
from trainer.errors import RunError


@pytest.mark.parametrize(("samples", "right"), [(4, 0), (4, 1), (4, 4), (6, 2), (7, 5), (32, 3)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int, right: int, k: int) -> None:
    outcomes = [True] * right + [False] * (samples - right)
    subsets = [any(chosen) for chosen in combinations(outcomes, k)]
    assert metrics.pass_at_k(samples, right, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_in_closed_form() -> None:
    assert metrics.pass_at_k(32, 8, 1) == pytest.approx(8 / 32)
    assert metrics.pass_at_k(16, 1, 16) == 1.0
    assert metrics.pass_at_k(32, 16, 16) == pytest.approx(1 - 1 / comb(32, 16))
    # AReaL's product form.
    n, c, k = 32, 5, 8
    product = 1.0
    for i in range(n - c + 1, n + 1):
        product *= 1 - k / i
    assert metrics.pass_at_k(n, c, k) == pytest.approx(1 - product)
    with pytest.raises(ValueError, match="at least 8 samples, not 4"):
        metrics.pass_at_k(4, 1, 8)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over draws of n samples is the true probability 1 - (1 - p)^k."""
    rng = random.Random(3)
    p, n, k = 0.3, 10, 4
    estimates = [metrics.pass_at_k(n, sum(rng.random() < p for _ in range(n)), k) for _ in range(20_000)]
    assert metrics.mean(estimates) == pytest.approx(1 - (1 - p) ** k, abs=0.008)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9"], [True, False, False], 1 / 3),
        (["1/2", "0.5", "3", "3", "4"], [True, True, False, False, False], 0.5),
        (["1/2", "0.5", ".5", "3", "3"], [True, True, True, False, False], 1.0),
        (["", "", "", "7"], [False, False, False, True], 1.0),
        (["3 ", "3", "7"], [False, False, True], 0.0),
        (["", ""], [False, False], 0.0),
        ([], [], 0.0),
    ],
)
def test_majority(answers: list[str], right: list[bool], expected: float) -> None:
    assert metrics.majority(answers, right) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("right", "wrong", "low", "high"),  # the last: Newcombe 1998, table I
    [
        (128, 0, 0.9709, 1.0),
        (0, 128, 0.0, 0.0291),
        (1, 0, 0.2065, 1.0),
        (8, 2, 0.4902, 0.9433),
        (81, 182, 0.2553, 0.3662),
    ],
)
def test_right_and_wrong_have_wilsons_interval(right: int, wrong: int, low: float, high: float) -> None:
    assert metrics.score_interval([1.0] * right + [0.0] * wrong) == (
        pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5),
    )  # fmt: skip


def test_nothing_that_was_measured_says_nothing() -> None:
    assert metrics.score_interval([]) == (0.0, 1.0)


def test_samples_of_a_question_are_no_questions_of_their_own() -> None:
    """Where a question's samples agree, 32 of them tell what one does; where they are drawn alike, nearly as 32 do."""
    agree = [1.0] * 20 + [0.0] * 20
    assert metrics.score_interval(agree) == metrics.score_interval([sum([a] * 32) / 32 for a in agree])
    alike = metrics.score_interval([0.5] * 20 + [15 / 32] * 20)
    assert alike[1] - alike[0] < (metrics.score_interval(agree)[1] - metrics.score_interval(agree)[0]) / 2
    # One wrong answer of 4,096 to 128 questions: they may still hide a hard question in a hundred.
    low, high = metrics.score_interval([1.0] * 127 + [31 / 32])
    assert low < 0.975
    assert 0.999 < high <= 1.0


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(2)

    def questions(mean: float) -> float:
        return sum(rng.random() < mean for _ in range(8)) / 8

    kinds = {
        "easy and hard": (lambda: questions(rng.betavariate(0.3, 0.3)), 0.5),
        "all alike": (lambda: questions(0.97), 0.97),
        "few that nothing solves": (lambda: 0.0 if rng.random() < 0.02 else questions(0.999), 0.98 * 0.999),
        "right or wrong": (lambda: float(rng.random() < 0.9), 0.9),
    }
    for name, (draw, truth) in kinds.items():
        found = [metrics.score_interval([draw() for _ in range(30)]) for _ in range(400)]
        assert sum(low <= truth <= high for low, high in found) >= 0.93 * len(found), name


def test_a_table_never_says_that_it_is_certain() -> None:
    scores = {f"q{n}": {"greedy": 1.0, "sampled": None, "right": 0} for n in range(128)}
    row = {
        "dataset": "d", "samples": 0, "greedy_acc": 1.0, "greedy_acc_interval": [1.0, 1.0], "questions": scores,
        "no_answer": 0, "cut_off": 0, "grading_gave_up": 0, "missing": 0,
    }  # fmt: skip
    assert "97.1 … 100.0" in table.detail_table([row])  # also of results that an earlier version wrote
    assert "0.9708" in table.as_csv([row])
    assert (
        points_of([{"model_path": "ckpt/epoch1epochstep1globalstep7", "rows": [row]}])["d", "greedy_acc"][0].low < 0.98
    )


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (1, 1, 1.0), (9, 1, 22 / 1024)])
def test_mcnemar_in_closed_form(gained: int, lost: int, p: float) -> None:
    assert metrics.mcnemar(gained, lost) == pytest.approx(p)
    before = [0] * gained + [1] * lost + [1, 0]
    after = [1] * gained + [0] * lost + [1, 0]
    found = metrics.paired_test(before, after)
    assert (found.gained, found.lost, found.p_value, found.test) == (gained, lost, pytest.approx(p), "McNemar, exact")
    assert found.difference == pytest.approx((gained - lost) / (gained + lost + 2))


def test_the_permutation_of_signs_in_closed_form() -> None:
    # Three questions, all up: of the eight sign patterns two are as extreme.
    assert metrics.paired_test([0.1, 0.2, 0.3], [0.2, 0.4, 0.5]).p_value == pytest.approx(2 / 8)
    assert metrics.paired_test([0.5, 0.5], [0.5, 0.5]).p_value == 1.0
    # 0.25 up and 0.25 down: every pattern is as extreme as a sum of zero.
    assert metrics.paired_test([0.25, 0.5], [0.5, 0.25]).p_value == 1.0


def test_many_changed_questions_are_tested_by_chance_and_the_same_each_time() -> None:
    rng = random.Random(1)
    before = [rng.random() for _ in range(200)]
    after = [min(score + 0.05, 1.0) for score in before]
    shuffled = before[100:] + before[:100]
    assert metrics.paired_test(before, after).p_value < 0.001
    assert metrics.paired_test(before, shuffled).p_value == metrics.paired_test(before, shuffled).p_value > 0.05


def write_record(root: Path, name: str, questions: dict[str, list[bool | None]], lengths: dict[str, int]) -> RowRecord:
    """A record with a greedy answer (the first) and samples; None is a failed one."""
    record = RowRecord(root, name, {"suite": name}, {"grading": "math"})
    record.begin({}, [{"id": q, "question": q, "answers": ["1"]} for q in questions])
    for question, outcomes in questions.items():
        for number, right in enumerate(outcomes):
            sample = "greedy" if number == 0 else str(number - 1)
            if right is None:
                record.samples.append({"id": question, "sample": sample, "error": "the server died"})
                continue
            answer = "1" if right else f"wrong {number % 2}"
            length = lengths[question] + number
            line = {"id": question, "sample": sample, "text": answer, "length": length, "finish": "stop"}
            record.samples.append(line | {"counters": {}})
            verdict = {"id": question, "sample": sample, "text_sha": text_sha(answer), "right": right}
            record.verdicts.append(verdict | {"score": float(right), "answer": answer, "reason": "", "how": "boxed"})
    record.close()
    return RowRecord(root, name, {"suite": name}, {"grading": "math"})


def recorded_rows(root: Path) -> list[dict[str, Any]]:
    """Two suites with 16 samples a question; what the table must say is worked out by hand in the test below."""
    yes, no = True, False
    first = {
        "a": [yes, *[yes] * 16],
        "b": [no, *[yes] * 4, *[no] * 12],
        "c": [yes, *[no] * 16],
        "d": [no, yes, *[no] * 15],
    }
    second = {"x": [no, *[yes] * 8, *[no] * 8], "y": [no, *[no] * 16]}
    rows = []
    for name, questions in (("math_500", first), ("aime24", second)):
        record = write_record(root, name, questions, {"a": 100, "b": 200, "c": 300, "d": 401, "x": 1000, "y": 2000})
        rows.append(row_results(record, name, list(questions), True, 16))
    return rows


def test_a_table_that_is_wider_than_the_terminal_goes_on_below() -> None:
    whole = table.boxed(("dataset", "questions", "accuracy"), [("aime24", "30", "51.3")])

    assert table.split_wide(f"{whole}\n\nend\n", len(whole.splitlines()[0])) == f"{whole}\n\nend\n"
    told = table.split_wide(f"{whole}\n\nend\n", 25).splitlines()
    assert [line for line in told if not line.startswith("+")] == [
        "| dataset | questions |", "|  aime24 |     30    |", "| dataset | accuracy |", "|  aime24 |   51.3   |",
        "", "end",
    ]  # fmt: skip


def test_areals_table_of_recorded_answers_cell_by_cell(tmp_path: Path) -> None:
    rows = recorded_rows(tmp_path)
    # math_500: greedy 2 of 4; pass@1 (16 + 4 + 0 + 1)/64 = 32.8; pass@8: (1 + [1 - C(12,8)/C(16,8)] + 0 + 8/16)/4 with
    # C(12,8) = 495 and C(16,8) = 12870, so 61.5; pass@16: a, b and d have a right one, 75.
    # Lengths: greedy (100 + 200 + 300 + 401)/4 = 250.25; samples are 1 … 16 longer, 8.5 on average.
    # aime24: greedy 0 of 2; pass@1 8/32 = 25; pass@8 (1 - 1/12870)/2 = 50.0; pass@16 50.
    assert [table.areal_cells(row) for row in rows] == [
        ["math_500", "4", "250.2", "258.8", "50.0", "32.8", "61.5", "75.0"],
        ["aime24", "2", "1500.0", "1508.5", "0.0", "25.0", "50.0", "50.0"],
    ]
    assert table.areal_table(rows).splitlines()[:4] == [
        "+----------+---------------+---------------+---------------+------------+---------------+--------+---------+",
        "| dataset  | num_questions | greedy_length | sample_length | greedy_acc | sample_pass@1 | pass@8 | pass@16 |",
        "+----------+---------------+---------------+---------------+------------+---------------+--------+---------+",
        "| math_500 |       4       |     250.2     |     258.8     |    50.0    |      32.8     |  61.5  |   75.0  |",
    ]
    # Two ways of being wrong share the votes: b has 4 right against 6 and 6, x 8 right against 4 and 4.
    assert rows[0]["maj"] == pytest.approx(1 / 4)
    assert rows[1]["maj"] == pytest.approx(1 / 2)


def test_the_tutorials_table_is_drawn_to_the_letter() -> None:
    names = table.COLUMNS
    values = [
        ("math_500", 500, 6757.4, 4139.5, 0.844, 0.927, 0.973, 0.977),
        ("aime24", 30, 19328.0, 13663.5, 0.5, 0.504, 0.773, 0.8),
        ("amc23", 40, 8850.0, 6526.2, 0.8, 0.905, 0.968, 0.988),
    ]
    assert table.areal_table([dict(zip(names, row, strict=True)) for row in values]) == (
        "+----------+---------------+---------------+---------------+------------+---------------+--------+---------+\n"
        "| dataset  | num_questions | greedy_length | sample_length | greedy_acc | sample_pass@1 | pass@8 | pass@16 |\n"
        "+----------+---------------+---------------+---------------+------------+---------------+--------+---------+\n"
        "| math_500 |      500      |     6757.4    |     4139.5    |    84.4    |      92.7     |  97.3  |   97.7  |\n"
        "|  aime24  |       30      |    19328.0    |    13663.5    |    50.0    |      50.4     |  77.3  |   80.0  |\n"
        "|  amc23   |       40      |     8850.0    |     6526.2    |    80.0    |      90.5     |  96.8  |   98.8  |\n"
        "+----------+---------------+---------------+---------------+------------+---------------+--------+---------+"
    )


def test_what_is_missing_or_failed_counts_as_wrong_and_is_counted(tmp_path: Path) -> None:
    record = write_record(tmp_path, "s", {"a": [True, True, None], "b": [None, True]}, {"a": 1, "b": 1})
    row = row_results(record, "s", ["a", "b"], True, 2)
    assert (row["greedy_acc"], row["sample_pass@1"]) == (0.5, 0.5)
    assert (row["answers"], row["missing"], row["failed"]) == (6, 3, 2)


def test_results_are_compared_question_by_question(tmp_path: Path) -> None:
    before = write_record(
        tmp_path / "then",
        "s",
        {"a": [True], "b": [False], "c": [False], "only": [True]},
        {**dict.fromkeys("abc", 1), "only": 1},
    )
    after = write_record(tmp_path / "now", "s", {"a": [True], "b": [True], "c": [True]}, dict.fromkeys("abc", 1))
    then = {"rows": [row_results(before, "s", ["a", "b", "c", "only"], True, 0)]}
    now = {"rows": [row_results(after, "s", ["a", "b", "c"], True, 0)]}
    (found,) = compare(now, then, "earlier")
    assert found["questions"] == 3
    assert (found["before"], found["after"]) == (pytest.approx(1 / 3), 1.0)
    assert found["flips"] == {"gained": ["b", "c"], "lost": []}
    assert found["p_value"] == pytest.approx(0.5)
    json.dumps(found)
    assert "earlier" in table.comparison_table([found])


def test_a_full_disk_is_told_once_and_what_was_written_stays(disk: Path) -> None:
    """Not again in other words when the record is closed, which would hide the way out."""
    lines = Lines.read(disk / "samples.jsonl")

    def fill() -> None:
        for number in range(1 << 10):
            lines.append({"id": str(number), "sample": "greedy", "text": "x" * 3000})

    with pytest.raises(RunError, match="no space left on its disk"):
        fill()
    lines.close()
    assert len(Lines.read(lines.path).entries) == len(lines.entries) > 100
