"""Tasks are prepared by several threads at a time, in their order; classes of the user's own by one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from builders import byte_tokenizer

from evaluation import asking
from evaluation.reader import TooLong, prepared
from trainer.errors import QuestionTooLongError
from trainer.types import Task

TASKS = [Task(f"t{number}", "Where?", ("here",), "Here.") for number in range(4)]


def two_at_a_time() -> threading.Barrier:
    """Something that whoever waits at it passes only together with another thread."""
    return threading.Barrier(2, timeout=30.0)


def test_an_evaluation_prepares_as_many_tasks_at_a_time_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.reader.os.cpu_count", lambda: 2)
    both = two_at_a_time()

    def prepare(task: Task) -> str:
        both.wait()
        if task.id == "t2":
            raise QuestionTooLongError("too long")
        return task.id

    assert prepared(prepare, TASKS) == ["t0", "t1", TooLong("too long"), "t3"]


def test_rows_of_a_suite_share_its_tasks_and_no_setting_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, loads, found = byte_tokenizer(), list[str](), list[tuple[bool, Any]]()

    def suite(name: str) -> Any:
        def load(_: object) -> list[Task]:
            loads.append(name)
            return TASKS

        return SimpleNamespace(name=name, load=load)

    def prepare(tasks: list[Task]) -> list[Task]:
        backend = tokenizer.backend_tokenizer
        found.append((backend.encode_special_tokens, backend.truncation))
        backend.encode_special_tokens = True  # as memories are read, see encode_plain
        backend.enable_truncation(7)
        return tasks

    monkeypatch.setattr(asking, "make_reader", lambda *_: SimpleNamespace(prepare=prepare))
    one, two = suite("one"), suite("two")
    rows: Any = [SimpleNamespace(suite=s, config=None, method=None, name="row") for s in (one, one, two)]
    loaded = asking._load(rows, tokenizer, 100)

    assert loads == ["one", "two"]
    assert [each.tasks for each in loaded] == [TASKS] * 3
    assert found == [(False, None)] * 3
