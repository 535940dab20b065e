"""Tasks are prepared by several threads at a time, in their order; classes of the user's own by one."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from builders import byte_tokenizer
from heldout_writer import LIMITS, FakeEngine, careful

from evaluation import asking
from evaluation.reader import TooLong, prepared
from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig
from trainer.errors import QuestionTooLongError
from trainer.rollout.controller import RolloutController
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


def test_a_run_prepares_in_threads_with_its_own_agents_and_without_with_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, both = byte_tokenizer(), two_at_a_time()

    def made_by(agent: type[MemAgent]) -> list[tuple[str, bool]]:
        config = MemagentConfig.model_validate(LIMITS)
        controller = RolloutController(agent(config, tokenizer), FakeEngine(tokenizer, careful), 1)
        return asyncio.run(controller._prepared(TASKS))

    def where(task: Task) -> tuple[str, bool]:
        return task.id, threading.current_thread() is threading.main_thread()

    def prepare(_: MemAgent, task: Task) -> tuple[str, bool]:
        both.wait()
        return where(task)

    class Mine(MemAgent):
        def prepare(self, task: Task) -> Any:
            return where(task)

    monkeypatch.setattr(MemAgent, "prepare", prepare)
    assert made_by(MemAgent) == [(task.id, False) for task in TASKS]
    assert made_by(Mine) == [(task.id, True) for task in TASKS]


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
