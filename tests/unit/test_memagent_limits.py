"""Limits of the memory agent, and the wording of its prompts."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from builders import byte_tokenizer
from tokenizers import normalizers, pre_tokenizers

from clusterkit.config.resolve import resolve
from trainer.agents.memagent import MemAgent
from trainer.agents.single_turn import SingleTurn
from trainer.config_agents import MemagentConfig, SingleTurnConfig
from trainer.errors import UserError
from trainer.tasks.recall import Recall
from trainer.types import Task
from trainer.warmup.demos import Demonstrator
from trainer.warmup.tiny import make_tokenizer

WORDS = [f"w{i}" for i in range(60)]
TOKENIZER = make_tokenizer([*WORDS, "none", "q"])


def make_agent(**settings: object) -> MemAgent:
    limits = {"chunk_tokens": 4, "max_question_tokens": 3, "max_memory_tokens": 5, "max_final_tokens": 6}
    return MemAgent(MemagentConfig.model_validate({"template": "words", **limits, **settings}), TOKENIZER)


def odd_tokenizer() -> Any:
    """A tokenizer that takes letters apart, puts a blank before a text and is asked by its file to truncate."""
    tokenizer = byte_tokenizer(merges=[("s", "o"), ("so", "so")])
    backend = tokenizer.backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.enable_truncation(2)
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), odd_tokenizer(), TOKENIZER])
def test_all_questions_are_judged_as_prepare_judges_each_by_itself(tokenizer: Any) -> None:
    texts = ["w1 q", "so" * 9, "x" * 20, "x" * 21, "é" * 8, "ﷺ", "ﷺ" * 2, "none " * 4, "", "[user]", "so" * 40]
    tasks = [Task(str(number), text, ("a",), context="q") for number, text in enumerate(texts)]
    agents = [
        MemAgent(make_agent(max_question_tokens=20, chunk_tokens=99).config, tokenizer),
        SingleTurn(SingleTurnConfig(template="words", max_question_tokens=24), tokenizer),
        SingleTurn(SingleTurnConfig(template="words", max_question_tokens=150), tokenizer),
    ]

    for agent in agents:
        assert agent.fits(tasks) == [is_prepared(agent, task) for task in tasks]


def is_prepared(agent: MemAgent | SingleTurn, task: Task) -> bool:
    try:
        agent.prepare(task)
    except UserError:
        return False
    return True


def words(chunks: list[list[int]]) -> list[str]:
    return [TOKENIZER.decode(chunk) for chunk in chunks]


def test_the_middle_of_a_long_document_is_left_out_and_counted() -> None:
    # Two chunks of four may stay of 17 tokens: the first four and the last four.
    prepared = make_agent(max_chunks=2).prepare(Task("t", "q", ("a",), context=" ".join(WORDS[:17])))

    assert words(prepared.chunks) == ["w0 w1 w2 w3", "w13 w14 w15 w16"]
    assert prepared.dropped_tokens == 9


def test_halves_need_not_be_whole_chunks() -> None:
    prepared = make_agent(max_chunks=3).prepare(Task("t", "q", ("a",), context=" ".join(WORDS[:20])))

    assert words(prepared.chunks) == ["w0 w1 w2 w3", "w4 w5 w14 w15", "w16 w17 w18 w19"]


def test_a_document_at_the_limit_is_left_alone() -> None:
    prepared = make_agent(max_chunks=2).prepare(Task("t", "q", ("a",), context=" ".join(WORDS[:8])))

    assert words(prepared.chunks) == ["w0 w1 w2 w3", "w4 w5 w6 w7"]
    assert prepared.dropped_tokens == 0


def test_sections_that_the_task_cut_are_left_out_whole() -> None:
    sections = tuple(f"w{i} w{i + 10}" for i in range(6))
    prepared = make_agent(max_chunks=3).prepare(Task("t", "q", ("a",), chunks=sections))

    assert words(prepared.chunks) == ["w0 w10", "w4 w14", "w5 w15"]
    assert prepared.dropped_tokens == 6


@pytest.mark.parametrize(
    "one",
    [
        Task("doc-7", "q", ("a",), context=" ".join(WORDS[:9])),
        Task("doc-7", "q", ("a",), chunks=("w1", "w2", "w3")),
    ],
)
def test_a_long_document_can_be_refused(one: Task) -> None:
    with pytest.raises(UserError, match=r"doc-7: the document has 3 chunks and agent\.max_chunks is 2: raise it"):
        make_agent(max_chunks=2, overflow="error").prepare(one)


def test_a_long_question_is_refused_never_cut() -> None:
    agent = make_agent()

    assert len(agent.prepare(Task("t", "q w1 w2", ("a",))).question) == 3
    with pytest.raises(UserError, match=r"task t: .* 4 tokens and agent\.max_question_tokens is 3: raise it"):
        agent.prepare(Task("t", "q w1 w2 w3", ("a",)))


def test_a_long_section_of_the_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"a chunk has 5 tokens and agent\.chunk_tokens is 4: raise it"):
        make_agent().prepare(Task("t", "q", ("a",), chunks=("w1", "w1 w2 w3 w4 w5")))


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("order", ["paper", "section_first"])
def test_the_longest_conversation_is_reached_and_never_passed(order: str, repeat: bool) -> None:
    agent = make_agent(prompt_order=order, repeat_problem=repeat)
    question, memory, section = [1] * 3, [2] * 5, [3] * 4
    update = agent.prompts.update.fill({"problem": question, "memory": memory, "section": section})
    final = agent.prompts.final.fill({"problem": question, "memory": memory})

    assert agent.longest_conversation() == max(len(update) + 5, len(final) + 6)


def test_word_prompts_in_both_orders() -> None:
    values = {"problem": [100], "memory": [101], "section": [102]}

    def blocks(order: str, repeat: bool = False) -> list[int]:
        filled = make_agent(prompt_order=order, repeat_problem=repeat).prompts.update.fill(values)
        assert filled[0] == TOKENIZER.convert_tokens_to_ids("<u>")
        assert filled[-1] == TOKENIZER.convert_tokens_to_ids("<a>")
        return [i for i in filled if i >= 100]

    assert (blocks("paper"), blocks("section_first")) == ([100, 101, 102], [100, 102, 101])
    assert (blocks("paper", True), blocks("section_first", True)) == ([100, 101, 102, 100], [100, 102, 100, 101])


AGAIN = "\n\nThe problem again:\n\n<problem>\nWHY\n</problem>"


@pytest.mark.parametrize(
    ("order", "repeat", "blocks"),
    [
        ("paper", False, "<memory>\nOLD\n</memory>\n\n<section>\nTEXT\n</section>"),
        ("section_first", False, "<section>\nTEXT\n</section>\n\n<memory>\nOLD\n</memory>"),
        ("paper", True, f"<memory>\nOLD\n</memory>\n\n<section>\nTEXT\n</section>{AGAIN}"),
        ("section_first", True, f"<section>\nTEXT\n</section>{AGAIN}\n\n<memory>\nOLD\n</memory>"),
    ],
)
def test_chat_prompts_are_one_user_message_around_the_blocks(order: str, repeat: bool, blocks: str) -> None:
    tokenizer = byte_tokenizer()
    agent = MemAgent(MemagentConfig(prompt_order=order, repeat_problem=repeat), tokenizer)
    values = {
        name: tokenizer(t)["input_ids"] for name, t in (("problem", "WHY"), ("memory", "OLD"), ("section", "TEXT"))
    }

    update = tokenizer.decode(agent.prompts.update.fill(values))
    final = tokenizer.decode(agent.prompts.final.fill(values))

    assert update.startswith("[user]")
    assert f"<problem>\nWHY\n</problem>\n\n{blocks}\n\nUpdated memory:[end][assistant]" in update
    assert "put the answer in \\boxed{}" in final
    assert final.endswith("<problem>\nWHY\n</problem>\n\n<memory>\nOLD\n</memory>\n\nYour answer:[end][assistant]")
    assert "TEXT" not in final


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("template", ["words", "memagent"])
def test_with_the_section_first_a_group_shares_all_up_to_the_memory(template: str, repeat: bool) -> None:
    """What differs between a group's trajectories, their memories, comes last; in the paper's order it does not."""

    def shared(order: str) -> tuple[list[int], int]:
        settings = {"template": template, "prompt_order": order, "repeat_problem": repeat}
        tokenizer = TOKENIZER if template == "words" else byte_tokenizer()
        update = MemAgent(MemagentConfig.model_validate(settings), tokenizer).prompts.update
        one, other = (
            update.fill({"problem": [500], "section": [501, 502, 503], "memory": memory})
            for memory in ([504, 505], [506])
        )
        pairs = zip(one, other, strict=False)
        prefix = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return [i for i in prefix if i >= 500], len(one) - len(prefix)

    document, rest = shared("section_first")
    paper, paper_rest = shared("paper")

    assert document == [500, 501, 502, 503, *([500] if repeat else [])]
    assert paper == [500]
    assert rest < paper_rest


def test_demonstrations_are_prompts_of_the_agents_order() -> None:
    config = resolve("tiny", None, ("agent.prompt_order=section_first", "agent.repeat_problem=true")).config
    recall = Recall(config.task, config.seed)
    tokenizer = make_tokenizer(recall.vocabulary())
    agent = MemAgent(config.agent, tokenizer)
    rows = Demonstrator(config, recall, agent, tokenizer).conversations(100, "demo")

    prompts = [tokenizer.decode(row.prompt_ids) for row in rows]
    read = [p for p in prompts if " section " in p]

    form = re.compile(r"<u> question (\w+) \? section ([\w. ]+) question \1 \? memory ([\w. ]+) update <a>")
    assert len(read) > 50
    assert all(form.fullmatch(p) for p in read)
    assert all(row.num_tokens <= agent.longest_conversation() for row in rows)


def test_a_document_that_talks_like_the_prompt_is_not_filled_in() -> None:
    tokenizer = byte_tokenizer()
    agent = MemAgent(MemagentConfig(), tokenizer)
    prepared = agent.prepare(Task("t", "what is {memory}?", ("a",), context="{section} {problem}"))
    values = {"problem": prepared.question, "memory": agent.prompts.no_memory, "section": prepared.chunks[0]}

    text = tokenizer.decode(agent.prompts.update.fill(values))

    assert "<problem>\nwhat is {memory}?\n</problem>" in text
    assert "<section>\n{section} {problem}\n</section>" in text
    assert "<memory>\nNo previous memory\n</memory>" in text


def test_instruction_prompts_need_a_chat_template() -> None:
    with pytest.raises(UserError, match="needs a tokenizer with a chat template"):
        MemAgent(MemagentConfig(), TOKENIZER)


def test_a_conversation_longer_than_the_window_is_refused_with_a_chunk_that_fits() -> None:
    agent = make_agent()
    longest = agent.longest_conversation()

    agent.check_window(longest)
    with pytest.raises(
        UserError, match=rf"has {longest} tokens .* window of {longest - 2}: lower agent\.chunk_tokens"
    ) as e:
        agent.check_window(longest - 2)
    fits = int(str(e.value).partition("agent.chunk_tokens to ")[2].split()[0])
    assert make_agent(chunk_tokens=fits).longest_conversation() <= longest - 2
    with pytest.raises(UserError, match="lower several of these limits"):
        agent.check_window(3)
