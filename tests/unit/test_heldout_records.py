"""What a run records of held-out tasks: sections, memories and evidence of the real agents and tasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from builders import ScriptedEngine, byte_tokenizer, small_parts
from heldout_writer import careful, forgetful, write_heldout

from clusterkit.runs.trace.source import read_groups
from trainer.agents.base import RolloutOptions
from trainer.agents.memagent import MemAgent
from trainer.agents.memalpha import MemAlpha
from trainer.config_agents import MemagentConfig, MemalphaAgentConfig
from trainer.config_tasks import HotpotqaConfig, NeedlesConfig
from trainer.tasks.hotpotqa import HotpotQA
from trainer.tasks.needles import Needles
from trainer.types import Evidence, Task, Trajectory


def records(logs: Path, name: str) -> list[dict[str, Any]]:
    return [group[0] for group in read_groups(logs / "rollouts" / f"eval_{name}.jsonl.zst").values()]


def rolled_out(agent: Any, task: Task, *responses: str) -> Trajectory:
    tokenizer = agent.tokenizer
    engine = ScriptedEngine([[*tokenizer(r)["input_ids"], tokenizer.eos_token_id] for r in responses], 0)
    return asyncio.run(agent.rollout(agent.prepare(task), engine, RolloutOptions(0.0, lambda turn: turn)))


def test_before_and_after_have_the_same_first_tasks_with_every_section_and_its_memory(
    tmp_path: Path, mini_hotpotqa: Path
) -> None:
    tasks = write_heldout(tmp_path, mini_hotpotqa, "before", forgetful)
    write_heldout(tmp_path, mini_hotpotqa, "after", careful)

    before, after = records(tmp_path, "before"), records(tmp_path, "after")
    assert [one["task_id"] for one in before] == [one["task_id"] for one in after] == [task.id for task in tasks]
    for task, old, new in zip(tasks, before, after, strict=True):
        assert "".join(one["text"] for one in new["sections"]) == task.context
        assert {one["memory"] for one in old["sections"]} == {"Nothing useful so far."}
        assert task.answers[0] in new["sections"][-1]["memory"]
        assert [one["sentence"] for one in new["evidence"]] == [one.sentence for one in task.evidence]
        assert (old["scores"]["f1"], new["scores"]["f1"]) == (0.0, 1.0)
        assert new["answers"] == list(task.answers)
        assert new["turns"][0]["prompt_ids"]  # as of a step


def test_only_the_first_tasks_are_kept_and_none_where_that_is_asked_for(tmp_path: Path, mini_hotpotqa: Path) -> None:
    tasks = write_heldout(tmp_path / "one", mini_hotpotqa, "before", forgetful, count=1)
    write_heldout(tmp_path / "none", mini_hotpotqa, "before", forgetful, count=0)

    assert [one["task_id"] for one in records(tmp_path / "one", "before")] == [tasks[0].id]
    assert not (tmp_path / "none" / "rollouts").exists()


def test_the_end_of_an_earlier_run_of_the_name_does_not_stay(tmp_path: Path, mini_hotpotqa: Path) -> None:
    write_heldout(tmp_path, mini_hotpotqa, "after", careful)
    write_heldout(tmp_path, mini_hotpotqa, "before", forgetful)

    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["eval_before.jsonl.zst"]


@pytest.mark.parametrize(("empty_memory", "second"), [("keep", "kept"), ("clear", "")])
def test_a_memory_that_was_not_written_is_the_one_that_the_agent_went_on_with(empty_memory: str, second: str) -> None:
    limits = {"chunk_tokens": 4, "max_memory_tokens": 20, "max_question_tokens": 9, "max_final_tokens": 9}
    agent = MemAgent(MemagentConfig.model_validate({**limits, "empty_memory": empty_memory}), byte_tokenizer())
    task = Task("t", "why?", ("a",), context="abcdefghi")
    trajectory = rolled_out(agent, task, "kept", "", "last", "answer")

    read = agent.sections_read(task, trajectory)
    assert [(one.text, one.memory) for one in read] == [("abcd", "kept"), ("efgh", second), ("i", "last")]
    failed = agent.sections_read(task, Trajectory("t", trajectory.turns[:1], 0.0, error="lost"))
    assert [one.memory for one in failed] == ["kept", None, None]


def test_an_agent_that_cannot_tell_what_it_read_ends_no_run(
    tmp_path: Path, mini_hotpotqa: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MemAgent, "sections_read", lambda *_: 1 / 0)
    write_heldout(tmp_path, mini_hotpotqa, "before", careful)

    assert [one["sections"] for one in records(tmp_path, "before")] == [None, None]
    assert "sections_read of MemAgent failed: ZeroDivisionError" in caplog.text


def test_a_structured_memory_is_known_after_every_section() -> None:
    def insert(content: str) -> str:
        call = {"name": "new_memory_insert", "arguments": {"memory_type": "semantic", "content": content}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    config = MemalphaAgentConfig(chunk_tokens=100, max_memory_tokens=300, context_tokens=6000)
    agent = MemAlpha(config, byte_tokenizer())
    task = Task("t", "bako", ("lamp",), chunks=("bako lamp .", "kigo honey ."))
    trajectory = rolled_out(agent, task, insert("bako lamp"), insert("kigo honey"))

    read = agent.sections_read(task, trajectory)
    assert [one.text for one in read] == ["bako lamp .", "kigo honey ."]
    assert [one.memory for one in read] == ["bako lamp", "bako lamp\nkigo honey"]
    assert list(trajectory.details["memory"]["semantic"].values()) == ["bako lamp", "kigo honey"]


def test_generated_tasks_say_which_sentence_tells_the_answer() -> None:
    for source in (small_parts().source, Needles(NeedlesConfig(), 1)):
        for index in range(20):
            task = source.heldout("test", index)
            (told,) = task.evidence
            assert told.sentence in task.chunks[int(task.meta["gold_chunk"])]
            assert task.answers[0] in told.sentence


def test_the_sentences_that_the_data_name_are_the_evidence_and_else_those_of_the_rule(mini_hotpotqa: Path) -> None:
    def evidence(named: Any) -> tuple[Evidence, ...]:
        path = mini_hotpotqa / "questions.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"evidence": named}) + "\n" for row in rows))
        source = HotpotQA(HotpotqaConfig(path=str(mini_hotpotqa), num_documents=4), 1)
        return source.heldout("test", 0).evidence

    by_rule = (
        Evidence("Kit Lark", "Kit Lark is a painter who was born in Kelmar."),
        Evidence("Kelmar", "Kelmar is a town on the river Yarrow."),
    )
    assert evidence(["born in Kelmar", "river Yarrow"]) == (
        Evidence("Kit Lark", "born in Kelmar"),
        Evidence("Kelmar", "river Yarrow"),
    )
    for not_of_ours in ("text", ["one"], [1, 2], ["", "x"], None):
        assert evidence(not_of_ours) == by_rule
