"""The HotpotQA task: what a context holds, where the evidence stands, and that the sides stay apart."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import small_parts

from trainer.config import RunConfig
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import UserError
from trainer.evaluate import check_lengths
from trainer.tasks import leave_out_misfits
from trainer.tasks.hotpotqa import HotpotQA
from trainer.types import Task

UPSTREAM_SLOTS_200 = {6, 9, 16, 80, 87, 95, 108, 153, 176, 190}
Edit = Callable[[list[dict], list[dict]], None]


def source(folder: Path, seed: int = 1, **settings) -> HotpotQA:
    return HotpotQA(HotpotqaConfig(path=str(folder), **{"num_documents": 12, **settings}), seed)


def edited(folder: Path, edit: Edit) -> Path:
    """Change the rows of a data folder on disk."""
    files = [folder / "questions.jsonl", folder / "documents.jsonl"]
    rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    edit(*rows)
    for file, content in zip(files, rows, strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return folder


def documents_of(task: Task) -> list[str]:
    """The documents of a context, in order; checks the labels on the way."""
    documents = re.split(r"(?:^|\n\n)Document \d+:\n", task.context)[1:]
    labels = [int(n) for n in re.findall(r"(?:^|\n\n)Document (\d+):\n", task.context)]
    assert labels == list(range(1, len(documents) + 1))
    return documents


def all_heldout(tasks: HotpotQA) -> list[Task]:
    return [tasks.heldout(split, i) for split in ("dev", "test") for i in range(tasks.num_heldout(split))]


def test_a_context_holds_the_own_documents_among_others(mini_hotpotqa: Path) -> None:
    tasks = source(mini_hotpotqa)
    for task in [tasks.train(i) for i in range(tasks.train_size)] + all_heldout(tasks):
        documents = documents_of(task)
        assert len(documents) == len(set(documents)) == 12 == task.meta["num_documents"]
        person = re.search(r"where (.*) was born", task.question).group(1)
        gold = [documents[int(n) - 1] for n in str(task.meta["gold_documents"]).split()]
        assert len(gold) == 2
        assert {g.split("\n")[0] for g in gold} >= {person}
        assert any(f"river {task.answers[0]}" in g for g in gold)
        assert task.meta["source"] == "mini"


def test_layout_is_title_line_then_text(mini_hotpotqa: Path) -> None:
    context = source(mini_hotpotqa, num_documents=2).heldout("test", 0).context
    assert re.fullmatch(r"Document 1:\n[^\n]+\n[^\n]+\n\nDocument 2:\n[^\n]+\n[^\n]+", context)


def test_every_epoch_holds_every_question_once_in_its_own_order(mini_hotpotqa: Path) -> None:
    tasks = source(mini_hotpotqa)
    epochs = [[tasks.train(e * 8 + i) for i in range(8)] for e in range(3)]
    questions = [[task.question for task in epoch] for epoch in epochs]
    assert tasks.train_size == 8
    assert len({frozenset(q) for q in questions}) == 1
    assert all(len(set(q)) == 8 for q in questions)
    assert len({tuple(q) for q in questions}) == 3
    assert len({task.id for epoch in epochs for task in epoch}) == 24
    by_question = [{task.question: task.context for task in epoch} for epoch in epochs]
    assert all(by_question[0][q] != by_question[1][q] for q in by_question[0])


def test_a_curriculum_makes_the_first_training_contexts_shorter_and_no_others(mini_hotpotqa: Path) -> None:
    plain, tasks = source(mini_hotpotqa), source(mini_hotpotqa, curriculum=[2, 4, 8], curriculum_tasks=5)
    lengths = [len(documents_of(tasks.train(i))) for i in range(20)]
    assert lengths == [2] * 5 + [4] * 5 + [8] * 5 + [12] * 5
    assert [tasks.train(i).id for i in range(20)] == [plain.train(i).id for i in range(20)]  # the same questions
    assert [tasks.train(i) for i in range(15, 20)] == [plain.train(i) for i in range(15, 20)]
    assert all_heldout(tasks) == all_heldout(plain)
    for i in range(20):
        assert len(str(tasks.train(i).meta["gold_documents"]).split()) == 2


def every_second_is_made(questions: list[dict], _: list[dict]) -> None:
    for row in questions[::2]:
        row["source"] = "cloze"


def test_a_share_of_real_questions_is_kept_all_along_and_each_comes_once_an_epoch_of_its_kind(
    mini_hotpotqa: Path,
) -> None:
    tasks = source(edited(mini_hotpotqa, every_second_is_made), real_share=0.75)
    drawn = [tasks.train(i) for i in range(400)]
    real = [task for task in drawn if task.meta["source"] != "cloze"]
    assert len(real) == 300
    assert sum(task.meta["source"] != "cloze" for task in drawn[:40]) == 30
    assert len({task.id for task in drawn}) == 400
    for kind in (real, [task for task in drawn if task.meta["source"] == "cloze"]):
        different = len({task.question for task in kind})
        assert len({task.question for task in kind[:different]}) == different
        assert [task.question for task in kind[:different]] != [
            task.question for task in kind[different : 2 * different]
        ]


def test_real_questions_that_the_supervised_start_has_not_seen_are_taken_before_those_that_it_knows(
    mini_hotpotqa: Path,
) -> None:
    def prepared(questions: list[dict], documents: list[dict]) -> None:
        every_second_is_made(questions, documents)
        for row in questions[1::4]:
            row["traced"] = False

    tasks = source(edited(mini_hotpotqa, prepared), real_share=0.5)

    unseen = {row.question for row in tasks.sides.train.questions if not row.traced}
    real = {task.question for task in map(tasks.train, range(100)) if task.meta["source"] != "cloze"}
    assert real == unseen
    assert 0 < len(unseen) < sum(row.source != "cloze" for row in tasks.sides.train.questions)


@pytest.mark.parametrize("share", [None, 0.5])
def test_questions_over_the_agents_limit_are_left_out_before_the_run_comes_to_them(
    mini_hotpotqa: Path, share: float | None
) -> None:
    def prepared(questions: list[dict], documents: list[dict]) -> None:
        every_second_is_made(questions, documents)
        for row in questions[1::5]:
            row["question"] += " or so" * 60

    tasks = source(edited(mini_hotpotqa, prepared), real_share=share)
    before, held = tasks.train_size, len(all_heldout(tasks))
    agent = small_parts("agent.max_question_tokens=100").agent

    told = leave_out_misfits(tasks, agent)

    assert 0 < tasks.train_size < before
    for task in [*map(tasks.train, range(3 * before)), *all_heldout(tasks)]:
        agent.prepare(task)  # raises where the question is too long
    out, out_held = before - tasks.train_size, held - len(all_heldout(tasks))
    assert told.startswith(f"{out} of {before} questions for training and {out_held} of {held} held-out ones are over")
    assert not leave_out_misfits(tasks, agent), "nothing is left to leave out"
    with pytest.raises(UserError, match="all questions are over"):
        leave_out_misfits(tasks, small_parts("agent.max_question_tokens=1").agent)


def test_a_share_of_real_questions_changes_nothing_where_all_are_of_one_kind(mini_hotpotqa: Path) -> None:
    plain, shared = source(mini_hotpotqa), source(mini_hotpotqa, real_share=0.5)
    assert [plain.train(i) for i in range(20)] == [shared.train(i) for i in range(20)]


def test_held_out_questions_begin_with_the_real_ones(mini_hotpotqa: Path) -> None:
    tasks = source(edited(mini_hotpotqa, every_second_is_made))
    for split in ("dev", "test"):
        made = [tasks.heldout(split, i).meta["source"] == "cloze" for i in range(tasks.num_heldout(split))]
        assert made == sorted(made)


def test_a_curriculum_of_more_documents_than_there_are_is_refused(mini_hotpotqa: Path) -> None:
    with pytest.raises(UserError, match=r"task\.curriculum=\[2, 999\]: .* documents for training: lower"):
        source(mini_hotpotqa, curriculum=[2, 999])


def test_a_task_depends_on_seed_and_number_alone(mini_hotpotqa: Path) -> None:
    first, second, other = source(mini_hotpotqa), source(mini_hotpotqa), source(mini_hotpotqa, seed=2)
    backwards = [second.train(i) for i in reversed(range(20))][::-1]
    assert [first.train(i) for i in range(20)] == backwards
    assert [other.train(i) for i in range(20)] != backwards
    assert all_heldout(first) == all_heldout(other)


def test_tasks_do_not_depend_on_the_order_of_the_files(mini_hotpotqa: Path) -> None:
    before = source(mini_hotpotqa)
    expected = [before.train(i) for i in range(8)] + all_heldout(before)
    edited(mini_hotpotqa, lambda q, d: (q.reverse(), d.reverse()))
    after = source(mini_hotpotqa)
    assert [after.train(i) for i in range(8)] + all_heldout(after) == expected


def test_train_size_takes_a_part_of_the_questions(mini_hotpotqa: Path) -> None:
    tasks = source(mini_hotpotqa, train_size=3)
    assert tasks.train_size == 3
    assert len({tasks.train(i).question for i in range(30)}) == 3


def assert_sides_share_nothing(tasks: HotpotQA, train_tasks: int) -> None:
    train = [tasks.train(i) for i in range(train_tasks)]
    held = all_heldout(tasks)
    assert not {t.question for t in train} & {t.question for t in held}
    text = [{d.split("\n", 1)[1] for t in side for d in documents_of(t)} for side in (train, held)]
    assert not text[0] & text[1]


def test_training_and_held_out_contexts_share_no_document(mini_hotpotqa: Path) -> None:
    assert_sides_share_nothing(source(mini_hotpotqa), 80)


def test_a_training_question_whose_gold_document_is_held_out_is_dropped(mini_hotpotqa: Path) -> None:
    # Question 10 is held out; question 0 is for training.
    def share_gold(questions: list[dict], documents: list[dict]) -> None:
        questions[10]["own_documents"].append("t0")

    tasks = source(edited(mini_hotpotqa, share_gold))
    assert (tasks.train_size, tasks.sides.dropped) == (7, 1)
    assert_sides_share_nothing(tasks, 70)


def test_a_training_question_loses_another_document_that_is_held_out(mini_hotpotqa: Path) -> None:
    def share_river(questions: list[dict], documents: list[dict]) -> None:
        questions[10]["own_documents"].append("r0")

    tasks = source(edited(mini_hotpotqa, share_river))
    assert (tasks.train_size, tasks.sides.dropped) == (8, 0)
    assert "r0" not in {document.id for question in tasks.sides.train.questions for document in question.own}
    assert_sides_share_nothing(tasks, 80)


def test_the_words_of_a_held_out_question_under_another_id_are_not_trained_on(mini_hotpotqa: Path) -> None:
    def repeat(questions: list[dict], documents: list[dict]) -> None:
        questions[0]["question"] = "  " + questions[10]["question"].upper()

    assert source(edited(mini_hotpotqa, repeat)).sides.dropped == 1


def test_documents_that_differ_only_in_whitespace_or_title_never_meet(mini_hotpotqa: Path) -> None:
    def duplicate(questions: list[dict], documents: list[dict]) -> None:
        copies = [{**d, "id": f"copy-{d['id']}", "text": d["text"].replace(" ", "\n ")} for d in documents]
        copies += [{**d, "id": f"alias-{d['id']}", "title": f"{d['title']} (alias)"} for d in documents]
        documents += copies
        for question in questions:
            question["own_documents"] += [f"alias-{i}" for i in question["own_documents"]]

    tasks = source(edited(mini_hotpotqa, duplicate))
    for task in [tasks.train(i) for i in range(40)] + all_heldout(tasks):
        texts = [" ".join(d.split("\n", 1)[1].split()) for d in documents_of(task)]
        assert len(texts) == len(set(texts)) == 12
        assert len(str(task.meta["gold_documents"]).split()) == 2
        assert "(alias)" not in "".join(documents_of(task)[int(n) - 1] for n in task.meta["gold_documents"].split())


def test_fewer_slots_than_own_documents_keep_the_gold_ones(mini_hotpotqa: Path) -> None:
    tasks = source(mini_hotpotqa, num_documents=2)
    assert {tasks.train(i).meta["gold_documents"] for i in range(40)} == {"1 2"}


def chi_square(counts: Counter[int], slots: int) -> float:
    expected = counts.total() / slots
    return sum((counts[slot] - expected) ** 2 / expected for slot in range(slots))


def slot_counts(tasks: HotpotQA, number: int) -> Counter[int]:
    """How often an own document stands in each slot, from 0, over training tasks."""
    own = {q.question: {d.render() for d in q.own} for q in tasks.sides.train.questions}
    counts: Counter[int] = Counter()
    for index in range(number):
        task = tasks.train(index)
        counts.update(slot for slot, d in enumerate(documents_of(task)) if d in own[task.question])
    return counts


# 99.99 % points of chi-square with 11 and 49 degrees of freedom. The tasks are fixed, so the outcome is too.
CHI_SQUARE_11, CHI_SQUARE_49 = 37.4, 94.9


def test_own_documents_stand_everywhere_equally_often(mini_hotpotqa: Path) -> None:
    assert chi_square(slot_counts(source(mini_hotpotqa), 1600), 12) < CHI_SQUARE_11


def test_compat_upstream_puts_them_in_the_same_slots_each_time(mini_hotpotqa: Path) -> None:
    counts = slot_counts(source(mini_hotpotqa, compat_upstream=True), 160)
    assert len(counts) == 3
    assert chi_square(counts, 12) > 10 * CHI_SQUARE_11


@pytest.mark.data
def test_real_data_uniform_slots(shared_data: Path) -> None:
    tasks = source(shared_data / "hotpotqa", num_documents=50)
    assert tasks.train_size > 500
    assert chi_square(slot_counts(tasks, tasks.train_size), 50) < CHI_SQUARE_49


@pytest.mark.data
def test_real_data_upstream_slots(shared_data: Path) -> None:
    tasks = source(shared_data / "hotpotqa", num_documents=200, compat_upstream=True)
    own_count = {q.question: len(q.own) for q in tasks.sides.train.questions}
    seen: set[int] = set()
    for index in range(40):
        slots = set(slot_counts_of(tasks, index))
        assert slots <= UPSTREAM_SLOTS_200
        if own_count[tasks.train(index).question] == 10:
            assert slots == UPSTREAM_SLOTS_200
        seen |= slots
    assert seen == UPSTREAM_SLOTS_200


def slot_counts_of(tasks: HotpotQA, index: int) -> list[int]:
    own = {q.question: {d.render() for d in q.own} for q in tasks.sides.train.questions}
    task = tasks.train(index)
    return [slot for slot, d in enumerate(documents_of(task)) if d in own[task.question]]


@pytest.mark.data
def test_real_data_sides_are_disjoint_and_counted(shared_data: Path) -> None:
    tasks = source(shared_data / "hotpotqa", num_documents=200)
    sides = tasks.sides
    assert tasks.train_size + sides.dropped + tasks.num_heldout("dev") + tasks.num_heldout("test") == 753
    assert_sides_share_nothing(tasks, 60)


@pytest.mark.data
def test_real_data_items_with_few_own_documents(shared_data: Path) -> None:
    tasks = source(shared_data / "hotpotqa", num_documents=50)
    few = [
        q.question
        for s in (tasks.sides.train, tasks.sides.dev, tasks.sides.test)
        for q in s.questions
        if len(q.own) < 6
    ]
    found = [tasks.train(i) for i in range(tasks.train_size)] + all_heldout(tasks)
    found = [task for task in found if task.question in few]
    assert len(found) >= 5
    assert all(len(documents_of(task)) == 50 for task in found)


def test_too_many_documents_says_how_many_there_are(mini_hotpotqa: Path) -> None:
    with pytest.raises(UserError, match=r"task.num_documents=500 .* choose at most (\d+)") as caught:
        source(mini_hotpotqa, num_documents=500)
    largest = int(re.search(r"at most (\d+)", str(caught.value)).group(1))
    tasks = source(mini_hotpotqa, num_documents=largest)
    assert {len(documents_of(t)) for t in [*all_heldout(tasks), *map(tasks.train, range(8))]} == {largest}
    with pytest.raises(UserError):
        source(mini_hotpotqa, num_documents=largest + 1)


def test_a_held_out_task_that_does_not_exist(mini_hotpotqa: Path) -> None:
    with pytest.raises(UserError, match=r"test split .* has 2 questions.*eval_fraction"):
        source(mini_hotpotqa).heldout("test", 2)


@pytest.mark.parametrize(("fraction", "advice"), [(0.001, "raise task.eval_fraction"), (0.999, "lower task.eval_frac")])
def test_a_split_that_leaves_a_side_empty(mini_hotpotqa: Path, fraction: float, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        source(mini_hotpotqa, eval_fraction=fraction)


def test_held_out_contexts_have_other_numbers_of_documents_where_these_are_asked_for(mini_hotpotqa: Path) -> None:
    tasks = source(mini_hotpotqa, num_documents=3)

    longer, own = tasks.heldout("test", 0, 5), tasks.heldout("test", 0, 3)

    assert own == tasks.heldout("test", 0)
    assert (longer.id, longer.question) == (own.id, own.question)
    assert len(documents_of(longer)) == 5 == len(set(documents_of(longer)))
    assert longer.context == source(mini_hotpotqa, num_documents=5).heldout("test", 0).context
    with pytest.raises(UserError, match=r"contexts of 99 documents .*eval.final_documents.* has \d+ documents: lower"):
        tasks.heldout("test", 0, 99)


def test_a_length_that_any_evaluated_question_cannot_have_is_refused_before_all_is_trained(mini_hotpotqa: Path) -> None:
    last = source(mini_hotpotqa).heldout_row("dev", 1).id

    def needs_three(questions: list[dict], _: list[dict]) -> None:
        question = next(one for one in questions if one["id"] == last)
        question["supporting"] = question["own_documents"]

    tasks = source(edited(mini_hotpotqa, needs_three))
    settings = {"split": "dev", "num_tasks": 2, "final_documents": [2]}
    agent = {"template": "memagent"}
    task = {"name": "hotpotqa", "path": str(mini_hotpotqa)}
    config = RunConfig(model={"path": "/model"}, agent=agent, task=task, eval=settings)

    with pytest.raises(
        UserError, match=rf"contexts of 2 documents .*eval.final_documents.* question {last} .* needs 3"
    ):
        check_lengths(config, tasks)
    check_lengths(config.model_copy(update={"eval": config.eval.model_copy(update={"num_tasks": 1})}), tasks)
