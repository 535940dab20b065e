"""What questions made from ordinary prose ask for: names without the words that begin a sentence, people, years."""

from __future__ import annotations

import re

import pytest

from clusterkit.data.datasets.asking import BLANK, question_word
from clusterkit.data.datasets.cloze import Made, Maker
from trainer.tasks.hotpotqa_data import Document, document_key

SEEDS = 20
PADDING = "and so it went on for a long while."
"""A sentence of fewer than six words is not asked about."""


def clozes(text: str) -> list[Made]:
    document = Document("notes", "notes", text, document_key("notes", text))
    return [one for seed in range(SEEDS) for one in Maker([document], seed).questions(9) if one.kind == "cloze"]


def answers(text: str) -> set[str]:
    return {one.answer for one in clozes(text)}


def words_asked_with(text: str, answer: str) -> set[str]:
    """The question words in place of an answer."""
    before, _, after = text.rstrip(".").partition(answer)
    form = re.compile(f"{re.escape(before[-8:])}([Ww]h[a-z]+(?: year| place)?|[Hh]ow many){re.escape(after)}")
    found = [form.search(one.question) for one in clozes(text) if one.answer == answer]
    return {match[1].lower() for match in found if match}


@pytest.mark.parametrize(
    "beginning",
    "Because PR,Though Balzac,If Lisp,Whereas Bill,Only Harvard,What VCs,So I'm,What I\u2019m,Where Ubuntu,"
    "Our HotpotQA,Recently I've,Some VCs,All of Europe,When the Mac,It's Harvard,For Don't".split(","),
)
def test_a_word_that_only_begins_a_sentence_makes_no_name(beginning: str) -> None:
    assert answers(f"{beginning} firms were paid by them {PADDING}") == set()
    assert answers(f'Then it ended. [6]{beginning} firms were paid and "{beginning} too" {PADDING}') == set()


def test_names_lose_the_words_that_begin_a_sentence_and_titles_keep_theirs() -> None:
    text = (
        "Even Tim O'Reilly wore a suit at the meeting. Because Silicon Valley has no walls they came by car. "
        'Then they went to see the play In Bruges there. They sang it again with "Only You" by the old sea.'
    )

    assert answers(text) == {"Tim O'Reilly", "Silicon Valley", "In Bruges", "Only You"}


@pytest.mark.parametrize(
    ("text", "answer", "word"),
    [
        ("In the early days Bill Gates wrote much of it himself.", "Bill Gates", "who"),
        ("The office was rented for years from Paul van Dyk in town.", "Paul van Dyk", "who"),
        ("They continue to be read like Jane Austen's novels are.", "Jane Austen's", "whose"),
        ("The best of them came from Sam Altman's class in spring.", "Sam Altman's", "whose"),
        ("They were taught for many years at John Hopkins University there.", "John Hopkins University", "what place"),
        ("The team had for long been called St. Louis Cardinals by all.", "Louis Cardinals", "what"),
        ("They built that machine at once like Thinking Machines did.", "Thinking Machines", "what"),
        ("They had for long moved their works to Palo Alto then.", "Palo Alto", "what"),
    ],
)
def test_people_are_asked_for_with_who_and_things_with_what(text: str, answer: str, word: str) -> None:
    assert words_asked_with(text, answer) == {word}


@pytest.mark.parametrize(
    ("text", "answer", "word"),
    [
        ("They had begun to sell it in 1995 for the first time.", "1995", "what year"),
        ("They had sold it since 1995 in the shops of the town.", "1995", "what year"),
        ("They had their first shop (1931) in the harbour.", "1931", "what year"),
        ("They had begun to sell it on May 10, 2001 in the town.", "2001", "what year"),
        ("They had worked there until July 2003 for the town.", "2003", "what year"),
        ("They had worked there from 1991 to the end of it.", "1991", "what year"),
        ("They had made a 1998 film of the war in the town.", "1998", "what year"),
        ("They had counted them all again at the 2010 census there.", "2010", "what year"),
        ("They had some 1200 users when the firm was sold again.", "1200", "how many"),
        ("They had one for every 1000 live births in the town.", "1000", "how many"),
        ("They had walked about 48.3 miles along the river then.", "48.3", "how many"),
        ("They had sold about 16,000 of them in the old town.", "16,000", "how many"),
    ],
)
def test_years_are_asked_for_as_years_and_other_numbers_by_what_they_count(text: str, answer: str, word: str) -> None:
    assert words_asked_with(text, answer) == {word}


@pytest.mark.parametrize(
    "text",
    [
        "They were puzzled for a long time by the 1401. So it went.",
        "They were puzzled for a long time by an IBM 1401 in the cellar.",
        "They were told of it at length at the Web 2.0 meeting.",
        "They were at work on processes within Scheme 48.3 for long.",
        "The old course was known to many of us as 6.001 and it was hard.",
        "They were told that each firm was worth 1500 and not more.",
        "They were told that it kills one in 1000 and not more.",
        "The village has had a population of 1500 since the war.",
    ],
)
def test_numbers_that_are_part_of_a_name_or_count_nothing_are_not_asked_for(text: str) -> None:
    assert answers(text) == set()


def test_a_year_whose_brackets_were_cut_off_is_still_a_year() -> None:
    assert question_word(f"\u2026 it was written by many, {BLANK}) and sold", "1931", BLANK) == "what year"
