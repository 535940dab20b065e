"""Texts of the user's as documents: no question is made of two sentences that run into each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterkit.data.datasets.cloze import Maker
from clusterkit.data.datasets.passages import read_passages
from clusterkit.data.datasets.prose import blocks_of, is_one_sentence, whole_sentences, without_front_matter
from trainer.tasks.hotpotqa_data import Document


def _documents(tmp_path: Path, text: str) -> list[Document]:
    (tmp_path / "essay.md").write_text(text)
    return [passage.document for passage in read_passages(tmp_path / "essay.md")[0]]


def _sentences(tmp_path: Path, text: str) -> list[str]:
    return [sentence for document in _documents(tmp_path, text) for sentence in whole_sentences(document.text)]


def test_headings_items_and_tables_do_not_run_into_the_next_sentence(tmp_path: Path) -> None:
    text = """---
title: The Lighthouse
date: 2021-04-18
---
A TALE OF THE COAST

The oven
Our oven was built by Josef Brandt in 1924, of fire brick from the works, and
it held the heat for two days. What you need:
* 500 g of rye flour
* a spoon of **brown** syrup,
  from the shop
1. Rest

| Keeper | Years |
|---|---|
| William Marsh | 1851 |

> "I have buried eleven men," she wrote. "I do not
> intend to bury a twelfth."
***
**Note:** the map is wide.
```sh
make it
```
The end came in 1902.
"""
    assert _sentences(tmp_path, text) == [
        "A TALE OF THE COAST",
        "The oven",
        "Our oven was built by Josef Brandt in 1924, of fire brick from the works, and it held the heat for two days.",
        "What you need:",
        "500 g of rye flour",
        "a spoon of brown syrup, from the shop",
        "1.",
        "Rest",
        "| Keeper | Years |",
        "| William Marsh | 1851 |",
        '"I have buried eleven men," she wrote.',
        '"I do not intend to bury a twelfth."',
        "Note: the map is wide.",
        "make it",
        "The end came in 1902.",
    ]


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("It is accelerating.We would stop it.", ["It is accelerating.", "We would stop it."]),
        ("I use Facebook.The world does.", ["I use Facebook.", "The world does."]),
        ('"It talks," she said."We have him."So be it.', ['"It talks," she said.', '"We have him."', "So be it."]),
        ("They wept. [1]\n[2]No one knew.[^3]", ["They wept.", "No one knew."]),
        (
            "So am I. Samuel Ash went at 4 p.m. The ferry left.",
            ["So am I.", "Samuel Ash went at 4 p.m.", "The ferry left."],
        ),
        ("July 2010What is it?", ["July 2010", "What is it?"]),
        ("It is in Crane, Maps, vol. 2, p. 14. He died.", ["It is in Crane, Maps, vol. 2, p. 14.", "He died."]),
        (
            "As [12] and J. R. R. Tolkien say, a.UserError of `x.The` and [y.](Url) in Inc. Magazine stay.",
            ["As [12] and J. R. R. Tolkien say, a.UserError of `x.The` and [y.](Url) in Inc. Magazine stay."],
        ),
    ],
)
def test_sentences_that_were_pasted_together_come_apart(tmp_path: Path, text: str, apart: list[str]) -> None:
    assert _sentences(tmp_path, text) == apart


def test_a_rule_in_a_text_is_no_front_matter_and_wrapped_lines_are_one_sentence(tmp_path: Path) -> None:
    text = "---\nHe was a pupil of Robert\nStevenson.\n---\nShe was not.\n"
    assert _sentences(tmp_path, text) == ["He was a pupil of Robert Stevenson.", "She was not."]
    for kept in ("He left at 5:30 for Rome.", "- a list of things"):
        assert list(without_front_matter(["---", kept, "---", "End."])) == ["---", kept, "---", "End."]
    assert list(without_front_matter(["---", "tags:", "- Rome", "  more", "# of 5 p.m.", "...", "End."])) == ["End."]
    assert (
        list(
            blocks_of(
                ["Thanks to Ann,", "Ben Ash and Carl. " + "So it goes. " * 9, "Thanks to Dan Fox, Eve", "Fox and I."]
            )
        )[1:]
        == []
    )
    assert list(blocks_of(["The sum is", "12. It was", "paid."])) == ["The sum is 12. It was paid."]


def test_what_may_still_be_two_sentences_is_not_asked_about() -> None:
    assert not any(
        map(is_one_sentence, ("Two RoutesThere's more.", "By GQ.Ripped jeans are in.", "| a | b |", "Is it?"))
    )
    assert is_one_sentence("The U.S. consul, J. R. Ward (1.5 m), left.")


def test_a_heading_is_not_what_pronouns_mean_and_the_title_of_an_article_is(tmp_path: Path) -> None:
    text = "# Why it was built\n\nIt was ordered by Ann Penrose in 1843 for the old town.\n\n"
    text += "# Marie Tharp\n\nMarie Tharp drew maps. She was born in Ypsilanti Town in 1920 as an only child.\n"
    documents = _documents(tmp_path, text)
    prose = {document.key for document in documents}
    made = [one.question for seed in range(20) for one in Maker(documents, seed, prose).questions(9)]
    asked = [one.question for seed in range(20) for one in Maker(documents, seed).questions(9)]

    assert "About Why it was built: It was ordered by Ann Penrose in what year for the old town?" in made
    assert "Marie Tharp was born in Ypsilanti Town in what year as an only child?" in made
    assert not any(question.startswith("Why it was built was") for question in made)
    assert any(question.startswith("Why it was built was") for question in asked)
