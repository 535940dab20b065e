"""The lenient metrics, and how an answer is taken out of a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.qa import em, extract_answer, f1, normalize, qa_metrics, sub_em, sub_em_1way

ALL_METRICS = [em, f1, sub_em, sub_em_1way]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"It was \boxed{Paris}.", "Paris"),
        (r"\boxed{Paris} and later \boxed{ Rome }", "Rome"),
        (r"The answer is Rome, so \boxed{Paris}", "Paris"),
        ("I think **the answer is: Paris.**", "Paris"),
        ("the answer is Rome. No: The Answer Is Paris", "Paris"),
        (r"<think>\boxed{Rome}</think> the answer is Paris", "Paris"),
        (r"<think>the answer is Rome</think> I do not know", ""),
        (r"I write \boxed for it: \boxed{Paris}", "Paris"),
        (r"$\boxed Paris$", "Paris"),
        (r"\boxed{cut off", ""),
        ("Paris", ""),
        ("", ""),
        # Lower-casing this letter makes it two characters long: positions must not shift.
        ("İİİİ the answer is Paris", "Paris"),
    ],
)
def test_answer_taken_from_a_response(text: str, expected: str) -> None:
    assert extract_answer(text) == expected


def test_normalisation_is_that_of_squad() -> None:
    assert normalize("  The cat's  AN  Apple-pie, a thesis! ") == "cats applepie thesis"


@pytest.mark.parametrize("metric", ALL_METRICS)
@pytest.mark.parametrize("prediction", ["", "the", " . ", "a an the", "!?"])
@pytest.mark.parametrize("gold", ["Paris", "", "the"])
def test_a_prediction_without_content_is_wrong(metric, prediction: str, gold: str) -> None:
    assert metric(prediction, [gold]) == 0.0


@pytest.mark.parametrize("metric", ALL_METRICS)
def test_a_gold_answer_without_content_matches_nothing(metric) -> None:
    assert metric("Paris", ["", "the"]) == 0.0
    assert metric("Paris", []) == 0.0


@pytest.mark.parametrize("metric", ALL_METRICS)
def test_the_best_gold_answer_counts(metric) -> None:
    assert metric("The Beatles!", ["Queen", "Beatles"]) == 1.0


def test_sub_em_goes_both_ways_and_by_character() -> None:
    assert sub_em("the Beatles of Liverpool", ["Beatles"]) == 1.0
    assert sub_em("Beatles", ["Beatles of Liverpool"]) == 1.0
    assert sub_em("no", ["North Korea"]) == 1.0
    assert sub_em("Queen", ["Beatles"]) == 0.0


def test_one_way_needs_the_whole_gold_answer_in_whole_words() -> None:
    assert sub_em_1way("the Beatles of Liverpool", ["Beatles"]) == 1.0
    assert sub_em_1way("Beatles", ["Beatles of Liverpool"]) == 0.0
    assert sub_em_1way("north", ["no"]) == 0.0
    assert sub_em_1way("no, it is not", ["no"]) == 1.0


def test_f1_counts_words_and_guards_closed_answers() -> None:
    assert f1("New York City", ["York city hall"]) == pytest.approx(2 / 3)
    assert f1("la la land", ["la la"]) == pytest.approx(0.8)
    assert f1("yes it is", ["yes"]) == 0.0
    assert f1("no", ["no doubt"]) == 0.0
    assert f1("Yes.", ["yes"]) == 1.0


def test_all_metrics_of_a_response() -> None:
    assert qa_metrics(r"\boxed{Beatles}", ["The Beatles"]) == {
        "sub_em": 1.0,
        "sub_em_1way": 1.0,
        "em": 1.0,
        "f1": 1.0,
        "boxed_em": 0.0,
    }
    assert set(qa_metrics("", ["The Beatles"]).values()) == {0.0}


@given(st.text(max_size=200), st.lists(st.text(max_size=20), max_size=3))
def test_any_text_scores_between_zero_and_one(text: str, answers: list[str]) -> None:
    scores = qa_metrics(text, answers)
    assert all(0.0 <= value <= 1.0 for value in scores.values())
    assert scores["em"] <= scores["sub_em_1way"] <= scores["sub_em"]
    assert scores["em"] <= scores["f1"]
