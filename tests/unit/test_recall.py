"""The recall task: exact shapes, one right answer in one place, and held-out facts that are really held out."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from builders import small_config

from trainer.agents.memagent import MemAgent
from trainer.config import RunConfig
from trainer.tasks.recall import FILLERS, NO_FACT, Fact, Recall, make_keys, pair_split
from trainer.types import Task
from trainer.warmup.demos import Demonstrator
from trainer.warmup.tiny import PROMPT_WORDS, make_tokenizer

CONFIG = small_config("task.num_keys=256", "task.num_values=96")
RECALL = Recall(CONFIG.task, seed=1)


def facts(section: str) -> list[Fact]:
    """The facts of a section: the two words before each full stop."""
    words = section.split()
    return [(words[i - 2], words[i - 1]) for i, word in enumerate(words) if word == "."]


def all_facts(task: Task) -> list[Fact]:
    return [fact for section in task.chunks for fact in facts(section)]


def tasks() -> list[Task]:
    heldout = [RECALL.heldout(split, i, chunks) for split in ("dev", "test") for chunks in (0, 16) for i in range(60)]
    return [*(RECALL.train(i) for i in range(200)), *heldout]


def test_a_task_is_a_function_of_its_number() -> None:
    again = Recall(CONFIG.task, seed=1)

    assert [RECALL.train(i) for i in (5, 3, 5)] == [again.train(i) for i in (5, 3, 5)]
    assert RECALL.train(3) != RECALL.train(5)
    assert RECALL.train(3).chunks != Recall(CONFIG.task, seed=2).train(3).chunks


def test_held_out_tasks_are_the_same_for_every_seed() -> None:
    other = Recall(CONFIG.task, seed=99)

    assert [RECALL.heldout("test", i) for i in range(9)] == [other.heldout("test", i) for i in range(9)]
    assert len({RECALL.heldout(s, i, c).id for s in ("dev", "test") for i in range(5) for c in (0, 2)}) == 20


def test_the_answer_stands_in_one_section_and_its_key_nowhere_else() -> None:
    for task in tasks():
        asked = [
            (n, fact) for n, section in enumerate(task.chunks) for fact in facts(section) if fact[0] == task.question
        ]
        assert asked == [(task.meta["gold_chunk"], (task.question, task.answers[0]))]
        assert sum(section.split().count(task.question) for section in task.chunks) == 1


def test_the_key_is_asked_once_even_when_keys_run_out() -> None:
    few = Recall(small_config("task.num_keys=8", "task.num_values=96").task, seed=1)

    for i in range(50):
        task = few.heldout("dev", i, chunks=12)  # 36 facts about 8 keys
        assert [f[0] for f in all_facts(task)].count(task.question) == 1


@pytest.mark.parametrize(("per_chunk", "filler"), [(3, 4), (1, 0), (6, 9)])
def test_sections_have_exactly_the_tokens_that_they_promise(per_chunk: int, filler: int) -> None:
    settings = (f"task.facts_per_chunk={per_chunk}", f"task.filler_per_chunk={filler}", "agent.chunk_tokens=40")
    config = small_config("task.num_values=96", *settings)
    source = Recall(config.task, seed=1)
    tokenizer = make_tokenizer(source.vocabulary())
    agent = MemAgent(config.agent, tokenizer)

    for i in range(30):
        task = source.train(i)
        prepared = agent.prepare(task)
        assert {len(chunk) for chunk in prepared.chunks} == {3 * per_chunk + filler} == {source.config.section_tokens}
        assert tokenizer.pad_token_id not in [token for chunk in prepared.chunks for token in chunk]
        assert [len(facts(section)) for section in task.chunks] == [per_chunk] * len(task.chunks)


def test_values_within_a_section_are_distinct() -> None:
    for task in tasks():
        for section in task.chunks:
            assert len({value for _, value in facts(section)}) == CONFIG.task.facts_per_chunk


def test_every_word_has_one_meaning_and_a_token() -> None:
    vocabulary = RECALL.vocabulary()
    every_key = make_keys(5000)

    assert len(set(every_key)) == 5000
    assert len(set(vocabulary)) == len(vocabulary)
    reserved = {NO_FACT, ".", *FILLERS, *RECALL.values, *PROMPT_WORDS}
    assert not reserved & set(make_keys(5600))
    assert {word for t in tasks() for section in t.chunks for word in section.split()} <= set(vocabulary)


def test_training_never_shows_a_held_out_fact() -> None:
    asked = {split: set() for split in ("dev", "test")}
    for split, found in asked.items():
        for i in range(400):
            task = RECALL.heldout(split, i)
            found.add((task.question, task.answers[0]))
            # What else such a document holds is training material.
            assert {pair_split(f) for f in all_facts(task) if f[0] != task.question} == {"train"}
    trained = {fact for i in range(2500) for fact in all_facts(RECALL.train(i))}

    assert not asked["dev"] & asked["test"]
    assert not (asked["dev"] | asked["test"]) & trained
    assert {pair_split(f) for f in asked["dev"]} == {"dev"}
    assert {pair_split(f) for f in asked["test"]} == {"test"}
    assert {pair_split(f) for f in trained} == {"train"}
    # The words and keys themselves are all trained: only their combination is new.
    words = {word for fact in trained for word in fact}
    assert {word for found in asked.values() for fact in found for word in fact} <= words


def test_a_fifth_of_all_facts_is_held_out() -> None:
    rng = random.Random(0)
    sample = [(rng.choice(RECALL.keys), rng.choice(RECALL.values)) for _ in range(10000)]
    shares = Counter(map(pair_split, sample))

    assert shares["dev"] / 10000 == pytest.approx(0.1, abs=0.015)
    assert shares["test"] / 10000 == pytest.approx(0.1, abs=0.015)


def test_every_key_has_held_out_facts_with_the_fewest_values_allowed() -> None:
    few = Recall(small_config("task.num_keys=256", "task.num_values=96").task, seed=1)

    for key in few.keys:
        splits = {pair_split((key, value)) for value in few.values}
        assert splits == {"train", "dev", "test"}


def test_demonstrations_show_no_held_out_fact() -> None:
    tokenizer = make_tokenizer(RECALL.vocabulary())
    demos = Demonstrator(CONFIG, RECALL, MemAgent(CONFIG.agent, tokenizer), tokenizer)
    rows = [*demos.conversations(1500, 1, "demo"), *demos.recall_rows(500, 1, "recall")[0]]
    keys, values = set(RECALL.keys), set(RECALL.values)

    shown = set()
    for row in rows:
        words = tokenizer.convert_ids_to_tokens(row.prompt_ids + row.response_ids)
        shown |= {(key, value) for key, value in pairwise(words) if key in keys and value in values}
        assert tokenizer.pad_token_id not in row.prompt_ids + row.response_ids

    assert len(shown) > 3000
    assert {pair_split(fact) for fact in shown} == {"train"}


def test_lengths_and_places_come_in_equal_shares() -> None:
    made = [RECALL.train(i) for i in range(3000)]
    lengths = Counter(len(task.chunks) for task in made)
    places = Counter(task.meta["gold_chunk"] for task in made if len(task.chunks) == 4)

    assert set(lengths) == {2, 3, 4}
    assert min(lengths.values()) > 900
    assert all(task.meta["chunks"] == len(task.chunks) for task in made)
    assert set(places) == {0, 1, 2, 3}
    assert min(places.values()) > 0.2 * sum(places.values())


def test_documents_can_be_much_longer_than_in_training() -> None:
    task = RECALL.heldout("test", 0, chunks=64)

    assert len(task.chunks) == 64
    assert (
        len({fact[0] for fact in all_facts(task)}) == CONFIG.task.facts_per_chunk * 64
    )  # as long as there are keys, no key twice


def config_with(**task: int) -> RunConfig:
    return small_config(*(f"task.{name}={value}" for name, value in task.items()))


def test_chance_is_a_blind_guess_of_both_words() -> None:
    assert Recall(config_with(num_values=100).task, 1).chance == pytest.approx(1 / 100)
