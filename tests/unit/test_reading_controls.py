"""Controls beside the memory agent: what each is shown, whose questions are asked, intervals of known answer."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from builders import ScriptedEngine, byte_tokenizer
from conftest import mini_hotpotqa_rows, write_jsonl

from evaluation import table
from evaluation.agent_reader import AgentReader
from evaluation.config import EvalConfig
from evaluation.grade import qa_verdict
from evaluation.intervals import ROUNDS, bootstrap, compare, f1_by_form, f1_differences
from evaluation.methods import best_paragraphs, document_of, make_reader
from evaluation.plan import make_rows, row_inputs
from evaluation.record import GREEDY, RowRecord, text_sha
from evaluation.results import row_results
from evaluation.suites import Finder
from evaluation.suites.hqa import build_items
from trainer.agents.base import RolloutOptions
from trainer.errors import UserError
from trainer.types import Task

WINDOW = 4000
AGENT = {"chunk_tokens": 300, "max_question_tokens": 200, "max_memory_tokens": 40, "max_final_tokens": 20}


def config(**changes: Any) -> EvalConfig:
    values = {"model_path": "m", "output_path": "o", "data_names": ["ruler_hqa@12"], "agent": AGENT}
    return EvalConfig.model_validate({**values, "rag_top_k": 2, **changes})


def reader_of(folder: Path, method: Any, window: int = WINDOW, **changes: Any) -> tuple[Any, list[Task]]:
    suite = Finder(str(folder)).suite("ruler_hqa@12")
    return make_reader(config(**changes), method, byte_tokenizer(), window, suite), suite.load(len)


def documents_in(text: str) -> list[str]:
    """Numbers of the documents that are shown, as they stand there."""
    return [line.removeprefix("Document ").rstrip(":") for line in text.split("\n") if line.startswith("Document ")]


def rollout(reader: AgentReader, prepared: Any, options: RolloutOptions) -> tuple[list[str], str]:
    """Every prompt that is sent, where each memory says something of its own, and the answer."""
    tokenizer, stop = reader.tokenizer, byte_tokenizer().eos_token_id
    said = [tokenizer(f"note {n}", add_special_tokens=False)["input_ids"] + [stop] for n in range(40)]
    engine = ScriptedEngine(said, stop)
    trajectory = asyncio.run(reader.answer(prepared, engine, options))
    return [tokenizer.decode(prompt) for prompt in engine.prompts], trajectory.answer_text


GREEDILY = RolloutOptions(0.0, lambda turn: turn)


@pytest.mark.parametrize("reader", ["prompt", "agent"])
def test_gold_and_rag_show_those_documents_alone(mini_hotpotqa: Path, reader: str) -> None:
    for method in ("gold", "rag"):
        asked, tasks = reader_of(mini_hotpotqa, method, reader=reader, agent={**AGENT, "chunk_tokens": 1000})
        for task, prepared in zip(tasks, asked.prepare(tasks), strict=True):
            prompt = asked.first_prompt(prepared)
            numbers = str(task.meta["gold_documents"]).split()
            wanted = numbers if method == "gold" else documents_in("\n".join(best_paragraphs(task, 2)))
            assert documents_in(prompt) == wanted
            assert ("Updated memory:" in prompt) == (reader == "agent")


def test_the_agent_reads_what_was_found_and_answers_from_its_memory(mini_hotpotqa: Path) -> None:
    asked, tasks = reader_of(mini_hotpotqa, "gold", reader="agent", agent={**AGENT, "chunk_tokens": 60})
    prompts, answer = rollout(asked, asked.prepare(tasks)[0], GREEDILY)
    assert len(prompts) > 2
    assert f"<memory>\nnote {len(prompts) - 2}\n</memory>\n\nYour answer:" in prompts[-1]
    assert answer == f"note {len(prompts) - 1}"


def test_the_full_context_is_one_section_of_what_the_window_allows(mini_hotpotqa: Path) -> None:
    whole, tasks = reader_of(mini_hotpotqa, "long_context", reader="agent")
    prompts, _ = rollout(whole, whole.prepare(tasks)[0], GREEDILY)
    assert len(prompts) == 2
    assert document_of(tasks[0]) in prompts[0]

    window = 1200
    cut, tasks = reader_of(mini_hotpotqa, "long_context", window, reader="agent")
    prepared = cut.prepare(tasks)[0]
    (section,) = prepared.chunks
    document = document_of(tasks[0])
    shown = cut.tokenizer.decode(section)
    assert prepared.dropped_tokens == len(document) - len(shown) > 0
    assert document.startswith(shown[:200])
    assert document.endswith(shown[-200:])
    prompts, _ = rollout(cut, prepared, GREEDILY)
    spare = AGENT["max_question_tokens"] - len(tasks[0].question)
    spare += AGENT["max_memory_tokens"] - len(cut.agent.prompts.no_memory)
    assert len(prompts[0]) + AGENT["max_memory_tokens"] + spare == window


def test_a_blank_memory_answers_what_the_agent_answers_whose_memory_is_blanked(mini_hotpotqa: Path) -> None:
    blank, tasks = reader_of(mini_hotpotqa, "blank_memory")
    whole, _ = reader_of(mini_hotpotqa, "memagent")
    prepared = blank.prepare(tasks)[0]
    prompts, _ = rollout(blank, prepared, GREEDILY)
    read, _ = rollout(whole, whole.prepare(tasks)[0], RolloutOptions(0.0, lambda turn: turn, blank_memory=True))
    assert prompts == [read[-1]]
    assert len(read) > 2
    assert blank.first_prompt(prepared) == prompts[0]


def test_what_an_agent_cannot_do_is_refused(mini_hotpotqa: Path) -> None:
    single = {"name": "single_turn", "max_final_tokens": 20}
    for method, said in (("blank_memory", "--methods blank_memory"), ("rag", "reader=agent with --methods rag")):
        with pytest.raises(UserError, match=rf"{said} is for checkpoints of agent\.name=memagent"):
            reader_of(mini_hotpotqa, method, agent=single, reader="agent")
    with pytest.raises(UserError, match="over the model's context window"):
        reader_of(mini_hotpotqa, "long_context", 400, reader="agent")
    gold, _ = reader_of(mini_hotpotqa, "gold")
    with pytest.raises(UserError, match="not known which documents hold the answer"):
        gold.prepare([Task("t", "Q?", ("A",), "Document 1:\nT\nA")])
    odd = Task("t", "Q?", ("A",), "Document 1:\nT\nA", meta={"num_documents": 2, "gold_documents": "1"})
    with pytest.raises(UserError, match="cannot be told apart"):
        gold.prepare([odd])


def test_the_reader_is_part_of_what_defines_an_answer_and_of_the_rows_name(mini_hotpotqa: Path, tmp_path: Path) -> None:
    def named(**changes: Any) -> dict[str, str]:
        asked = config(methods=["memagent", "rag", "gold"], data_path=str(mini_hotpotqa), **changes)
        rows = make_rows(asked.model_copy(update={"output_path": str(tmp_path)}), "sha", "embedded")
        return {row.name: row.record.hash for row in rows}

    by_prompt, by_agent = named(), named(reader="agent")
    assert list(by_prompt) == ["ruler_hqa@12", "ruler_hqa@12 rag", "ruler_hqa@12 gold"]
    assert list(by_agent) == ["ruler_hqa@12", "ruler_hqa@12 rag reader=agent", "ruler_hqa@12 gold reader=agent"]
    assert by_prompt["ruler_hqa@12"] == by_agent["ruler_hqa@12"]
    assert not set(list(by_prompt.values())[1:]) & set(list(by_agent.values())[1:])
    suite = Finder(str(mini_hotpotqa)).suite("ruler_hqa@12")
    assert "reader" not in row_inputs(config(), suite, "rag", "sha", "embedded")  # answers of before are found again


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder as `data prepare reading` makes it: eight questions for training, two each for dev and test."""
    questions, documents = mini_hotpotqa_rows()
    for split, numbers in (("train", range(8)), ("dev", range(8, 10)), ("test", range(10, 12))):
        own = {f"{kind}{n}" for kind in "ptr" for n in numbers} | {f"x{len(split) % 4}"}
        folder = tmp_path / "prepared" / split
        folder.mkdir(parents=True)
        write_jsonl(folder / "questions.jsonl", [questions[n] for n in numbers])
        write_jsonl(folder / "documents.jsonl", [d for d in documents if d["id"] in own])
    return tmp_path / "prepared"


def test_dev_and_test_are_pooled_each_with_documents_of_its_own(prepared: Path) -> None:
    both = build_items(prepared, 6, split="dev+test")
    test, dev = build_items(prepared, 6, split="test"), build_items(prepared, 6, split="dev")
    assert {item.id for item in both} == {f"mini-i{n}" for n in (8, 9, 10, 11)}
    assert sorted([*dev, *test], key=lambda item: item.id) == sorted(both, key=lambda item: item.id)
    assert build_items(prepared, 6) == test  # what is asked without a choice
    lines = (prepared / "dev" / "documents.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    for item in dev:
        assert all(part.split("\n")[2] in texts for part in item.context.split("\n\n"))
    with pytest.raises(UserError, match=r"prepared/dev, its own split, has 7 different documents: ask for at most 7"):
        build_items(prepared, 8, split="dev+test")


def test_a_split_is_part_of_the_data_and_of_ruler_hqa_alone(prepared: Path) -> None:
    usual, both = (Finder(str(prepared), split=split).suite("ruler_hqa@4") for split in ("usual", "dev+test"))
    assert "split" not in usual.identity
    assert both.identity["split"] == "dev+test"
    assert set(both.identity["files"]) > set(usual.identity["files"])
    with pytest.raises(UserError, match=r"split=dev is for ruler_hqa and ruler_qa: leave recall@4 out"):
        Finder(str(prepared), split="dev").suites(["ruler_hqa@4", "recall@4"])


def binomial_quantile(share: float, count: int) -> int:
    """Smallest number of heads that so large a share of throws of a fair coin does not exceed."""
    total = 0.0
    for heads in range(count + 1):
        total += math.comb(count, heads) / 2**count
        if total >= share:
            return heads
    return count


def test_bootstrap_of_right_and_wrong_is_the_binomial() -> None:
    low, high = bootstrap([0.0, 1.0] * 50)
    assert (low, high) == (binomial_quantile(0.025, 100) / 100, binomial_quantile(0.975, 100) / 100) == (0.4, 0.6)
    assert bootstrap([0.0, 1.0] * 50) == (low, high)
    assert bootstrap([0.3] * 9) == pytest.approx((0.3, 0.3))
    assert all(math.isnan(bound) for bound in bootstrap([]))


def test_an_interval_of_thousands_of_questions_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        low, high = bootstrap([0.0, 1.0] * 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 2000**0.5, abs=2e-3)
    assert high == pytest.approx(0.5 + 1.96 * 0.5 / 2000**0.5, abs=2e-3)
    assert peak < 3 * 2000 * ROUNDS  # bytes


def qa_row(root: Path, name: str, answers: dict[str, str]) -> dict[str, Any]:
    """A row as an evaluation makes it, of answers to span questions with the gold answer "red boat", and n… to no."""
    record = RowRecord(root, name, {"suite": name}, {"grading": "qa"})
    truths = {q: "no" if q.startswith("n") else "red boat" for q in answers}
    forms = {q: "yes_no" if truths[q] == "no" else "span" for q in answers}
    record.begin({}, [{"id": q, "question": q, "answers": [truths[q]], "meta": {"form": forms[q]}} for q in answers])
    for q, answer in answers.items():
        text = rf"\boxed{{{answer}}}"
        line = {"id": q, "sample": GREEDY}
        record.samples.append({**line, "text": text, "length": 3, "finish": "stop", "counters": {}})
        score, found, reason, metrics = qa_verdict(text, [truths[q]])
        verdict = {"right": score > 0, "score": score, "answer": found, "reason": reason, "metrics": metrics}
        record.verdicts.append({**line, "text_sha": text_sha(text), **verdict})
    record.close()
    row = row_results(record, name, list(answers), True, 0) | {"suite": "s"}
    return {**row, "f1": f1_by_form(row["questions"])}


def test_f1_is_told_by_form_and_as_a_paired_difference(tmp_path: Path) -> None:
    spans = {f"s{n}": "boat" if n % 2 else "red boat" for n in range(20)}  # F1 2/3 and 1
    memory = qa_row(tmp_path, "memory", {**spans, "n0": "no", "n1": "yes"})
    other = qa_row(tmp_path, "other", {**dict.fromkeys(spans, "ship"), "n0": "no", "n1": "no"})
    everything, span, yes_no = memory["f1"]
    assert (everything["questions"], span["questions"], yes_no["questions"]) == (22, 20, 2)
    assert (span["f1"], span["em"], yes_no["f1"]) == (pytest.approx(5 / 6), 0.5, 0.5)
    assert span["interval"][0] < 5 / 6 < span["interval"][1]

    (difference,) = f1_differences([memory, other])
    assert (difference["dataset"], difference["less"]) == ("memory", "other")
    assert difference["difference"] == pytest.approx((20 * 5 / 6 - 1) / 22)
    assert difference["interval"][0] > 0
    shown = table.f1_table([memory, other]) + table.difference_table([difference])
    assert "yes_no" in shown
    assert "+71.2" in shown

    # Against an earlier evaluation of the same row: paired, so two equal ones differ by nothing at all.
    by_measure = {found["measure"]: found for found in compare({"rows": [memory]}, {"rows": [memory]}, "earlier")}
    assert by_measure["f1"]["interval"] == [0.0, 0.0]
    assert " 0.0 … 0.0 " in table.comparison_table(list(by_measure.values()))


def test_without_recorded_forms_all_questions_stand_together(tmp_path: Path) -> None:
    row = qa_row(tmp_path, "spans", {"s0": "red boat", "s1": "ship"})
    assert [one["form"] for one in row["f1"]] == ["all"]


def test_bm25_leaves_the_gpus_to_servers_where_jax_is_installed(tmp_path: Path) -> None:
    """A stand-in for JAX, which would take three quarters of a GPU: what it is told when it is imported."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nprint('jax on', os.environ.get('JAX_PLATFORMS'))\n")
    (package / "lax.py").write_text("def top_k(values, k):\n    return values[:k], list(range(k))\n")
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    looks = "from trainer.agents import ways; from trainer.types import Task; ways.best_paragraphs(Task(*'abc'), 1)"
    done = subprocess.run(
        [sys.executable, "-c", looks],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "PYTHONPATH": search},
    )
    assert set(done.stdout.splitlines()) == {"jax on cpu"}
