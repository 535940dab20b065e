"""Questions that are too long for the agent, or for the context window: asked and wrong, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evalparts import chat_checkpoint, problems_config, problems_file
from runs import ENVIRONMENT, REPOSITORY

from clusterkit.evaluate.answers import find_question, read_row, shown_question
from clusterkit.evaluate.pages import evaluation_page
from evaluation.config import EvalConfig
from evaluation.evaluate import evaluate
from evaluation.table import comparison_table
from tests.commandline import run_clusterkit
from trainer.errors import UserError

LIMIT = 100
LONG = "mini-i6"
"""Held out, as three others are."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("long") / "model", window=1024)


@pytest.fixture
def questions(mini_hotpotqa: Path) -> Path:
    """The small data set; one question is longer than the agent takes."""
    file = mini_hotpotqa / "questions.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["question"] += " So tell me!" * 5 * (row["id"] == LONG)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return mini_hotpotqa


def reading(model: Path, questions: Path, output: Path, limit: int = LIMIT, **changes: Any) -> EvalConfig:
    agent = {"chunk_tokens": 100, "max_question_tokens": limit, "max_memory_tokens": 4, "max_final_tokens": 4}
    values = {"model_path": str(model), "output_path": str(output), "data_names": ["ruler_hqa@3"], "agent": agent}
    values |= {"data_path": str(questions), "n_sampling": 1, "cache_dir": str(output / "cache")}
    return EvalConfig.model_validate({**values, **changes})


def results_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "results.json").read_text(encoding="utf-8"))


def test_a_question_too_long_for_the_agent_is_asked_and_wrong(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reading(model, questions, tmp_path / "out", methods=["memagent", "no_context"])

    place = evaluate(config)

    results = results_of(place)
    assert results["status"] == "complete"
    agent, bare = results["rows"]
    assert (agent["num_questions"], agent["answers"], agent["missing"]) == (4, 8, 0)
    assert (agent["too_long"], bare["too_long"]) == (1, 0)
    asked = agent["questions"][LONG]
    assert (asked["greedy"], asked["sampled"], asked["f1"], asked["too_long"]) == (0.0, 0.0, 0.0, True)
    assert agent["f1"][0]["questions"] == results["differences"][0]["questions"] == 4
    assert agent["greedy_length"] == 4, "it has no length of an answer"
    reason = f"task {LONG}: the question has 113 tokens and agent.max_question_tokens is {LIMIT}: raise it"
    note = f"ruler_hqa@3: questions that are too long: 1 of 4; they count as asked and wrong. The first: {reason}"
    assert (place / "table.txt").read_text(encoding="utf-8").endswith(f"\n\n{note}\n")
    assert note in capsys.readouterr().err
    assert note in evaluation_page(results, place)
    row = read_row(results, place, "ruler_hqa@3")
    assert f"--- answer greedy: wrong — {reason}" in shown_question(row, find_question(row, LONG))

    # Killed after two answers, and gone on with: the same, also where nothing is left to ask.
    for file in (tmp_path / "out").glob("records/*/samples.jsonl"):
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    assert results_of(evaluate(config))["rows"] == results["rows"]
    monkeypatch.setattr("evaluation.asking.open_engine", None)
    assert results_of(evaluate(config))["rows"] == results["rows"]


def test_checkpoints_are_compared_over_all_questions_and_it_is_told_for_which_of_them_some_were_too_long(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    before = evaluate(reading(model, questions, tmp_path / "then"))
    same = evaluate(reading(model, questions, tmp_path / "now", compare=[str(before)]))
    other = evaluate(reading(model, questions, tmp_path / "more", limit=200, compare=[str(before)]))
    unlimited = evaluate(reading(model, questions, tmp_path / "most", limit=200, compare=[str(other)]))

    for place, now in ((same, 1), (other, 0)):
        results = results_of(place)
        assert {(c["questions"], *c["too_long"]) for c in results["comparisons"]} == {(4, 1, now)}
        against = f"then/{before.name}"  # of both the model's name is the same
        told = (
            f"ruler_hqa@3: of 4 compared questions 1 were too long for {against} and {now} are now: they count as wrong"
        )
        assert (place / "table.txt").read_text(encoding="utf-8").count(told) == 1
        assert told in evaluation_page(results, place)
    assert "too long" not in comparison_table(results_of(unlimited)["comparisons"])


def test_an_answer_of_an_older_version_to_what_is_too_long_now_stays(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    config = reading(model, questions, tmp_path / "out", methods=["memagent"])
    evaluate(config)
    (file,) = (tmp_path / "out").glob("records/*/samples.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    older = [line for line in lines if (line["id"], line["sample"]) == (LONG, "greedy")]
    older[0].pop("too_long")  # its prompt was cut
    rest = [line for line in lines if line not in older]
    file.write_text("".join(json.dumps(line) + "\n" for line in older + rest), encoding="utf-8")

    (row,) = results_of(evaluate(config))["rows"]

    assert row["too_long"] == 1
    assert "questions that are too long: 1 of 4" in row["notes"][-1]


def test_where_all_questions_are_too_long_nothing_is_scored(model: Path, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^ruler_hqa@3: all 4 questions are too long\. The first: .*raise it$") as told:
        evaluate(reading(model, questions, tmp_path / "out", limit=9))

    assert told.value.exit_code == 2
    assert not list((tmp_path / "out").glob("*/results.json"))


@pytest.mark.parametrize("prompts", ["plain", "auto"])
def test_a_problem_that_leaves_no_room_in_the_window_costs_the_others_nothing(
    model: Path, tmp_path: Path, prompts: str
) -> None:
    data = problems_file(tmp_path)
    with data.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "long", "problem": "What is 1 + 1?" * 80, "answer": 2}) + "\n")

    place = evaluate(problems_config(model, data, tmp_path / "out", prompt_type=prompts))

    (row,) = results_of(place)["rows"]
    assert (row["num_questions"], row["answers"], row["missing"], row["too_long"]) == (4, 12, 0, 1)
    assert row["questions"]["long"] | {"too_long": True} == row["questions"]["long"]
    assert "tokens and the context window 1024: take a model" in row["notes"][0]


def test_a_pipe_gets_every_question_counted_and_the_note_beside_it(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    config = reading(model, questions, tmp_path / "out")
    words = ["--model-path", config.model_path, "--data-names", "ruler_hqa@3", "--data-path", config.data_path]
    words += ["--out", config.output_path, "--cache-dir", config.cache_dir, "--here", "--no-progress"]
    for key in ("chunk_tokens", "max_question_tokens", "max_memory_tokens", "max_final_tokens"):
        words += ["--set", f"agent.{key}={getattr(config.agent, key)}"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}

    for _ in range(2):  # the second answers from the record
        done = run_clusterkit("eval", *words, cwd=tmp_path, env=environment)

        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1].split("\t")[1] == "4"
        assert "ruler_hqa@3: questions that are too long: 1 of 4; they count as asked and wrong" in done.stderr
