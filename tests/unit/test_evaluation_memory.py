"""Evaluation of structured memories: a row for every source, a text read once, scores by the source's own rule."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from builders import ScriptedEngine, byte_tokenizer

from evaluation.config import EvalConfig
from evaluation.grade import Grader
from evaluation.memory import StructuredMemory
from evaluation.methods import make_reader
from evaluation.plan import row_inputs
from evaluation.suites import Finder
from evaluation.table import memory_table
from trainer.agents.base import RolloutOptions
from trainer.config_tasks import HotpotqaConfig, MemalphaConfig, RecallConfig, TaskConfig
from trainer.errors import UserError
from trainer.types import Task

AGENT = {"name": "memalpha", "chunk_tokens": 200, "max_memory_tokens": 300, "context_tokens": 6000}


def config(**changes: Any) -> EvalConfig:
    given = {"model_path": "m", "output_path": "o", "data_names": ["facts"]}
    return EvalConfig.model_validate({**given, "agent": AGENT, "judge": {"reader": "rules"}, **changes})


def row(name: str, source: str, *questions: tuple[str, str]) -> dict[str, Any]:
    pairs = [{"question": q, "answer": a} for q, a in questions]
    chunks = ["bako lamp .", "dilu chair ."]
    return {"instance_id": name, "data_source": source, "chunks": chunks, "questions_and_answers": pairs}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lamp, chair = ("bako", "lamp"), ("dilu", "chair")
    rows = [row("a", "squad", lamp, chair), row("b", "lme_train", lamp), row("c", "squad", lamp)]
    (tmp_path / "train.jsonl").write_text(json.dumps(row("x", "squad", ("q", "a"))) + "\n")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return tmp_path


def test_every_source_of_the_test_file_is_a_row(data: Path) -> None:
    suites = Finder(str(data)).suites(["memalpha"])

    assert [suite.name for suite in suites] == ["memalpha-lme_train", "memalpha-squad"]
    tasks = suites[1].load(len)
    assert [task.id for task in tasks] == ["a-q0", "a-q1", "c-q0"]
    assert tasks[0].answers == ("lamp",)
    assert len(Finder(str(data), limit=1).suites(["memalpha"])[1].load(len)) == 2  # the questions of one text


def test_data_of_memories_lie_where_they_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(folder: str, source: str, name: str = "test") -> Path:
        path = tmp_path / folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(row("x", source, ("q", "a"))) + "\n")
        return path.parent

    def found(data: str, task: TaskConfig | None = None) -> str:
        (suite,) = Finder(data, str(tmp_path / "cache"), task=task or RecallConfig()).suites(["memalpha"])
        return suite.rule

    alone, within = put("alone", "squad"), put("shelf/memalpha/data", "booksum", "train").parents[1]
    own, usual = put("own", "perltqa"), put("usual/memalpha", "recsys").parent
    monkeypatch.setenv("CLUSTERKIT_DATA", str(usual))
    assert found(str(alone)) == found(str(alone / "test.jsonl")) == "squad"
    assert found(str(within)) == "booksum"
    assert found("", MemalphaConfig(path=str(own))) == "perltqa"
    assert found(str(tmp_path / "cache"), MemalphaConfig(path=str(own))) == "perltqa"  # nothing in --data-path
    assert found("", HotpotqaConfig(path=str(own))) == "recsys"  # another task's path is no place for these
    monkeypatch.delenv("CLUSTERKIT_DATA")
    with pytest.raises(UserError, match=r"no Mem-alpha data.*clusterkit data prepare memalpha"):
        found("")


def test_a_text_is_read_once_for_all_of_its_questions(data: Path) -> None:
    tokenizer = byte_tokenizer()
    stop = tokenizer.eos_token_id
    call = {"name": "new_memory_insert", "arguments": {"memory_type": "semantic", "content": "bako lamp"}}
    said = [f"<tool_call>{json.dumps(call)}</tool_call>", "Done"]
    engine = ScriptedEngine([[*tokenizer(text)["input_ids"], stop] for text in said], stop)
    reader = StructuredMemory(config(), tokenizer, 8000)
    first, second, _ = reader.prepare(Finder(str(data)).suites(["memalpha"])[1].load(len))

    async def ask() -> list[str]:
        options = RolloutOptions(0.0, lambda turn: turn)
        answers = await asyncio.gather(*(reader.answer(one, engine, options) for one in (first, second)))
        assert answers[0].counters["memory_tokens"] == len(tokenizer("bako lamp")["input_ids"])
        return [one.answer_text for one in answers]

    assert asyncio.run(ask()) == ["lamp", ""]
    assert len(engine.prompts) == 2


def test_a_suite_with_a_question_for_each_document_is_refused() -> None:
    with pytest.raises(UserError, match=r"does not know the question while it reads.*agent\.name=memagent"):
        StructuredMemory(config(), byte_tokenizer(), 8000).prepare([Task("t", "q", ("a",), chunks=("x",))])


def test_documents_need_a_reader_with_a_model() -> None:
    with pytest.raises(UserError, match=r"clusterkit serve judge.*judge\.url="):
        StructuredMemory(config(judge={"reader": "server"}), byte_tokenizer(), 8000)


@pytest.mark.parametrize(
    ("sample", "truths", "score"),
    [
        ({"text": "It is PARIS.", "rule": "squad"}, ["paris"], 1.0),
        ({"text": r"\boxed{3}", "rule": "pubmed-rct"}, ["3"], 1.0),
        ({"text": "tennis", "rule": "perltqa"}, ["tennis;golf"], 0.5),
        ({"text": "whatever", "rule": "lme_train", "agrees": True}, ["x"], 1.0),
        ({"text": "x", "rule": "lme_train", "agrees": None}, ["x"], 0.0),
    ],
)
def test_answers_are_graded_by_their_source(sample: dict[str, Any], truths: list[str], score: float) -> None:
    grader = Grader(config(), None)
    verdict = asyncio.run(grader.verdict("source", truths, {"id": "q", "sample": "greedy", **sample}))

    assert verdict["score"] == score
    assert verdict["right"] == (score == 1.0)


def test_the_table_has_score_and_length_by_source_and_their_means() -> None:
    squad, books = {"suite": "memalpha-squad"}, {"suite": "memalpha-booksum"}
    kept = {"method": "memagent", "memory_tokens": 100.0}
    rows = [
        {"dataset": "memalpha-squad", "greedy_acc": 0.5, **squad, **kept},
        {"dataset": "memalpha-booksum", "greedy_acc": 0.25, **books, **kept, "memory_tokens": 300.0},
        {"dataset": "memalpha-squad rag", "greedy_acc": 0.9, "method": "rag", **squad},
        {"dataset": "ruler_hqa@50 rag", "greedy_acc": 0.1, "method": "rag", "suite": "ruler_hqa@50"},
    ]
    text = memory_table(rows)

    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert cells[3:] == [["memalpha-squad rag", "90.0", "-"], ["average", "37.5", "200"], ["average rag", "90.0", "-"]]
    assert "ruler" not in text
    assert memory_table(rows[2:]) == ""


def test_the_judge_is_asked_about_a_baselines_answers_too(data: Path) -> None:
    tokenizer = byte_tokenizer()
    stop = tokenizer.eos_token_id
    engine = ScriptedEngine([[*tokenizer(text)["input_ids"], stop] for text in ("The lamp.", "lamp")], stop)
    (suite, _) = Finder(str(data)).suites(["memalpha"])
    reader = make_reader(config(), "long_context", tokenizer, 8000, suite)
    (prepared,) = reader.prepare(suite.load(len))

    async def agrees() -> object:
        return (await reader.answer(prepared, engine, RolloutOptions(0.0, lambda turn: turn))).details["agrees"]

    assert [asyncio.run(agrees()), asyncio.run(agrees())] == [False, True]  # the rules want the gold answer's words
    wanted = row_inputs(config(), suite, "rag", "checkpoint", "embedded")
    assert wanted["judge"]["reader"] == "rules"


def test_the_agent_of_one_text_cuts_chunks_anew_that_are_too_long_for_it(data: Path) -> None:
    tokenizer = byte_tokenizer()
    given = {"name": "memagent", "chunk_tokens": 8, "max_memory_tokens": 4, "max_final_tokens": 4}
    engine = ScriptedEngine([tokenizer("abc")["input_ids"] + [tokenizer.eos_token_id]] * 9, tokenizer.eos_token_id)
    suite = Finder(str(data)).suites(["memalpha"])[1]
    reader = make_reader(config(agent=given), "memagent", tokenizer, 8000, suite)
    prepared = reader.prepare(suite.load(len))[0]
    assert max(map(len, prepared.chunks)) <= 8
    answer = asyncio.run(reader.answer(prepared, engine, RolloutOptions(0.0, lambda turn: turn)))
    assert answer.counters["memory_tokens"] == 3
