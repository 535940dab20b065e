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
from evaluation.suites import Finder
from evaluation.table import memory_table
from trainer.agents.memagent import RolloutOptions
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
    rows = [
        {"dataset": "memalpha-squad", "greedy_acc": 0.5, "memory_tokens": 100.0},
        {"dataset": "memalpha-booksum", "greedy_acc": 0.25, "memory_tokens": 300.0},
        {"dataset": "memalpha-squad rag", "greedy_acc": 0.9},
    ]
    text = memory_table(rows)

    assert [cell.strip() for cell in text.splitlines()[-2].split("|")[1:-1]] == ["average", "37.5", "200"]
    assert "squad rag" not in text
    assert memory_table(rows[2:]) == ""
