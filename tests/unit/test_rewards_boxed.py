r"""The strict reward: which \boxed{} counts and what is ignored when it is compared."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.boxed import boxed_reward, last_boxed, strip_latex

FRAGMENTS = st.lists(
    st.sampled_from(
        ["\\boxed", "\\boxed ", "\\fbox", "{", "}", "$", "\\", "paris", " ", "\n", ".", "\\frac", "İ", "😀"]
    ),
    max_size=80,
).map("".join)


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        (r"So it is \boxed{The Beatles}.", "the beatles", 1.0),
        (r"So it is \boxed{Beatles}.", "the beatles", 0.0),
        (r"\boxed{the  Beatles}", "The Beatles", 1.0),
        (r"\boxed{beatles, the}", "beatles the", 0.0),
        ("the beatles", "the beatles", 0.0),
        ("", "the beatles", 0.0),
        (r"\boxed{}", "the beatles", 0.0),
        (r"\boxed{}", "", 0.0),
        (r"\boxed{wrong} no wait \boxed{right}", "right", 1.0),
        (r"\boxed{right} no wait \boxed{wrong}", "right", 0.0),
        (r"\boxed{right} and \boxed{wron", "right", 0.0),
        (r"\boxed{\text{right}}", r"\text{right}", 1.0),
        (r"\boxed{f(x)={a}_{b{c}}}", "f(x)={a}_{b{c}}", 1.0),
        (r"$\boxed 12$ apples", "12", 1.0),
        (r"$\boxed 12$ or \boxed{13}", "12", 1.0),
        (r"\fbox{12}", "12", 1.0),
        (r"\fbox{12} \boxed{13}", "12", 0.0),
        (r"\boxed12", "12", 0.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50%}", "50", 0.0),
        (r"\boxed{\$5}", "5", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\left(90^{\circ}\right)}", "(90)", 1.0),
        ("\\boxed{new\nyork}", "newyork", 1.0),
        (r"\boxed{{.5}}", "{0.5}", 1.0),
    ],
)
def test_reward_of_a_response(response: str, gold: str, expected: float) -> None:
    assert boxed_reward(response, [gold]) == expected


def test_best_gold_answer_counts() -> None:
    assert boxed_reward(r"\boxed{NYC}", ["New York City", "nyc"]) == 1.0
    assert boxed_reward(r"\boxed{NYC}", []) == 0.0


def test_only_the_last_300_characters_are_read() -> None:
    box = r"\boxed{paris}"
    assert boxed_reward(box + "x" * (300 - len(box)), ["paris"]) == 1.0
    assert boxed_reward(box + "x" * (301 - len(box)), ["paris"]) == 0.0


def test_a_degree_and_a_space_before_a_dot() -> None:
    assert strip_latex(r"90^\circ .5 \! \tfrac12 a\\b") == r"900.5\frac12a\b"


@given(FRAGMENTS, st.lists(FRAGMENTS, max_size=3))
def test_any_text_gives_zero_or_one(response: str, answers: list[str]) -> None:
    assert boxed_reward(response, answers) in (0.0, 1.0)


@given(st.text(alphabet="ab{}\\", max_size=40))
def test_a_balanced_box_is_returned_whole(inner: str) -> None:
    depth, balanced = 0, True
    for character in inner:
        depth += {"{": 1, "}": -1}.get(character, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0:
        assert last_boxed(f"see \\boxed{{{inner}}} there") == inner


@pytest.mark.parametrize("unit", ["{", "\\boxed{", "\\boxed{}", "\\fbox{{}", "\\boxed "])
def test_time_does_not_grow_with_the_square_of_the_length(unit: str) -> None:
    def seconds(repeats: int) -> float:
        text = "\\boxed{" + unit * repeats
        started = time.process_time()
        last_boxed(text)
        return time.process_time() - started

    seconds(1000)
    # Ten times the text: ten times the time, where a quadratic scan would take a hundred. The floor hides clock noise.
    assert min(seconds(200_000) for _ in range(3)) < 40 * max(min(seconds(20_000) for _ in range(3)), 1e-3)
