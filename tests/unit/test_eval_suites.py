"""Suites: the truth of every known schema, damaged files told by line, generated documents that hold their answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from builders import byte_tokenizer
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.config.resolve import resolve
from clusterkit.evaluate.request import default_names
from evaluation.config import EvalConfig
from evaluation.methods import TEMPLATES, best_paragraphs, document_of, make_reader, template_named
from evaluation.suites import NAMES, Finder
from evaluation.suites.hqa import build_items
from evaluation.suites.problems import read_problems
from evaluation.suites.ruler import TASKS
from trainer.agents.single_turn import SingleTurn
from trainer.config_tasks import MathConfig, NeedlesConfig, RecallConfig
from trainer.errors import UserError
from trainer.tasks.math import Math
from trainer.tasks.needles import Needles


def count_words(text: str) -> int:
    return len(text.split())


def write(path: Path, *rows: dict[str, object] | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "row", "question", "truth"),
    [
        ("aime24", {"id": 60, "problem": "P", "question": "Q", "solution": "s", "answer": "204"}, "Q", "204"),
        ("aime25", {"id": "1", "problem": "P", "answer": 70}, "P", "70"),
        ("amc23", {"id": 0, "problem": "P", "question": "Q", "answer": 27.0}, "Q", "27"),
        ("amc23", {"id": 0, "question": "Q", "answer": 2.5}, "Q", "2.5"),
        (
            "math_500",
            {"problem": "P", "solution": r"so \boxed{\frac12}", "answer": "x", "unique_id": "t/1"},
            "P",
            r"\frac12",
        ),
        ("gsm8k", {"question": "Q", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}, "Q", "1004"),
        ("mine", {"prompt": "Q", "query_id": "a", "solutions": [r"\boxed{7}"]}, "Q", "7"),
        ("mine", {"Question": "Q", "answers": ["a", "b"]}, "Q", "a"),
        ("mine", {"input": "Q", "solution": r"\boxed{9}"}, "Q", "9"),
    ],
)
def test_problem_and_truth_of_every_schema(
    tmp_path: Path, name: str, row: dict[str, object], question: str, truth: str
) -> None:
    (task,) = read_problems(name, write(tmp_path / "f.jsonl", row))
    assert (task.question, task.answers[0]) == (question, truth)


GOOD = {"id": 1, "problem": "P", "answer": "5"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, '{"id": 2, "problem": '], r"line 2: not JSON .*one JSON object a line"),
        ([GOOD, {**GOOD, "id": 2}, GOOD], r"line 3: id '1' occurs a second time \(first in line 1\)"),
        ([GOOD, {"id": 2, "answer": "5"}], r"line 2: there is no problem in it"),
        ([{"id": 2, "problem": "P"}], r"line 1: there is no true answer"),
        ([{"id": 2, "problem": "P", "solution": "nothing"}], r"line 1: column 'solution' has no"),
        ([{"id": 2, "problem": "P", "answer": None}], r"line 1: column 'answer' must be a text or a number, not null"),
        ([{"id": 2, "problem": "P", "answer": " "}], r"line 1: column 'answer' is empty"),
        (["[1, 2]"], r"line 1: must be a JSON object, not a list"),
        ([], r"the file is empty"),
    ],
)
def test_a_damaged_file_is_told_by_its_line(tmp_path: Path, rows: list[dict[str, object] | str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_problems("mine", write(tmp_path / "f.jsonl", *rows))


def test_sets_are_found_in_the_shapes_in_which_people_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERKIT_DATA", raising=False)
    write(tmp_path / "aime24" / "test.jsonl", GOOD)
    write(tmp_path / "math" / "gsm8k_test.jsonl", GOOD)
    packed = tmp_path / "math_500.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"problem": "P", "solution": r"\boxed{1}"}).encode()))
    finder = Finder(str(tmp_path), str(tmp_path / "cache"))
    for name in ("aime24", "gsm8k", "math_500"):
        assert len(finder.suite(name).load(count_words)) == 1
    with pytest.raises(UserError, match="no data of amc23: fetch them with clusterkit assets get amc23,"):
        finder.suite("amc23")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math500", "Did you mean math_500"),
        ("rulerhqa@50", "Did you mean ruler_hqa"),
        ("niah_single@0", "must be 1 or more"),
        ("aime24@5", "has no size"),
        ("nowhere/file.jsonl", "there is no such file"),
        ("ruler_hqa_official@50", r"no eval_50.json of MemAgent.*ruler_hqa@50"),
        ("ruler_hqa@50", r"looked for questions.jsonl in \S+/hotpotqa, .*clusterkit assets get hotpotqa"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERKIT_DATA", raising=False)
    with pytest.raises(UserError, match=message):
        Finder(str(tmp_path), str(tmp_path)).suite(name)


def test_a_folder_that_is_not_there_is_no_reason_to_ask_questions_of_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["eval", "--here", "--model-path", str(tmp_path), "--data-names", "ruler_hqa@4", "--dry-run"]
    asked = CliRunner().invoke(app, [*words, "--data-path", str(tmp_path / "questoins")])

    assert isinstance(asked.exception, UserError)
    assert f"--data-path {tmp_path / 'questoins'}: there is no such folder" in str(asked.exception)


def test_two_files_of_one_name_cannot_share_a_row(tmp_path: Path) -> None:
    names = [str(write(tmp_path / folder / "x.jsonl", GOOD)) for folder in ("a", "b")]
    with pytest.raises(UserError, match="two data sets have the name x"):
        Finder().suites(names)
    with pytest.raises(UserError, match="no data set named"):
        Finder().suites([" "])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [600, 3000])
def test_generated_documents_hold_their_answers_at_about_the_length(task: str, tokens: int) -> None:
    suite = Finder(limit=6).suite(f"{task}@{tokens}")
    tasks = suite.load(count_words)
    assert [t.context for t in tasks] == [t.context for t in suite.load(count_words)]
    assert len({t.context for t in tasks}) == 6
    lengths = [count_words(t.context) for t in tasks]
    assert sum(lengths) / 6 == pytest.approx(tokens, rel=0.12)
    for one in tasks:
        assert one.answers
        assert all(answer in one.context for answer in one.answers)


def test_the_needle_asked_for_is_the_one_expected() -> None:
    for one in Finder(limit=8).suite("niah_multikey@500").load(count_words):
        name = one.question.split(" for ")[1].split(" mentioned")[0]
        (line,) = [s for s in one.context.split(".") if f"numbers for {name} is" in s]
        assert line.endswith(one.answers[0])


def test_frequent_words_are_the_most_frequent() -> None:
    for name, top in (("cwe@2000", 10), ("fwe@2000", 3)):
        for one in Finder(limit=4).suite(name).load(count_words):
            words = [word for word in one.context.split() if word.isalpha()]
            ranked = sorted(set(words), key=lambda w: -words.count(w))
            assert set(ranked[:top]) == set(one.answers)


def test_variables_follow_their_chain() -> None:
    for one in Finder(limit=4).suite("vt@800").load(count_words):
        value = one.question.split("value ")[1].split()[0]
        holders = {}
        for sentence in one.context.replace("\n", " ").split("."):
            if "VAR" in sentence:
                name, _, source = sentence.strip().removeprefix("VAR ").partition(" = ")
                holders[name] = holders[source.removeprefix("VAR ")] if source.startswith("VAR") else source
        assert {name for name, held in holders.items() if held == value} == set(one.answers)


def test_ruler_hqa_hides_the_evidence_anywhere_among_n_documents(mini_hotpotqa: Path) -> None:
    items = build_items(mini_hotpotqa, 12)
    places = set()
    for item in items:
        documents = item.context.split("\n\n")
        assert len(documents) == 12
        gold = [int(n) for n in str(item.meta["gold_documents"]).split()]
        assert len(gold) == 2
        assert any(item.answers[0] in documents[n - 1] for n in gold)
        places.update(gold)
    assert len(places) > 4
    with pytest.raises(UserError, match="has 40 different documents: ask for at most 40"):
        build_items(mini_hotpotqa, 41)


def test_memagents_own_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"context": "Document 1:\nA\nB", "input": "Q?", "answers": ["B"], "num_docs": 50, "index": 7}]
    (tmp_path / "eval_50.json").write_text(json.dumps(rows))
    monkeypatch.setenv("CLUSTERKIT_DATA", str(tmp_path))
    (task,) = Finder().suite("ruler_hqa_official@50").load(count_words)
    assert (task.id, task.question, task.answers) == ("7", "Q?", ("B",))
    (tmp_path / "eval_50.json").write_text(json.dumps([{**rows[0], "context": [1, 2]}]))
    with pytest.raises(UserError, match="item 1: context is no text"):
        Finder().suite("ruler_hqa_official@50").load(count_words)


def test_bm25_finds_the_paragraphs_that_speak_of_the_question(mini_hotpotqa: Path) -> None:
    pytest.importorskip("bm25s")
    for item in build_items(mini_hotpotqa, 20):
        found = best_paragraphs(item, 3)
        assert len(found) == 3
        person = item.question.split("where ")[1].removesuffix(" was born?")
        assert any(person in paragraph for paragraph in found)
        assert all(paragraph in document_of(item) for paragraph in found)


def test_every_name_of_a_generated_suite_can_be_asked_for() -> None:
    for name in (*TASKS, "recall", "needles"):
        assert name in NAMES
        assert Finder(limit=1).suite(name).load(count_words)


def test_templates_of_areal_and_their_difference() -> None:
    old, new = (TEMPLATES[name]("Q", None) for name in ("r1-distilled-qwen", "r1-distilled-qwen-v0.3"))
    begin = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    assert old == begin + new
    assert new.startswith("<\uff5cUser\uff5c>Q\n")
    assert new.endswith("<\uff5cAssistant\uff5c><think>\n")
    assert TEMPLATES["memagent"]("Q", byte_tokenizer()).startswith(
        "[user]Answer the problem below and put the answer in"
    )
    with pytest.raises(UserError, match="Did you mean qwen-boxed"):
        template_named("qwen_boxed")


@pytest.mark.data
def test_the_data_files_are_read_as_their_schemas_say(shared_data: Path) -> None:
    finder = Finder(str(shared_data))
    sizes = {"math_500": 500, "aime24": 30, "amc23": 40, "gsm8k": 1319}
    for name, size in sizes.items():
        tasks = finder.suite(name).load(count_words)
        assert len(tasks) == size
        assert all(task.question and task.answers[0] for task in tasks)
    packed = (shared_data / "math" / "math_500.jsonl.gz").read_bytes()
    rows = map(json.loads, gzip.decompress(packed).decode().splitlines())
    truths = [task.answers[0] for task in finder.suite("math_500").load(count_words)]
    assert truths == [row["answer"].strip() for row in rows]
    assert all(task.answers[0].isdigit() for task in finder.suite("aime24").load(count_words))


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("tiny", ["recall"]),
        ("memalpha-tiny", ["facts"]),
        ("memalpha-4B", ["memalpha"]),
        ("135M_cpu", ["ruler_hqa@6"]),
        ("135M", ["needles"]),
        ("1.5B_n1", ["math_500"]),
    ],
)
def test_without_names_a_run_is_asked_its_own_task(preset: str, names: list[str]) -> None:
    assert default_names(resolve(preset).config) == names


def test_a_task_without_a_suite_asks_for_names() -> None:
    with pytest.raises(UserError, match="add --data-names"):
        default_names(resolve("135M_cpu", "sft").config)


def test_needles_are_the_trainings_held_out_ones() -> None:
    task = NeedlesConfig(filler_per_chunk=3)
    suite = Finder(limit=2, task=task).suite("needles@5")
    first, second = suite.load(count_words)
    assert (suite.name, suite.grading, suite.documents) == ("needles@5", "any_string", True)
    assert first == Needles(task, 7).heldout("test", 0, 5)
    assert first.answers[0] in " ".join(first.chunks)
    assert first.id != second.id
    assert Finder(limit=2, task=task).suite("needles").load(count_words)[0] == Needles(task, 7).heldout("test", 0)


def test_a_run_on_problems_is_asked_those_that_it_holds_out_as_it_is_asked_in_training(tmp_path: Path) -> None:
    rows = [
        {"query_id": f"q{n}", "prompt": f"What is {n} + 1?", "solutions": [rf"\boxed{{{n + 1}}}"]} for n in range(40)
    ]
    task = MathConfig(path=str(write(tmp_path / "p.jsonl", *rows)), eval_fraction=0.4)
    suite = Finder(limit=3, task=task).suite("math")
    tasks = suite.load(count_words)
    trained = Math(task, 1)
    assert [one.question for one in tasks] == [trained.heldout("test", n).question for n in range(3)]
    number = int(tasks[0].question.split()[2])
    assert tasks[0].answers == (str(number + 1),)

    tokenizer = byte_tokenizer()
    config = EvalConfig.model_validate(
        {"model_path": "m", "output_path": "o", "data_names": ["math"], "agent": {"max_final_tokens": 9}}
    )
    (prepared, *_) = make_reader(config, None, tokenizer, 512, suite).prepare(tasks)
    assert prepared.max_new_tokens == 9
    assert prepared.ids == SingleTurn(config.agent, tokenizer).prepare(tasks[0]).ids
    with pytest.raises(UserError, match=r"holds out of its problems.*aime24"):
        Finder(task=RecallConfig()).suite("math")


def test_a_run_without_held_out_problems_says_so(tmp_path: Path) -> None:
    row = {"query_id": "q", "prompt": "1+1", "solutions": [r"\boxed{2}"]}
    task = MathConfig(path=str(write(tmp_path / "p.jsonl", row)), eval_fraction=0.01)
    with pytest.raises(UserError, match=r"raise task\.eval_fraction"):
        Finder(task=task).suite("math").load(count_words)
