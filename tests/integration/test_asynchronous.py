"""Beside training with rollout.max_staleness: evaluations, and scores of a slow judge. A real vLLM server samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coin
import pytest
from httpstub import Answer, HttpStub, StubThread
from runs import ENVIRONMENT, Trial, command
from vllmflags import FLAGS
from vllmserver import vllm_python

pytestmark = pytest.mark.long


def train(trial: Trial) -> list[dict[str, Any]]:
    """Run the trainer to its end; the numbers of its steps."""
    running = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    said = running.communicate(timeout=600)
    assert running.returncode == 0, said
    return trial.records("step")


def test_an_evaluation_holds_up_training_no_longer_than_it_takes(tmp_path: Path) -> None:
    """While it runs, the trajectories of the next step are generated on the same server."""
    trial = Trial(tmp_path / "runs", tmp_path / "cache", **coin.SETTINGS)
    trial.change(
        **{
            "servers.python": vllm_python(),
            "servers.shutdown_on_exit": True,
            "train.total_steps": 5,
            "eval": {"every_steps": 2, "num_tasks": 192},
            "servers.flags": [*FLAGS, "--max-num-seqs", "16"],
        }
    )
    steps = train(trial)
    evaluations = trial.records("eval")
    assert [(one["name"], one["global_step"]) for one in evaluations] == [
        ("before", 0),
        ("heldout", 2),
        ("heldout", 4),
        ("after", 5),
    ]
    assert all((one["num_tasks"], one["num_failed"]) == (192, 0) for one in evaluations)
    assert [step["stats"]["staleness_max"] for step in steps] == [0, 1, 1, 1, 1]
    assert all(step["stats"]["failed_trajectories"] == 0 for step in steps)
    for step, evaluated in ((3, evaluations[1]), (5, evaluations[2])):
        # What the step learns from was there when the evaluation had ended: nothing was left to wait for.
        waited = steps[step - 1]["timings"]["rollout"]
        assert waited < 0.2 * evaluated["seconds"], (waited, evaluated["seconds"])


class HeldJudge(StubThread):
    """A judge that answers `free` questions, and then keeps everybody waiting until `wanted` more are asked at once: a
    fake, as a real one is as slow as it is. held: for how long that was, in seconds.
    """

    def __init__(self, free: int, wanted: int) -> None:
        super().__init__()
        self.free, self.wanted, self.asked, self.held = free, wanted, 0, 0.0
        self._began = 0.0
        self._enough = asyncio.Event()

    async def answer(self, stub: HttpStub, path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "judge"}]}
        self.asked += body["max_tokens"] > 1  # a run's trial of its judge asks for one token
        if self.asked > self.free:
            self._began = self._began or time.monotonic()
            if self.asked == self.free + self.wanted:
                self.held = time.monotonic() - self._began
                self._enough.set()
            await self._enough.wait()
        return 200, {"choices": [{"message": {"role": "assistant", "content": "nothing"}}]}


TASKS, QUESTIONS, EVALUATED = 2, 2, 2
"""Of a step, a task, and an evaluation. The trajectories of a group keep the same empty memory, so that a question of
theirs is asked once.
"""


@pytest.fixture
def judge() -> Iterator[HeldJudge]:
    """Answers the evaluation before the first step, greedy and sampled; then once all is asked that two steps have."""
    with HeldJudge(2 * EVALUATED * QUESTIONS, 2 * TASKS * QUESTIONS) as held:
        yield held


def test_scores_are_waited_for_only_where_nothing_else_is_left(judge: HeldJudge, tmp_path: Path) -> None:
    """The judge answers nobody until the trajectories of the second step ask it, too: were the scores of the first step
    waited for before the next is generated, the run would stand still.
    """
    agent = {"name": "memalpha", "template": "words", "chunk_tokens": 10, "max_memory_tokens": 14, "context_tokens": 64}
    settings = {
        **coin.SETTINGS,
        "task": {"name": "facts", "train_size": 64, "min_chunks": 2, "max_chunks": 2, "num_questions": QUESTIONS},
        "task.num_keys": 256,
        "agent": {**agent, "shown_items": 2, "max_final_tokens": 5},
        "reward": {"name": "memalpha"},
        "judge": {"reader": "server", "url": judge.url, "cache": False, "timeout_s": 300.0},
        "rollout": {"max_staleness": 1, "batch_size": TASKS, "group_size": 2},
        "servers.python": vllm_python(),
        "servers.shutdown_on_exit": True,
        "train.total_steps": 4,
        "eval": {"every_steps": 0, "num_tasks": EVALUATED},
    }
    trial = Trial(tmp_path / "runs", tmp_path / "cache")
    trial.change(**settings)
    steps = train(trial)
    assert judge.held > 0
    assert judge.asked >= 4 * TASKS * QUESTIONS
    first, *others = (step["stats"] for step in steps)
    # The first step has nobody to learn from before its scores are there, and it says how long that was: not all of the
    # time that the judge took, as generation went on meanwhile.
    assert 0 < first["judge_wait_s"] < steps[0]["timings"]["rollout"]
    assert first["judge_wait_s"] < first["score_seconds"] + judge.held
    assert 0 < first["judge_share"] < 1
    assert all(one["judge_wait_s"] < first["judge_wait_s"] for one in others)
    assert all(one["failed_trajectories"] == one["unscored_questions"] == 0 for one in (first, *others))
