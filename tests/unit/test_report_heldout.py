"""The part of a page about held-out questions: what the script is given, within bounds, and that no text is markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heldout_writer import careful, forgetful, write_heldout
from run_writer import RunWriter

from clusterkit.observe.report.heldout import LEFT_OUT, MOST_SECTIONS, MOST_TASKS, page_data, parts_of
from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.trace.evidence import GoldSentence, Held, Place
from clusterkit.runs.trace.heldout import HeldoutTask, MemoryAt, Reading

GOLD = "It was founded by Otto."


def page(*writers: RunWriter) -> str:
    return document("a run", content([RunReader(writer.run).read() for writer in writers], writers[0].clock))


def long_task(name: str, sections: int, characters: int = 20_000) -> HeldoutTask:
    """A task whose gold sentence stands in the middle of its last section but one."""
    texts = ["x" * characters] * sections
    middle = characters // 2
    texts[-2] = f"{'y' * middle}{GOLD}{'z' * middle}"
    gold = GoldSentence("", GOLD, (Place(sections - 1, middle, middle + len(GOLD)),))
    memories = tuple(MemoryAt("m " * 5_000, Held(False, (0.0,))) for _ in texts)
    passed = Reading(memories, "a" * 50_000, {"f1": 0.0}, "")
    return HeldoutTask(name, "Who?", ("Otto",), (gold,), tuple(texts), passed, passed)


def test_a_section_is_given_with_its_gold_sentences_apart() -> None:
    text = f"Works. {GOLD} {GOLD}"
    start = text.index(GOLD)
    marks = [(len(text) - len(GOLD), len(text), 2), (start, start + len(GOLD), 1)]

    assert parts_of(text, marks, 1000) == [("Works. ", 0), (GOLD, 1), (" ", 0), (GOLD, 2)]
    assert parts_of(text, [], 1000) == [(text, 0)]
    assert parts_of(text, [(0, 10, 1), (5, 12, 2)], 1000) == [(text[:10], 1), (text[10:12], 2), (text[12:], 0)]
    assert parts_of("", [], 1000) == []


@pytest.mark.parametrize("at", [0, 3_000, 9_990])
def test_a_long_section_keeps_its_beginning_and_its_gold_sentence_and_says_what_is_left_out(at: int) -> None:
    text = "b" * at + GOLD + "e" * (10_000 - at)
    parts = parts_of(text, [(at, at + len(GOLD), 1)], 1_000)

    assert (GOLD, 1) in parts
    shown = "".join(part for part, kind in parts if kind != LEFT_OUT)
    assert len(shown) <= 1_000 + len(GOLD)
    left = [int(part.split()[1].replace(",", "")) for part, kind in parts if kind == LEFT_OUT]
    assert sum(left) + len(shown) == len(text)
    assert shown.startswith(text[:100])


def test_a_page_of_many_long_documents_stays_small_and_has_every_gold_sentence() -> None:
    data = page_data([long_task(f"t{number}", 300) for number in range(MOST_TASKS + 4)])

    assert len(json.dumps(data)) < 3_500_000
    assert (len(data["tasks"]), data["more"]) == (MOST_TASKS, 4)
    for task in data["tasks"]:
        assert (len(task["sections"]), task["count"]) == (MOST_SECTIONS, 300)
        numbers = [one["number"] for one in task["sections"]]
        assert numbers == [*range(1, MOST_SECTIONS - 1), 299, 300]
        (gold,) = [one for one in task["sections"] if one["gold"]]
        assert [GOLD, 1] in [list(part) for part in gold["parts"]]
        assert "characters left out" in gold["after"]["cut"]


def test_texts_of_documents_and_models_are_no_markup(tmp_path: Path, mini_hotpotqa: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--"
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    path = mini_hotpotqa / "documents.jsonl"
    path.write_text(path.read_text().replace("a painter", hostile))
    write_heldout(writer.run.logs, mini_hotpotqa, "before", lambda *_: hostile)

    text = page(writer)
    assert "alert(1)" in text
    assert "</script><script>alert" not in text
    assert "<!--" not in text.partition("</style>")[2]


def test_a_page_without_records_or_with_damaged_ones_lacks_the_part_alone(tmp_path: Path, mini_hotpotqa: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    assert 'id="heldout"' not in page(writer)

    write_heldout(writer.run.logs, mini_hotpotqa, "before", forgetful)
    assert 'id="heldout"' in page(writer)

    (writer.run.logs / "rollouts" / "eval_after.jsonl.zst").write_bytes(b"no zstd")
    text = page(writer)
    assert 'id="heldout"' not in text
    assert 'id="shared"' in text


def test_two_runs_have_one_part_each(tmp_path: Path, mini_hotpotqa: Path) -> None:
    writers = [RunWriter(tmp_path, trial=trial).attempt().steps(1, 3) for trial in ("run1", "run2")]
    models: list[Any] = [forgetful, careful]
    for writer, model in zip(writers, models, strict=True):
        write_heldout(writer.run.logs, mini_hotpotqa, "before", model)

    text = page(*writers)
    assert text.count('class="heldout clicked"') == 2
    assert text.index("<h3>tiny-recall/run1</h3>") < text.index("<h3>tiny-recall/run2</h3>")
