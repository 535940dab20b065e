"""Supervised traces of a memory: what each turn is shown and should write, beside the agent's own loop."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import ScriptedEngine, byte_tokenizer

from clusterkit.config.resolve import resolve
from clusterkit.data.datasets.distractors import distractors_of
from trainer.agents.base import RolloutOptions
from trainer.agents.memagent import MemAgent
from trainer.config import RunConfig
from trainer.config_agents import MemalphaAgentConfig
from trainer.config_tasks import SftConfig
from trainer.errors import CrashError, UserError
from trainer.sft.encoding import Encoder, oracle_memories, whole_memory
from trainer.sft.rows import RowMaker
from trainer.tasks.evidence import MOST_SENTENCES
from trainer.tasks.examples import Example, load_examples
from trainer.tasks.hotpotqa_data import Document, Question, render
from trainer.train.model import load_tokenizer
from trainer.types import Task
from trainer.warmup.tiny import untrained_model

TOKENIZER = byte_tokenizer()
ROSE, OAK = ("Rose", "Rose was born in Oak."), ("Oak", "Oak lies on the Ouse.")
CONTEXT = (
    "Document 1:\nOak\nOak lies on the Ouse. It has 3 mills.\n\nDocument 2:\nRose\nRose was born in Oak. She paints."
)
LINE = {
    "problem": "On which river was Rose born?",
    "context": CONTEXT,
    "evidence": [ROSE, OAK],
    "answer": "\\boxed{Ouse}",
}


DOCUMENTS = [
    Document(title, title, text.ljust(78 - len(f"Document 1:\n{title}\n")), text)
    for title, text in (
        ("Bob Ash", "Bob Ash sang in a choir."),
        ("Ann Peel", "She paints. Ann Peel sang for a band."),
        ("Ann Ash", "Ann Ash sang for The Elms. She was a painter."),
        ("The Oaks", "The band sang about Ann and Bob Ash."),
        ("The Elms", "The Elms came from Hull."),
    )
]
"""Each is a section of 80 bytes, with the empty line behind it."""
GOLD = (DOCUMENTS[2], DOCUMENTS[4])
MISLEADING = Question("q", "Where is the band that Ann Ash sang for from?", ("Hull",), GOLD, (), "")
MISLED = {
    "problem": MISLEADING.question,
    "context": render(DOCUMENTS),
    "evidence": [("Ann Ash", "Ann Ash sang for The Elms."), ("The Elms", "The Elms came from Hull.")],
    "distractors": distractors_of(MISLEADING, DOCUMENTS),
    "answer": "\\boxed{Hull}",
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def example(tmp_path: Path, **changes: Any) -> Example:
    line = {**LINE, **changes}
    file = write(tmp_path / "traces.jsonl", line, {**LINE, "problem": "other"})
    found = load_examples(SftConfig(path=str(file), eval_fraction=0.0))
    return next(one for one in (*found.train, *found.heldout) if one.trace and one.trace.problem == line["problem"])


def config(**agent: Any) -> RunConfig:
    limits = {"chunk_tokens": 40, "max_memory_tokens": 64, "max_question_tokens": 64, "max_final_tokens": 16, **agent}
    return RunConfig.model_validate({"agent": limits, "task": {"name": "sft", "path": "x"}, "trainer": {"type": "sft"}})


def texts(rows: list[Any]) -> list[str]:
    assert all(row.response_ids[-1] == TOKENIZER.eos_token_id for row in rows)
    return [TOKENIZER.decode(row.response_ids[:-1]) for row in rows]


def test_a_memory_holds_each_sentence_with_its_title_from_where_it_was_read() -> None:
    ends = [10, CONTEXT.index(" It has"), CONTEXT.index("Rose\n"), CONTEXT.index(" She"), len(CONTEXT)]

    written, shown = zip(*oracle_memories(CONTEXT, ends, [ROSE, OAK]), strict=True)
    assert (
        list(written)
        == list(shown)
        == [
            "none so far",
            # Its title stands in the section before, where nothing told that it would matter.
            "Oak: Oak lies on the Ouse." if CONTEXT.index("Oak") >= 10 else "Oak lies on the Ouse.",
            "Oak: Oak lies on the Ouse.",
            "Oak: Oak lies on the Ouse.\nRose: Rose was born in Oak.",
            "Oak: Oak lies on the Ouse.\nRose: Rose was born in Oak.",
        ]
    )


def test_nothing_is_remembered_that_was_not_read_yet() -> None:
    for cut in range(1, len(CONTEXT)):
        (first, _), (last, _) = oracle_memories(CONTEXT, [cut, len(CONTEXT)], [ROSE, OAK])
        for line in first.split("\n"):
            title, colon, part = line.rpartition(": ")
            assert line == "none so far" or (part in CONTEXT[:cut] and (not colon or f"\n{title}\n" in CONTEXT[:cut]))
        assert all(sentence in last for _, sentence in (ROSE, OAK))


def test_what_is_not_in_the_document_is_never_remembered() -> None:
    assert oracle_memories(CONTEXT, [len(CONTEXT)], [("Elm", "Elm is a tree.")]) == [("none so far",) * 2]


@pytest.mark.parametrize("order", ["paper", "section_first"])
def test_the_rows_of_a_trace_are_the_turns_of_the_agent(tmp_path: Path, order: str) -> None:
    settings = config(prompt_order=order)
    rows = Encoder(settings, TOKENIZER).rows(example(tmp_path), 7)
    agent = MemAgent(settings.agent, TOKENIZER)  # type: ignore[arg-type]
    engine = ScriptedEngine([row.response_ids for row in rows], TOKENIZER.eos_token_id)
    engine.prefetch = lambda *_, **__: None  # type: ignore[attr-defined]
    task = Task("t", str(LINE["problem"]), ("Ouse",), CONTEXT)
    trajectory = asyncio.run(agent.rollout(agent.prepare(task), engine, RolloutOptions(0.0, lambda turn: turn)))

    assert [row.prompt_ids for row in rows] == engine.prompts
    assert len(rows) == len(trajectory.turns) == 4
    assert trajectory.answer_text == "\\boxed{Ouse}"
    assert texts(rows)[2] == "Oak: Oak lies on the Ouse.\nRose: Rose was born in Oak."
    assert {row.trajectory for row in rows} == {7}


def test_a_section_may_end_within_a_character(tmp_path: Path) -> None:
    sentence = "Rose was born in Örkény, a small town in Pest county that lies between the Danube and the Tisza."
    context = f"Document 1:\nRose\n{sentence} She paints."
    cut = len(context[: context.index("Ö")].encode()) + 1
    changes = {"context": context, "evidence": [("Rose", sentence)]}
    rows = Encoder(config(chunk_tokens=cut, max_memory_tokens=128), TOKENIZER).rows(example(tmp_path, **changes), 0)

    second = context.encode()[: 2 * cut].decode().partition("Rose\n")[2]
    assert texts(rows)[:2] == ["Rose: Rose was born in Ö", f"Rose: {second.strip()}"]


@pytest.mark.parametrize("processes", [0, 2])
def test_processes_make_the_rows_of_one_in_the_order_of_the_examples(tmp_path: Path, processes: int) -> None:
    changes: list[dict[str, Any]] = [{}, {"problem": "?" * 65}, MISLED, {"context": ""}, {"problem": "Where?"}]
    examples = [example(tmp_path, **one) for one in changes]
    settings = config(max_memory_tokens=40)
    encoder = Encoder(settings, TOKENIZER)
    expected = [row for number, one in enumerate(examples) for row in encoder.rows(one, number)]
    longest = max(row.num_tokens for row in expected)
    maker = RowMaker(settings, TOKENIZER, processes)
    made, shorter = maker.begin(examples, longest).result(), maker.begin(examples, longest - 1).result()
    maker.close()

    assert made.rows == expected
    assert (made.misfits, made.long_memories) == (encoder.misfits, encoder.long_memories)
    assert (made.misfits, made.misfit) == (1, encoder.misfit)
    assert shorter.rows == [row for row in expected if row.num_tokens < longest]
    assert (shorter.too_long, shorter.longest) == (len(expected) - len(shorter.rows), longest)


def test_a_process_that_makes_rows_bears_ctrl_c_and_its_death_is_told(tmp_path: Path) -> None:
    examples = [example(tmp_path)]
    others = psutil.Process().children()  # of tests before this one
    maker = RowMaker(config(), TOKENIZER, 1)
    (process,) = (one for one in psutil.Process().children() if one not in others)
    process.send_signal(signal.SIGINT)  # as a terminal does to all processes in front
    assert maker.begin(examples, 1000).result().rows
    process.kill()
    with pytest.raises(CrashError, match="was ended by SIGKILL: did the machine run out of memory"):
        maker.begin(examples, 1000).result()
    maker.close()


def test_what_is_wrong_with_examples_is_told_from_a_process_too(tmp_path: Path) -> None:
    settings = config()
    maker = RowMaker(settings.model_copy(update={"agent": MemalphaAgentConfig(name="memalpha")}), TOKENIZER, 1)
    with pytest.raises(UserError, match=r"which agent\.name=memagent learns from, not memalpha") as refusal:
        maker.begin([example(tmp_path)], 1000).result()
    assert "in _turns" in "".join(refusal.value.__notes__), "where it was raised"
    maker.close()


def test_without_a_document_there_is_the_last_turn_alone(tmp_path: Path) -> None:
    rows = Encoder(config(), TOKENIZER).rows(example(tmp_path, context=""), 0)

    assert texts(rows) == ["\\boxed{Ouse}"]
    assert "Rose: Rose was born in Oak.\nOak: Oak lies on the Ouse." in TOKENIZER.decode(rows[0].prompt_ids)


def test_a_whole_memory_leaves_out_what_misleads_where_it_would_be_too_long(tmp_path: Path) -> None:
    found, evidence = MISLED["distractors"][:2], MISLED["evidence"][1:]
    gold, others = ([f"{title}: {sentence}" for title, sentence in pairs] for pairs in (evidence, found))

    def read(limit: int) -> tuple[Encoder, list[str], str]:
        encoder = Encoder(config(max_memory_tokens=limit), TOKENIZER)
        changes = {"context": "", "evidence": evidence, "distractors": found}
        rows = encoder.rows(example(tmp_path, **{**MISLED, **changes}), 0)
        return encoder, texts(rows), TOKENIZER.decode(rows[0].prompt_ids) if rows else ""

    bare = len("\n".join(gold))
    _, answers, prompt = read(bare + 1 + len(others[0]) + 1)
    assert answers == ["\\boxed{Hull}"]
    assert all(line in prompt for line in (*gold, others[0]))
    assert others[1] not in prompt, "a memory has up to two sentences"
    _, answers, prompt = read(bare + 1 + len(others[0]))
    assert answers == ["\\boxed{Hull}"]
    assert all(line in prompt for line in gold)
    assert others[0] not in prompt
    encoder, answers, _ = read(bare)
    assert (answers, encoder.long_memories) == ([], 1), "no agent comes to answer from such a memory"


def test_places_in_a_whole_memory_do_not_tell_what_misleads() -> None:
    memories = [whole_memory([("A", f"a {n}")], [("C", f"c {n}")]).split("\n") for n in range(50)]

    assert {next(place for place, line in enumerate(lines) if line[0] == "C") for lines in memories} == {0, 1}
    assert whole_memory([("A", "a"), ("B", "b")]) == "A: a\nB: b"
    assert whole_memory([]) == "none so far"


def test_a_memory_that_the_agent_could_not_write_is_left_out_and_counted(tmp_path: Path) -> None:
    encoder = Encoder(config(max_memory_tokens=40), TOKENIZER)
    rows = encoder.rows(example(tmp_path), 0)

    assert texts(rows) == ["Oak: Oak lies on the Ouse."], "nor is the answer from a memory that it could not have"
    assert encoder.long_memories == 1
    assert all(len(row.response_ids) <= 40 for row in rows)


def test_what_misleads_stands_in_the_memory_that_is_shown_and_is_never_added(tmp_path: Path) -> None:
    rows = Encoder(config(chunk_tokens=80, max_memory_tokens=160), TOKENIZER).rows(example(tmp_path, **MISLED), 0)
    turns = []
    for row, document in zip(rows, [*DOCUMENTS, None], strict=True):
        prompt = TOKENIZER.decode(row.prompt_ids)
        assert document is None or document.text in prompt
        shown = prompt.partition("<memory>\n")[2].partition("\n</memory>")[0]
        turns.append((document.title if document else "answer", shown, texts([row])[0]))

    bob, peel, ash = (
        "Bob Ash: Bob Ash sang in a choir.",
        "Ann Peel: Ann Peel sang for a band.",
        "Ann Ash: Ann Ash sang for The Elms.",
    )
    oaks, elms = "The Oaks: The band sang about Ann and Bob Ash.", "The Elms: The Elms came from Hull."
    assert turns == [
        ("Bob Ash", "No previous memory", "none so far"),
        ("Ann Peel", bob, bob),
        ("Ann Ash", f"{bob}\n{peel}", f"{peel}\n{ash}"),
        ("The Oaks", f"{peel}\n{ash}", f"{peel}\n{ash}"),
        ("The Elms", f"{ash}\n{oaks}", f"{ash}\n{elms}"),
        ("answer", f"{ash}\n{elms}", "\\boxed{Hull}"),
    ]


def test_a_trace_may_have_memories_of_more_sentences(tmp_path: Path) -> None:
    one = example(tmp_path, **{**MISLED, "sentences": 3})
    rows = Encoder(config(chunk_tokens=80, max_memory_tokens=160), TOKENIZER).rows(one, 0)
    shown = [TOKENIZER.decode(row.prompt_ids).partition("<memory>\n")[2].partition("\n</memory>")[0] for row in rows]
    assert [len(memory.split("\n")) for memory in shown] == [1, 1, 2, 3, 3, 3]
    assert shown[-1].startswith("Ann Ash: Ann Ash sang for The Elms.\nThe Oaks: ")
    whole = Encoder(config(max_memory_tokens=160), TOKENIZER).rows(
        example(tmp_path, **{**MISLED, "context": "", "sentences": 3}), 0
    )
    assert "The Oaks: The band sang" in TOKENIZER.decode(whole[0].prompt_ids)


@pytest.mark.parametrize("sentences", [0, -1, 1.5, True, "3"])
def test_a_number_of_sentences_that_is_none_is_named(tmp_path: Path, sentences: Any) -> None:
    with pytest.raises(UserError, match=r"t\.jsonl, line 1: .*'sentences' must be a whole number above 0"):
        load_examples(SftConfig(path=str(write(tmp_path / "t.jsonl", {**LINE, "sentences": sentences}))))


def test_distractors_leave_a_memory_that_would_be_too_long_the_last_of_the_list_first(tmp_path: Path) -> None:
    def read(limit: int) -> tuple[Encoder, list[str]]:
        encoder = Encoder(config(chunk_tokens=80, max_memory_tokens=limit), TOKENIZER)
        rows = encoder.rows(example(tmp_path, **MISLED), 0)
        shown = [
            TOKENIZER.decode(row.prompt_ids).partition("<memory>\n")[2].partition("\n</memory>")[0] for row in rows
        ]
        return encoder, [*shown, *texts(rows)]

    kept = (MISLED["evidence"][0], *MISLED["distractors"][:2])
    ash, oaks, peel = (f"{title}: {sentence}" for title, sentence in kept)
    _, memories = read(len(f"{ash}\n{oaks}") + 1)
    assert memories[3:5] == [f"{peel}\n{ash}", f"{ash}\n{oaks}"]
    encoder, memories = read(len(f"{ash}\n{peel}") + 1)
    assert memories[3:5] == [f"{peel}\n{ash}", ash], "The Oaks has a place, and does not fit"
    assert encoder.long_memories == 0
    encoder, memories = read(len(ash) + 1)
    assert memories[-1] == ash, "both sentences of gold do not fit: neither this memory nor the answer is learned"
    assert encoder.long_memories == 1


def test_memories_have_all_gold_the_best_of_the_rest_and_add_none_of_it_wherever_sections_end() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        # Sentences of one letter each, so that any part of one tells which it is.
        pairs = [(f"Title{n}", chr(ord("A") + n) * rng.randint(3, 40) + ".") for n in range(rng.randint(3, 10))]
        text = "\n\n".join(f"{title}\n{sentence}" for title, sentence in pairs)
        gold = pairs[: rng.randint(1, 4)]
        ranked = [pair for pair in pairs if pair not in gold]
        rng.shuffle(pairs)
        rng.shuffle(ranked)
        ends = [*sorted(rng.sample(range(1, len(text)), rng.randint(1, 9))), len(text)]
        limit = rng.choice([60, 120, 1000])
        memories = oracle_memories(text, ends, gold, ranked, lambda memory, limit=limit: len(memory) < limit)
        before: list[str] = []
        for begin, end, both in zip([0, *ends], ends, memories, strict=False):
            begun = {letter for _, (letter, *_) in pairs if letter in text[:end]}
            golden = [letter for _, (letter, *_) in gold if letter in begun]
            order = [letter for _, (letter, *_) in ranked if letter in begun]
            written, shown = (
                [] if memory == "none so far" else [line.rstrip(".")[-1] for line in memory.split("\n")]
                for memory in both
            )
            for memory, kept in zip(both, (written, shown), strict=True):
                others = [letter for letter in kept if letter not in golden]
                assert set(golden) <= set(kept)
                assert len(kept) <= max(MOST_SENTENCES, len(golden))
                assert sorted(kept, key=text.index) == kept
                assert len(memory) < limit or not others
            others = [letter for letter in shown if letter not in golden]
            assert set(others) == set(order[: len(others)]), "the best of those that were read"
            assert all(letter in before or text.index(letter) >= begin for letter in shown), "nothing comes back"
            assert set(written) <= {*before, *golden}, "nothing that misleads is added"
            if limit == 1000:
                assert len(shown) == max(len(golden), min(MOST_SENTENCES, len(begun)))
                assert len(written) == max(len(golden), min(MOST_SENTENCES, len({*before, *golden})))
            before = shown


def test_a_trace_whose_question_the_agent_cannot_take_is_left_out_and_told(tmp_path: Path) -> None:
    encoder = Encoder(config(max_question_tokens=3), TOKENIZER)

    assert encoder.rows(example(tmp_path), 0) == encoder.rows(example(tmp_path), 1) == []
    assert encoder.misfits == 2
    assert "agent.max_question_tokens is 3: raise it" in encoder.misfit


def test_a_problem_is_on_one_side_whatever_is_around_it(tmp_path: Path) -> None:
    rows = [{**LINE, "problem": f"problem {n % 20}", "context": f"{CONTEXT} {n}"} for n in range(60)]
    found = load_examples(SftConfig(path=str(write(tmp_path / "t.jsonl", *rows)), eval_fraction=0.3))
    train, heldout = ({e.trace.problem for e in side if e.trace} for side in (found.train, found.heldout))

    assert train
    assert heldout
    assert not train & heldout
    assert len(found.train) + len(found.heldout) == 60


@pytest.mark.parametrize("evidence", [3, [["a"]], [["a", 1]], [["", "b"]], ["ab"]])
def test_evidence_that_is_none_is_named(tmp_path: Path, evidence: Any) -> None:
    with pytest.raises(UserError, match=r"t\.jsonl, line 1: .*evidence.*\[title, sentence\]"):
        load_examples(SftConfig(path=str(write(tmp_path / "t.jsonl", {**LINE, "evidence": evidence}))))


def test_distractors_that_are_none_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", {**LINE, "distractors": [["Elm", "Elm is a tree.", 3]]})
    with pytest.raises(UserError, match=r"t\.jsonl, line 1: .*'distractors'.*\[title, sentence\]"):
        load_examples(SftConfig(path=str(file)))


def test_another_agent_cannot_learn_from_traces(tmp_path: Path) -> None:
    settings = RunConfig.model_validate(
        {"agent": {"name": "single_turn"}, "task": {"name": "sft", "path": "x"}, "trainer": {"type": "sft"}}
    )
    with pytest.raises(UserError, match=r"agent\.name=memagent"):
        Encoder(settings, TOKENIZER).rows(example(tmp_path), 0)


def test_a_model_built_from_nothing_knows_every_word_of_a_trace(tmp_path: Path) -> None:
    elm = {"context": f"{CONTEXT}\n\nDocument 3:\nElm\nElm is a tree.", "distractors": [("Elm", "Elm is a tree.")]}
    one = {**LINE, **elm, "evidence": [ROSE]}
    file = write(tmp_path / "t.jsonl", one, {**one, "problem": "other"})
    limits = ["agent.chunk_tokens=8", "agent.max_memory_tokens=24", "agent.max_question_tokens=8"]
    size = ["model.tiny.hidden_size=32", "model.tiny.intermediate_size=64"]
    files = [f"task.path={file}", f"cache_dir={tmp_path}"]
    settings = resolve("tiny", None, ["trainer.type=sft", "task.name=sft", *files, *size, *limits]).config
    tokenizer = load_tokenizer(untrained_model(settings))
    encoder = Encoder(settings, tokenizer)
    found = load_examples(settings.examples)
    rows = [row for one in (*found.train, *found.heldout) for row in encoder.rows(one, 0)]

    assert len(rows) == 10
    assert not any(tokenizer.unk_token_id in row.prompt_ids + row.response_ids for row in rows)
    memory = tokenizer.decode(rows[3].response_ids[:-1])
    assert memory.split() == "Rose: Rose was born in Oak.".split()
    assert "Elm: Elm is a tree." in tokenizer.decode(rows[4].prompt_ids)
