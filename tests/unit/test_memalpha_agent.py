"""The structured memory's agent: prompts that shrink, exact ids, chunks that are too long, models without tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from builders import ScriptedEngine, byte_tokenizer

from trainer.agents.base import RolloutOptions
from trainer.agents.memalpha import MemAlpha
from trainer.agents.memory import Memory
from trainer.config_agents import MemalphaAgentConfig
from trainer.errors import UserError
from trainer.types import Task, Trajectory

QWEN_LIKE = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def agent(tokenizer: Any = None, **changes: Any) -> MemAlpha:
    settings = {"name": "memalpha", "chunk_tokens": 200, "max_memory_tokens": 300, "context_tokens": 6000}
    return MemAlpha(MemalphaAgentConfig.model_validate({**settings, **changes}), tokenizer or byte_tokenizer())


def run(one: MemAlpha, responses: list[str], *chunks: str) -> tuple[Trajectory, ScriptedEngine]:
    stop = one.tokenizer.eos_token_id
    engine = ScriptedEngine([[*one.tokenizer(text)["input_ids"], stop] for text in responses], stop)
    prepared = one.prepare(Task("t", "q", ("a",), chunks=chunks))
    options = RolloutOptions(1.0, lambda turn: turn)
    return asyncio.run(one.rollout(prepared, engine, options)), engine


def insert(content: str) -> str:
    call = {"name": "new_memory_insert", "arguments": {"memory_type": "semantic", "content": content}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_every_chunk_is_a_turn_with_the_ids_that_were_sent_and_sampled() -> None:
    one = agent()
    responses = [insert("Ada is a painter") + insert("Ada is a painter"), "Done"]
    trajectory, engine = run(one, responses, "Ada paints.", "Rain fell.")

    assert [turn.prompt_ids for turn in trajectory.turns] == engine.prompts
    assert [
        one.tokenizer.decode(t.completion.token_ids, skip_special_tokens=True) for t in trajectory.turns
    ] == responses
    prompts = [one.tokenizer.decode(ids) for ids in engine.prompts]
    assert "Ada paints." in prompts[0]
    assert "[sem_0001] Ada is a painter" not in prompts[0]
    assert "[sem_0001] Ada is a painter" in prompts[1]
    assert "Rain fell." in prompts[1]
    assert trajectory.details["memory"]["semantic"] == {"sem_0001": "Ada is a painter"}
    assert [call["ok"] for call in trajectory.details["turns"][0]["calls"]] == [True, False]  # a duplicate
    assert trajectory.counters["tool_calls"] == 2
    assert trajectory.counters["failed_tool_calls"] == 1


def test_the_prompt_stays_within_its_context_and_says_that_it_shows_less(caplog: pytest.LogCaptureFixture) -> None:
    one = agent(context_tokens=4000, max_memory_tokens=300)
    responses = [insert(f"entry {number}: " + "x" * 200) for number in range(12)]
    trajectory, engine = run(one, responses, *(f"chunk {number}" for number in range(12)))

    assert max(map(len, engine.prompts)) + 300 <= 4000
    assert trajectory.counters["shrunk_prompts"] > 0
    assert "shows less" in caplog.text
    last = one.tokenizer.decode(engine.prompts[-1])
    assert "entry 10:" in last  # the newest are shown
    assert "entry 0:" not in last
    assert "of 11 entries" in last
    assert len(trajectory.details["memory"]["semantic"]) == 12  # and nothing is lost


def test_a_core_text_that_fills_the_context_alone_is_cut_in_the_prompt() -> None:
    one = agent(context_tokens=3500, core_tokens=3000)
    prompt = one.prompts.fill(Memory(core="y" * 3000), one.tokenizer("chunk")["input_ids"])

    assert prompt.shrunk
    assert len(prompt.ids) + 300 <= 3500


def test_a_chunk_longer_than_its_limit_is_read_in_several_turns_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    trajectory, engine = run(agent(), ["Done"] * 4, "z" * 500, "short")

    assert len(engine.prompts) == 4
    assert trajectory.counters["split_chunks"] == 1
    assert "read in several turns" in caplog.text


def test_a_context_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(UserError, match=r"agent\.context_tokens=1000 is too small.*lower agent\.chunk_tokens"):
        agent(context_tokens=1000)


def test_a_task_without_text_is_refused() -> None:
    with pytest.raises(UserError, match="has no text to read"):
        agent().prepare(Task("empty", "q", ("a",), context=""))


def test_marks_of_the_chat_template_in_a_document_open_no_message() -> None:
    one = agent()
    chunk = one.prepare(Task("t", "q", ("a",), chunks=("before <eos> after",))).chunks[0]

    assert one.tokenizer.eos_token_id not in chunk
    assert one.tokenizer.decode(chunk) == "before <eos> after"


def test_tools_stand_in_the_template_where_it_knows_them_else_in_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    knows = byte_tokenizer()
    knows.chat_template = QWEN_LIKE
    _, engine = run(agent(knows), ["Done"], "text")
    assert knows.decode(engine.prompts[0]).startswith("# Tools")
    assert not caplog.text

    plain = byte_tokenizer()
    _, engine = run(agent(plain), ["Done"], "text")
    assert "Tools (JSON schema):" in plain.decode(engine.prompts[0])
    assert "knows no tools" in caplog.text
    with pytest.raises(UserError, match=r"set agent\.tool_format=json"):
        agent(plain, tool_format="chat")


def test_a_model_without_a_chat_template_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(UserError, match="needs a tokenizer with a chat template"):
        agent(tokenizer)
