"""The memory agent's loop: what is sent in which turn. Where responses are scripted, a fake engine gives them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from builders import RecordingEngine, ScriptedEngine, byte_tokenizer, small_parts

from trainer.agents.base import RolloutOptions, split_chunks
from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig
from trainer.rollout.batch import make_batch
from trainer.types import Task, Trajectory
from trainer.warmup.tiny import make_tokenizer

WORDS = [f"w{i}" for i in range(60)]
TOKENIZER = make_tokenizer([*WORDS, "none", "q"])
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    found = list(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    assert TOKENIZER.pad_token_id not in found, "a word of the test is not in the vocabulary"
    return found


def make_agent(**settings: object) -> MemAgent:
    limits = {"chunk_tokens": 4, "max_question_tokens": 3, "max_memory_tokens": 5, "max_final_tokens": 6}
    return MemAgent(MemagentConfig.model_validate({"template": "words", **limits, **settings}), TOKENIZER)


def task(length: int) -> Task:
    return Task("t", "q", ("a",), context=" ".join(WORDS[:length]))


def run(
    agent: MemAgent, one: Task, responses: list[list[int]], temperature: float = 1.0, **options: object
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(responses, EOS)
    settings = RolloutOptions(temperature, lambda turn: 100 + turn, **options)
    return asyncio.run(agent.rollout(agent.prepare(one), engine, settings)), engine


def update(memory: str, section: str) -> list[int]:
    return ids(f"<u> question q ? memory {memory} section {section} update <a>")


def final(memory: str) -> list[int]:
    return ids(f"<u> question q ? memory {memory} answer <a>")


@pytest.mark.parametrize(("length", "updates"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (12, 3)])
def test_every_chunk_is_read_once_and_then_comes_one_final_turn(length: int, updates: int) -> None:
    trajectory, engine = run(make_agent(), task(length), [[*ids("w0"), EOS]] * (updates + 1))

    assert [turn.kind for turn in trajectory.turns] == ["update"] * updates + ["final"]
    start = len(ids("<u> question q ? memory none section"))
    sections = [prompt[start:-2] for prompt in engine.prompts[:-1]]  # memories of one word: they all start there
    assert [token for section in sections for token in section] == ids(" ".join(WORDS[:length]))


@pytest.mark.parametrize(("length", "sizes"), [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_chunks_are_whole_but_for_the_last(length: int, sizes: list[int]) -> None:
    assert [len(chunk) for chunk in split_chunks(list(range(length)), 4)] == sizes


def test_the_memory_is_overwritten_and_the_end_token_is_not_part_of_it() -> None:
    responses = [[*ids("w40 w41"), EOS], [*ids("w42"), EOS], [*ids("w43 w44"), EOS]]
    trajectory, engine = run(make_agent(), task(8), responses)

    assert engine.prompts == [update("none", "w0 w1 w2 w3"), update("w40 w41", "w4 w5 w6 w7"), final("w42")]
    assert [turn.prompt_ids for turn in trajectory.turns] == engine.prompts
    assert [turn.completion.token_ids for turn in trajectory.turns] == responses
    assert (trajectory.answer_text, trajectory.counters) == ("w43 w44", {})


def test_an_empty_context_is_answered_from_no_memory() -> None:
    _, engine = run(make_agent(), task(0), [[*ids("w1"), EOS]])

    assert engine.prompts == [final("none")]


def test_sampled_ids_are_spliced_and_never_encoded_again() -> None:
    tokenizer = byte_tokenizer(merges=[("a", "b")])
    a, b, merged = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "ab"))
    assert tokenizer("ab")["input_ids"] == [merged]
    agent = MemAgent(MemagentConfig(chunk_tokens=50), tokenizer)
    engine = ScriptedEngine([[a, b, 0], [a, 0]], stop_id=0)
    options = RolloutOptions(1.0, lambda turn: turn)

    asyncio.run(agent.rollout(agent.prepare(Task("t", "why", ("x",), context="text")), engine, options))

    found = engine.prompts[1]
    assert [a, b] in [found[i : i + 2] for i in range(len(found))]
    assert merged not in found


@pytest.mark.parametrize(("rule", "kept"), [("keep", "w40"), ("clear", "")])
def test_an_empty_update_keeps_or_clears_and_is_counted(rule: str, kept: str) -> None:
    responses = [[*ids("w40"), EOS], [EOS], [*ids("w9"), EOS]]
    trajectory, engine = run(make_agent(empty_memory=rule), task(8), responses)

    assert engine.prompts[2] == final(kept)
    assert trajectory.counters == {"empty_memory": 1}


@pytest.mark.parametrize(("rule", "kept"), [("keep", "none"), ("clear", "")])
def test_an_empty_first_update(rule: str, kept: str) -> None:
    trajectory, engine = run(make_agent(empty_memory=rule), task(8), [[EOS], [EOS], [*ids("w9"), EOS]])

    assert engine.prompts[1:] == [update(kept, "w4 w5 w6 w7"), final(kept)]
    assert trajectory.counters == {"empty_memory": 2}


def test_a_truncated_memory_is_kept_as_cut_and_counted() -> None:
    cut = ids("w40 w41 w42 w43 w44")
    trajectory, engine = run(make_agent(), task(4), [cut, [*ids("w9"), EOS]])

    assert engine.prompts[1] == final("w40 w41 w42 w43 w44")
    assert trajectory.counters == {"truncated_memory": 1}


def test_a_truncated_answer_is_kept_whole_and_counted() -> None:
    trajectory, _ = run(make_agent(), task(4), [[*ids("w1"), EOS], ids("w40 w41 w42 w43 w44 w45")])

    assert trajectory.answer_text == "w40 w41 w42 w43 w44 w45"
    assert trajectory.counters == {"truncated_final": 1}


def test_blanking_forgets_everything_that_was_written() -> None:
    _, engine = run(make_agent(), task(8), [[*ids("w40"), EOS]] * 3, blank_memory=True)

    assert engine.prompts == [update("none", "w0 w1 w2 w3"), update("none", "w4 w5 w6 w7"), final("none")]


def test_limits_seeds_and_bans_of_each_turn() -> None:
    _, engine = run(
        make_agent(), task(8), [[*ids("w40"), EOS]] * 3, temperature=0.0, banned_final_ids=(ids("none")[0],)
    )

    assert [p.max_new_tokens for p in engine.params] == [5, 5, 6]
    assert [p.seed for p in engine.params] == [100, 101, 102]
    assert [p.banned_token_ids for p in engine.params] == [(), (), (ids("none")[0],)]
    assert {p.temperature for p in engine.params} == {0.0}


def test_requests_about_one_text_have_a_key_that_those_about_another_one_do_not_have() -> None:
    """A question is evaluated among several numbers of documents at once: only what begins alike waits for another."""
    keys = [run(make_agent(), task(length), [[*ids("w40"), EOS]] * 4)[1].keys for length in (8, 8, 9)]

    assert [len(each) for each in keys] == [1, 1, 1]
    assert keys[0] == keys[1] != keys[2]
    assert len({Task("t", "q", ("a",), chunks=("x",) * count).key for count in (1, 2)}) == 2


def test_ids_sent_are_ids_trained_on() -> None:
    """With the real engine: over a hundred sampled turns, what went in and out is exactly what the rows hold."""
    parts = small_parts("rollout.batch_size=8")
    engine = RecordingEngine(parts.engine())
    batch = make_batch(parts.rollouts(engine=engine), parts.config, step=1)

    def key(prompt: list[int], response: list[int], logprobs: list[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(prompt), tuple(response), tuple(logprobs)

    rows = [row for rows in batch.minibatches for row in rows]
    trained = Counter(key(row.prompt_ids, row.response_ids, row.behave_logprobs) for row in rows)
    sent = Counter(key(prompt, c.token_ids, c.logprobs) for prompt, c in engine.seen)
    assert len(rows) > 100
    assert len(trained) > 50
    assert trained == sent


class Announced(ScriptedEngine):
    """Notes beside the prompts what was announced, in the order in which it came."""

    def __init__(self, responses: list[list[int]], stop_id: int) -> None:
        super().__init__(responses, stop_id)
        self.heard: list[list[int]] = []

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        self.keys.add(key)
        assert len(self.keys) == 1  # that of the requests
        self.heard.append(prefix_ids)
        assert len(self.heard) <= len(self.prompts) + 2, "a section is announced one turn ahead, not earlier"


@pytest.mark.parametrize("order", ["paper", "section_first"])
def test_the_next_section_is_announced_where_it_stands_before_the_memory(order: str) -> None:
    engine = Announced([[*ids("w0"), EOS]] * 4, EOS)
    agent = make_agent(prompt_order=order)
    asyncio.run(agent.rollout(agent.prepare(task(12)), engine, RolloutOptions(1.0, lambda turn: turn)))

    if order == "paper":  # nothing but the question stands before the memory
        assert not engine.heard
        return
    updates = engine.prompts[:-1]
    assert [prompt[: len(heard)] for prompt, heard in zip(updates, engine.heard, strict=True)] == engine.heard
    assert [prompt[len(heard) :] for prompt, heard in zip(updates, engine.heard, strict=True)] == [
        ids("none update <a>"), ids("w0 update <a>"), ids("w0 update <a>"),
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["paper", "section_first"])
def test_a_step_tells_which_share_of_its_prompts_was_shared(order: str) -> None:
    """What was computed is never less than what is distinct, and with the section first both shares are larger."""
    parts = small_parts("rollout.batch_size=4", "rollout.group_size=8", f"agent.prompt_order={order}")
    engine = parts.engine()
    groups = parts.rollouts(engine=engine)
    share = make_batch(groups, parts.config, step=1).stats["shareable_share"]
    prompts = [[turn.prompt_ids for t in group.trajectories for turn in t.turns] for group in groups]
    tree = sum(len({tuple(ids[:n]) for ids in one for n in range(1, len(ids) + 1)}) for one in prompts)
    assert share == pytest.approx(1 - tree / sum(len(ids) for one in prompts for ids in one))
    computed = engine.stats.prefilled_tokens / engine.stats.prompt_tokens
    assert 1 - computed <= share
    assert share > (0.5 if order == "section_first" else 0.2)
