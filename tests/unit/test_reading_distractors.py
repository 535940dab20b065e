"""Sentences that mislead in the traces of `clusterkit data prepare reading`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from readingfiles import SMALL, rows, world
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.data.datasets.distractors import Misleading, asked_words, content_words, distractors_of
from clusterkit.data.datasets.prepare import make_plan
from clusterkit.data.datasets.reading import parse_mix
from clusterkit.data.datasets.texts import Shape
from trainer.tasks.evidence import MOST_SENTENCES, has_words, sentences
from trainer.tasks.hotpotqa_data import Document, Question


def stables() -> list[dict[str, Any]]:
    """A world in which ten documents in a row, one for each question, have the words of all ten questions."""
    made = world(150)
    for n, item in enumerate(made):
        item["question"], item["answer"] = f"Who keeps the Breed{n // 10}x Colour{n // 10}x horses{n}?", f"Keeper {n}"
        item["context"][0][1][0] += f" Keeper {n} has them."
        item["context"][2] = [f"Stable {n}", [f"breed{n // 10}x and colour{n // 10}x are in row {n}."]]
    return made


def test_distractors_are_of_a_share_of_the_traces_and_the_others_do_not_change(tmp_path: Path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(stables()))

    def traces(share: float) -> list[dict[str, Any]]:
        shape = replace(SMALL, traces=200, sizes=(2, 4, 16), distractors=share)
        plan = make_plan("reading", [tmp_path / "world.json"], Shape(), 0.2, 0, 1, shape)
        assert plan.settings.get("trace_distractors") == (share or None), "a folder without them stays up to date"
        return [plan.outputs[-1].make(number) for number in range(200)]

    none, some, all_ = traces(0.0), traces(0.5), traces(1.0)
    for with_them in (some, all_):
        for row, plain in zip(with_them, none, strict=True):
            assert [row[name] for name in ("kind", "problem", "answer")] == [
                plain[name] for name in ("kind", "problem", "answer")
            ]
            if row["kind"] == "final":
                assert sorted(map(tuple, row["evidence"])) == sorted(map(tuple, plain["evidence"]))
            else:
                assert row["evidence"] == plain["evidence"]
    have = [{number for number, row in enumerate(rows) if "distractors" in row} for rows in (none, some, all_)]
    assert not have[0]
    assert have[1] < have[2]
    assert 0.3 < len(have[1]) / len(have[2]) < 0.7
    assert some == traces(0.5)
    as_before = [json.dumps(one) == json.dumps(other) for one, other in zip(some, none, strict=True)]
    assert all(one or other == most for one, other, most in zip(as_before, some, all_, strict=True))


def test_whole_memories_have_sentences_that_mislead_beside_the_evidence(tmp_path: Path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(stables()))

    def finals(share: float) -> list[dict[str, Any]]:
        shape = replace(SMALL, traces=100, sizes=(16,), distractors=share, mix=parse_mix("cloze=20,real=20,final=60"))
        plan = make_plan("reading", [tmp_path / "world.json"], Shape(), 0.2, 0, 1, shape)
        return [row for row in map(plan.outputs[-1].make, range(100)) if row["kind"] == "final"]

    short = misled = 0
    for row, plain in zip(finals(1.0), finals(0.0), strict=True):
        assert "context" not in row
        added = row.get("distractors", [])
        assert len(row["evidence"]) + len(added) <= max(MOST_SENTENCES, len(plain["evidence"]))
        assert sorted(row["evidence"]) == sorted(plain["evidence"])
        assert not any(has_words(f"{title} {text}".lower(), row["answer"][7:-1].lower()) for title, text in added)
        short += len(row["evidence"]) < MOST_SENTENCES
        misled += bool(added)
    assert misled > short // 2 > 5
    assert not any("sentences" in row for row in finals(1.0))


def test_memories_of_more_sentences_are_a_setting_of_the_traces(tmp_path: Path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(stables()))
    shape = replace(SMALL, traces=100, sizes=(16,), distractors=1.0, mix=parse_mix("real=40,final=60"), sentences=4)
    plan = make_plan("reading", [tmp_path / "world.json"], Shape(), 0.2, 0, 1, shape)
    assert plan.settings["trace_sentences"] == 4
    rows = list(map(plan.outputs[-1].make, range(100)))
    assert {row.get("sentences") for row in rows if "distractors" in row} == {4}
    kept = [len(row["evidence"]) + len(row.get("distractors", [])) for row in rows if row["kind"] == "final"]
    assert MOST_SENTENCES < max(kept) <= 4


def test_a_distractor_is_the_sentence_of_another_document_that_shares_most_words_with_the_question(
    tmp_path: Path,
) -> None:
    (tmp_path / "world.json").write_text(json.dumps(world()))
    command = ["data", "prepare", "reading", "--from", str(tmp_path / "world.json"), "--out", str(tmp_path / "out")]
    options = ["--traces", "300", "--trace-documents", "4,16", "--trace-distractors", "1", "--test-share", "0.2"]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    seen = 0
    for row in rows(tmp_path / "out" / "traces.jsonl"):
        if row["kind"] == "final":
            continue
        answer = row["answer"][len("\\boxed{") : -1].lower()
        asked = asked_words(Question("", row["problem"], (), (), (), row["kind"]))
        documents = dict(part.split("\n")[1:] for part in row["context"].split("\n\n") if part)
        places = {title: place for place, title in enumerate(documents)}
        ranks = []
        for title, sentence in row.get("distractors", []):
            weights = {
                one: len(asked & content_words(f"{title} {one}"))
                for one in sentences(documents[title])
                if not has_words(f"{title} {one}".lower(), answer)
            }
            assert title not in dict(row["evidence"])
            assert weights[sentence] == max(weights.values()) >= 2
            ranks.append((-weights[sentence], places[title]))
        assert ranks == sorted(ranks)
        seen += len(ranks)
    assert seen > 100


def test_half_of_the_other_documents_of_a_chosen_trace_are_those_most_like_its_question(tmp_path: Path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(stables()))

    def contexts(share: float) -> list[tuple[int, set[str], set[str]]]:
        """Breed asked for, gold titles and those of the others."""
        shape = replace(SMALL, traces=80, mix=parse_mix("real=1"), sizes=(9,), distractors=share)
        output = make_plan("reading", [tmp_path / "world.json"], Shape(), 0.1, 0, 1, shape).outputs[-1]
        found = []
        for row in map(output.make, range(80)):
            gold = set(dict(row["evidence"]))
            titles = {part.split("\n")[1] for part in row["context"].split("\n\n")}
            assert len(titles) == 9
            found.append((int(row["problem"].split("Breed")[1].split("x")[0]), gold, titles - gold))
        return found

    def alike(breed: int, others: set[str]) -> int:
        return sum(title.startswith("Stable ") and int(title.split()[1]) // 10 == breed for title in others)

    counts = [[alike(breed, others) for breed, _, others in contexts(share)] for share in (0.0, 1.0)]
    assert sum(counts[0]) / 80 < 2, "its own, and one by chance"
    assert set(counts[1]) <= {4, 5, 6}, "its own, three others of seven, and perhaps one by chance"


def test_a_document_that_misleads_has_two_rare_words_of_the_question_and_no_answer() -> None:
    def document(title: str, text: str) -> Document:
        return Document(title, title, text, text)

    gold = document("Ann Ash", "Ann Ash sang for The Elms in a band.")
    near = document("Ann Peel", "She ran. She sang for a choir with Ash.")
    equal = document("Ann Ash's sister", "She sang for a band.")
    apart = document("Bob", "Ann left. Ash came. He sang.")
    answer = document("The choir", "Ann Ash sang there. So did the Elms.")
    others = [document(f"Band {n}", f"Band {n} was a band with an article that fits the blank.") for n in range(30)]
    find = Misleading([gold, *others, apart, answer, near, equal])

    question = Question("q", "Where is the band that Ann Ash sang for?", ("The Elms",), (gold,), (gold,), "")
    assert find.documents(question, 9, ()) == [near, equal], "equals in order; band stands in too many to count"
    assert find.documents(question, 1, ()) == [near]
    assert find.documents(question, 9, {near.key}) == [equal]
    assert find.documents(replace(question, gold=(gold, near)), 9, ()) == [equal]

    text = "In the article \u201cAnn Oak\u201d, what fits the blank? \u201cA ____ comes first.\u201d"
    asked = replace(question, question=text)
    assert asked_words(replace(asked, source="cloze")) == {"ann", "oak"}
    assert asked_words(asked) >= {"ann", "oak", "article", "blank"}


def test_stop_words_titles_and_answers_decide_what_misleads() -> None:
    def document(title: str, text: str) -> Document:
        return Document(title, title, text, text)

    gold = document("Ann Ash", "Ann Ash sang for The Elms in 1990.")
    others = [
        document("The Band", "It is where it was, and that is for the band."),
        document("Ann Peel", "She paints. She sang. She sang."),
        document("Bob Ash", "Bob Ash sang for The Elms."),
        document("Ann Ash's sister", "She heard the band. Her band sang."),
    ]
    question = Question("q", "Where is Ann Ash\u2019s band, that sang?", ("the Elms!",), (gold,), (gold, *others), "")

    assert content_words(question.question) == {"ann", "ash", "band", "sang"}
    # The first has one such word, the third holds the answer as rewards compare it, and the last shares all four.
    assert distractors_of(question, [*others, gold]) == [
        ("Ann Ash's sister", "Her band sang."),
        ("Ann Peel", "She sang."),
    ]


@pytest.mark.parametrize("share", ["-0.1", "1.1", "x"])
def test_a_share_of_distractors_that_is_none_is_refused(tmp_path: Path, share: str) -> None:
    words = ["data", "prepare", "reading", "--from", str(tmp_path), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--trace-distractors", share])

    assert done.exit_code == 2
    assert "--trace-distractors" in done.output
    assert not (tmp_path / "out").exists()
