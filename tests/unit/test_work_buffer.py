"""The work buffer: what may be under way, and that nothing is learned from that is too old."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.rollout.buffer import Cursor, Slot, WorkBuffer
from trainer.types import Group, Task

DONE = Group(Task("t", "?", ("a",)), [])


def finish(slot: Slot) -> None:
    slot.group = DONE


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 9),
    staleness=st.integers(0, 4),
    window=st.integers(0, 9),
    seed=st.integers(0, 2**32),
    drop=st.floats(0, 0.4),
    first_alone=st.booleans(),
)
def test_no_group_is_older_than_allowed_whatever_finishes_first(
    batch: int, staleness: int, window: int, seed: int, drop: float, first_alone: bool
) -> None:
    chance = random.Random(seed)
    buffer = WorkBuffer(batch, staleness, window, count(), first_alone)
    version, consumed = 0, []
    for version in range(12):  # one step from each version
        buffer.admit(version)
        while (slots := buffer.take(version)) is None:
            running = buffer.running
            assert running, "it waits though everything is finished"
            slot = chance.choice(running)
            if chance.random() < drop:
                buffer.drop(slot)
            else:
                finish(slot)
            buffer.admit(version)
        ages = [version - slot.version for slot in slots]
        assert len(slots) == batch
        assert 0 <= min(ages) <= max(ages) <= staleness
        consumed += [slot.number for slot in slots]
        buffer.admit(version)  # while the step is trained
        buffer.trained()
    done = consumed + buffer.dropped
    assert len(set(done)) == len(done), "a task was learned from twice"


def test_what_comes_next_is_known_beforehand_and_comes_next_all_the_same() -> None:
    buffer = WorkBuffer(4, 0, 3, count(10))
    assert buffer.upcoming(6) == [10, 11, 12, 13, 14, 15]
    assert [slot.number for slot in buffer.admit(0)] == [10, 11, 12, 13]
    assert buffer.upcoming(3) == [14, 15, 16]
    buffer.drop(buffer.slots[0])
    assert [slot.number for slot in buffer.admit(0)] == [14]
    assert buffer.upcoming(2) == [15, 16]


def test_without_staleness_a_step_is_the_next_tasks_and_nothing_else_is_under_way() -> None:
    buffer = WorkBuffer(4, 0, 3, count(10))
    slots = buffer.admit(0)
    assert [slot.number for slot in slots] == [10, 11, 12, 13]
    for slot in reversed(slots):
        assert buffer.take(0) is None
        finish(slot)
    assert buffer.take(0) == slots
    assert buffer.admit(0) == []  # the step is being trained
    buffer.trained()
    assert [slot.number for slot in buffer.admit(1)] == [14, 15, 16, 17]


def numbers(slots: list[Slot] | None) -> list[int]:
    assert slots is not None
    return [slot.number for slot in slots]


@pytest.mark.parametrize("window", [0, 1, 10])
def test_while_a_step_is_trained_all_of_the_next_is_generated(window: int) -> None:
    buffer = WorkBuffer(10, 1, window, count())
    for slot in buffer.admit(0)[:10]:
        finish(slot)
    assert numbers(buffer.take(0)) == list(range(10))
    assert len(buffer.running) == 10
    for slot in buffer.running:
        finish(slot)
    buffer.trained()
    buffer.admit(1)
    assert numbers(buffer.take(1)) == list(range(10, 20))  # there is nothing to wait for


def test_the_first_steps_groups_are_generated_before_those_after_them() -> None:
    buffer = WorkBuffer(3, 2, 3, count(), first_alone=True)
    slots = buffer.admit(0)
    assert numbers(slots) == [0, 1, 2]
    slots[1].generated = True
    assert numbers(buffer.admit(0)) == [3]  # what it was generated with is free
    buffer.drop(slots[0])
    assert numbers(buffer.admit(0)) == [4]
    finish(slots[1])
    assert buffer.admit(0) == []
    finish(slots[2])
    assert numbers(buffer.admit(0)) == [5]
    buffer.slots[-1].generated = True  # the third: a step's groups are generated, and all others may be
    assert numbers(buffer.admit(0)) == [6, 7, 8, 9]
    assert buffer.capacity == len(buffer.slots) == 9


def test_a_slow_document_holds_up_only_its_window() -> None:
    buffer = WorkBuffer(2, 2, 2, count())
    slots = buffer.admit(0)
    finish(slots[1])
    finish(slots[2])
    assert buffer.take(0) is None  # 2 may not overtake 0: it is no longer in its window
    finish(slots[0])
    assert numbers(buffer.take(0)) == [0, 1]
    finish(slots[4])
    finish(slots[3])
    assert numbers(buffer.take(0)) == [2, 3]


def test_a_window_lets_finished_groups_overtake() -> None:
    buffer = WorkBuffer(4, 1, 4, count())
    slots = buffer.admit(0)
    for slot in slots[1:]:
        finish(slot)
    assert buffer.take(0) is None  # three of the window's four: 0 is waited for
    assert [slot.number for slot in buffer.running] == [0]
    wide = WorkBuffer(3, 1, 3, count())
    slots = wide.admit(0)
    for slot in (slots[0], slots[2], slots[3]):
        finish(slot)
    assert numbers(wide.take(0)) == [0, 2, 3]  # 1 is overtaken by the two that follow it


def test_what_is_due_is_waited_for_and_not_overtaken() -> None:
    buffer = WorkBuffer(2, 1, 2, count())
    first = buffer.admit(0)
    for slot in (first[0], first[2]):
        finish(slot)
    assert numbers(buffer.take(0)) == [0, 2]  # 1 and 3 last for one step more
    buffer.trained()
    late = buffer.admit(1)
    finish(late[0])
    finish(first[3])
    assert buffer.take(1) is None  # 3 and 4 are in the window, but 1 would be too old for the step after
    finish(first[1])
    assert numbers(buffer.take(1)) == [1, 3]


def test_a_window_of_one_takes_strictly_the_oldest() -> None:
    buffer = WorkBuffer(2, 1, 1, count())
    slots = buffer.admit(0)
    for slot in slots[1:]:
        finish(slot)
    assert buffer.take(0) is None
    finish(slots[0])
    assert buffer.take(0) == slots[:2]


@given(st.lists(st.integers(0, 40), unique=True, max_size=25))
def test_a_cursor_goes_on_with_exactly_what_was_not_consumed(done: list[int]) -> None:
    cursor = Cursor(0, (), lambda number: number % 10 < 8)
    wanted = [number for number in done if number % 10 < 8]
    cursor.consume(wanted)
    again = Cursor(cursor.next_task, cursor.taken, lambda number: number % 10 < 8).numbers()
    expected = (number for number in count() if number % 10 < 8 and number not in wanted)
    assert [next(again) for _ in range(30)] == [next(expected) for _ in range(30)]


def test_the_rest_of_an_epoch_is_passed_over_at_once() -> None:
    cursor = Cursor(0, (), lambda number: number % 10 < 8)
    cursor.consume(list(range(8)))
    assert (cursor.next_task, cursor.taken) == (10, ())
    cursor.consume([12, 11])
    assert (cursor.next_task, cursor.taken) == (10, (11, 12))


@pytest.mark.parametrize("staleness", [1, 3])
def test_more_is_under_way_than_one_step_needs(staleness: int) -> None:
    buffer = WorkBuffer(10, staleness, 0, count())
    assert len(buffer.admit(0)) == 10 * (staleness + 1)


def test_a_step_that_lacks_only_scores_is_told_from_one_that_lacks_responses() -> None:
    buffer = WorkBuffer(2, 1, 1, count())
    first, second, third, *_ = buffer.admit(0)
    first.generated = third.generated = True
    assert not buffer.lacks_only_scores(0)  # the second is still generated, and no later one may come before it
    second.generated = True
    assert buffer.lacks_only_scores(0)
    assert buffer.take(0) is None
    finish(first)
    finish(second)
    assert buffer.take(0) == [first, second]
    assert not buffer.lacks_only_scores(0)
