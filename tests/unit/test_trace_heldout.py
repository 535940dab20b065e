"""`clusterkit trace --heldout`: where gold sentences stand, what memories have, and the view of both passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from heldout_writer import careful, forgetful, write_heldout
from typer.testing import CliRunner

from clusterkit.cli.trace import app
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.trace.evidence import Place, held, places_of
from clusterkit.runs.trace.heldout import HeldoutTask, Reading, learned_task
from clusterkit.runs.trace.heldout_view import changes
from trainer.errors import RunError, UserError

SENTENCE = "She later worked for Vollmer Works."
DOCUMENT = "Document 1:\nOtto\nHe was a clerk.\n\nDocument 2:\nAnna Pier\nShe later worked for Vollmer Works. She left."


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, user_name(), "reading", "run1")
    directory.logs.mkdir(parents=True)
    directory.config.write_text("reward: {name: f1}\n")
    return directory


@pytest.fixture
def both(run: RunDirectory, mini_hotpotqa: Path) -> RunDirectory:
    write_heldout(run.logs, mini_hotpotqa, "before", forgetful)
    write_heldout(run.logs, mini_hotpotqa, "after", careful)
    return run


def trace(run: RunDirectory, *options: str, columns: int = 80) -> str:
    command = ["--heldout", *options, "--fileroot", str(run.fileroot)]
    result = CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout


def words_at(sections: list[str], places: tuple[Place, ...]) -> str:
    return "".join(sections[place.section - 1][place.start : place.end] for place in places)


# Where gold sentences stand


def test_a_sentence_is_found_wherever_its_sections_are_cut() -> None:
    start = DOCUMENT.index(SENTENCE)
    for cut in range(1, len(DOCUMENT)):
        sections = [DOCUMENT[:cut], DOCUMENT[cut:]]
        places = places_of(sections, "Anna Pier", SENTENCE)
        assert words_at(sections, places) == SENTENCE
        assert [place.section for place in places] == (
            [2] if cut <= start else [1] if cut >= start + len(SENTENCE) else [1, 2]
        )


def test_white_space_and_letters_that_a_cut_has_torn_do_not_hide_a_sentence() -> None:
    sections = ["… Zoë lived\n in Orl\ufffd", "\ufffdans for years."]
    places = places_of(sections, "", "Zoë lived in Orléans for years.")
    assert [place.section for place in places] == [1, 2]
    assert words_at(sections, places) == "Zoë lived\n in Orl\ufffd\ufffdans for years."


def test_of_equal_sentences_the_one_below_its_title_counts() -> None:
    sections = ["Document 1:\nA\nIt is red. ", "\n\nDocument 2:\nB\nIt is red. "]
    assert [place.section for place in places_of(sections, "B", "It is red.")] == [2]
    assert [place.section for place in places_of(sections, "A", "It is red.")] == [1]
    assert [place.section for place in places_of(sections, "C", "It is red.")] == [1]  # better than nowhere


def test_a_sentence_that_was_not_read_stands_nowhere() -> None:
    assert places_of(["He was a clerk."], "Anna Pier", SENTENCE) == ()
    assert places_of([], "Anna Pier", SENTENCE) == ()
    assert places_of(["a.b"], "", "") == ()


def test_a_memory_has_a_sentence_with_four_fifths_of_its_words() -> None:
    assert held("Anna later worked for Vollmer Works", ["Otto"], [SENTENCE]).sentences == (1,)
    assert held("Anna worked at Vollmer's", ["Otto"], [SENTENCE]).sentences == ()


def test_an_answer_is_in_a_memory_as_whole_words_and_yes_or_no_never() -> None:
    assert held("The works of Otto Brandt.", ["otto brandt"], []).answer is True
    assert held("The works of Otto Brandtner.", ["otto brandt"], []).answer is False
    assert held("no town has yes in it", ["No"], []).answer is None
    assert str(held(f"Otto: {SENTENCE}", ["Otto"], ["He was a clerk.", SENTENCE])) == "the answer, [2]"


def test_words_that_are_new_are_marked_and_those_that_are_gone_counted() -> None:
    assert changes("a b c", "a x c d e") == (["a", "{+x+}", "c", "{+d", "e+}"], 1)
    assert changes("same text", "same text") == (["same", "text"], 0)
    assert changes("one two", "") == ([], 2)


# The view


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_both_memories_stand_side_by_side_below_question_gold_and_answers(both: RunDirectory, columns: int) -> None:
    text = trace(both, columns=columns)

    assert "held-out task 0 of 2, test-mini-i10" in text
    assert "question  On which river is the town where Kit Lark was born?" in text
    assert "gold      Yarrow" in text
    assert "[1] section 1: Kit Lark: Kit Lark is a painter" in " ".join(text.split())
    assert "section 2 of 2, with [2]" in text
    lines = text.splitlines()
    first = next(line for line in lines if "before training" in line)
    assert " | after training: has [1]" in first
    assert "Nothing useful so far.+}" in text
    assert "{+Kelmar" not in text  # it goes on from what is new before it
    assert "before  F1 0.00   I do not know." in text
    assert r"after   F1 1.00   \boxed{Yarrow}" in text
    assert "1   F1 0.00 ->  F1 1.00  On which river is the town where Bo" in text
    assert max(map(len, lines)) <= min(columns, 100)


@pytest.mark.parametrize(
    ("reward", "told"),
    [("f1", "F1 0.50"), ("boxed", "accuracy 0.50"), ("mine:Reward", "score 0.50"), ("", "accuracy 0.50")],
)
def test_an_answer_has_the_score_that_the_closing_table_counts_by_its_name(
    run: RunDirectory, mini_hotpotqa: Path, reward: str, told: str
) -> None:
    run.config.write_text(f"reward: {{name: '{reward}'}}\n" if reward else "")
    write_heldout(run.logs, mini_hotpotqa, "before", forgetful)
    file = run.logs / "rollouts" / "eval_before.jsonl.zst"
    with zstandard.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    with zstandard.open(file, "wt", encoding="utf-8") as lines:  # half right, and not marked
        scored = [record | {"scores": {"accuracy": 0.5, "f1": 0.25}} for record in records]
        lines.write("".join(json.dumps(record) + "\n" for record in scored))

    assert f"before  {told}   I do not know." in trace(run)
    assert "0.25" not in trace(run)


def test_another_task_by_number_or_id_and_as_json(both: RunDirectory) -> None:
    found = json.loads(trace(both, "--task", "1", "--json"))
    assert found == json.loads(trace(both, "reading/run1", "--task", "test-mini-i1", "--json"))

    assert found["tasks"] == ["test-mini-i10", "test-mini-i1"]
    assert (found["task"], found["answers"]) == ("test-mini-i1", ["Pell"])
    assert [one["places"][0]["section"] for one in found["gold"]]
    assert len(found["sections"]) == len(found["before"]["memories"]) == len(found["after"]["memories"])
    assert found["after"]["memories"][-1]["held"] == {"answer": True, "shares": [1.0, 1.0]}
    assert (found["before"]["scores"]["f1"], found["after"]["scores"]["f1"]) == (0.0, 1.0)


def test_an_id_from_the_data_reaches_the_terminal_without_control_characters(
    run: RunDirectory, mini_hotpotqa: Path
) -> None:
    write_heldout(run.logs, mini_hotpotqa, "before", careful)
    file = run.logs / "rollouts" / "eval_before.jsonl.zst"
    with zstandard.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    records[0]["task_id"] = "\x1b[2Jrow"
    with zstandard.open(file, "wt", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(record) + "\n" for record in records))

    assert "held-out task 0 of 2, [2Jrow\n" in trace(run)


def test_a_run_that_has_not_ended_shows_what_there_is_and_says_so(run: RunDirectory, mini_hotpotqa: Path) -> None:
    write_heldout(run.logs, mini_hotpotqa, "before", careful)
    text = trace(run)

    assert "There is only the record from before the first step" in text
    assert "before training: has the answer, [1], [2]" in text
    assert " | " not in text
    assert "0   F1 1.00 ->        -  On which" in text


def test_a_run_that_began_at_a_checkpoint_of_another_shows_its_end(run: RunDirectory, mini_hotpotqa: Path) -> None:
    write_heldout(run.logs, mini_hotpotqa, "after", careful)
    text = trace(run)

    assert "There is no record from before the first step" in text
    assert "after training: has the answer" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--task", "2"),
            "2 held-out tasks are recorded, none of them 2: give --task-id a number from 0 to 1, or an id",
        ),
        (("--task", "²"), "2 held-out tasks are recorded, none of them ²"),
        (("--step", "1"), "leave out --step and --sample"),
        (("--sample", "0"), "leave out --step and --sample"),
    ],
)
def test_what_is_not_there_is_said(both: RunDirectory, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trace(both, *options)


def test_a_run_of_an_earlier_version_says_in_one_sentence_why_there_is_nothing(run: RunDirectory) -> None:
    with pytest.raises(RunError, match=r"^reading/run1 has no record of held-out tasks.*earlier versions have none"):
        trace(run)


def test_a_damaged_record_is_named(both: RunDirectory) -> None:
    path = both.logs / "rollouts" / "eval_after.jsonl.zst"
    path.write_bytes(b"no zstd at all")
    with pytest.raises(RunError, match=r"eval_after\.jsonl\.zst cannot be read .*clusterkit trace"):
        trace(both)


def test_an_agent_that_does_not_tell_what_it_read_shows_what_it_wrote(run: RunDirectory) -> None:
    turns = [
        {"kind": "update", "response": "Ada \x1b[31mlives in Arnby"},
        {"kind": "final", "response": r"\boxed{Arnby}"},
    ]
    record: dict[str, Any] = {"task_id": "t", "question": "Where?", "answers": ["Arnby"], "answer": "Arnby"}
    record |= {"turns": turns, "sections": None, "scores": {"accuracy": 0.5}, "error": None, "evidence": []}
    (run.logs / "rollouts").mkdir()
    data = zstandard.compress(json.dumps(record).encode() + b"\n")
    (run.logs / "rollouts" / "eval_before.jsonl.zst").write_bytes(data)
    text = trace(run)

    assert "section 1 of 1\nbefore training: has the answer\n{+Ada [31mlives in Arnby+}" in text
    assert "before  F1 0.50   Arnby" in text
    assert "\x1b" not in text


def test_long_texts_are_cut_unless_all_is_wanted(run: RunDirectory, mini_hotpotqa: Path) -> None:
    memory = " ".join(f"word{number}" for number in range(200))
    write_heldout(run.logs, mini_hotpotqa, "before", lambda *_: memory, max_memory_tokens=3000, max_final_tokens=3000)

    assert "80 more words (--full)" in trace(run)
    assert "word119+}" in trace(run)
    assert "word199" not in trace(run)
    assert "word199+}" in trace(run, "--full")


def test_without_a_number_the_first_task_is_shown_whose_answer_became_better() -> None:
    def read(score: float) -> Reading:
        return Reading((), "", {"accuracy": score, "f1": 1.0 - score}, "")

    tasks = [
        HeldoutTask(f"t{number}", "", (), (), (), read(float(before)) if before else None, read(after))
        for number, (before, after) in enumerate([("1.0", 1.0), ("", 1.0), ("0.5", 0.4), ("0.2", 0.9), ("0.0", 1.0)])
    ]

    assert learned_task(tasks) == 3
    assert learned_task(tasks[:3]) == 0
