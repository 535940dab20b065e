"""Reward of a mathematical answer, as AReaL has it: (verdict - bias) · scale, the verdict 1 when right and -1 when not.

Answers are compared in processes that can be killed (`trainer.grading`): no answer can stop a run.
"""

from __future__ import annotations

import asyncio
import os

from trainer.config_tasks import ProblemsConfig
from trainer.grading import Verdict
from trainer.grading.extract import final_answer, last_box
from trainer.grading.pool import GradingPool
from trainer.types import Task, Trajectory

MOST_WORKERS = 16


class MathReward:
    """Scores the final answer of a response; a trajectory's accuracy is 1 or 0."""

    def __init__(self, config: ProblemsConfig) -> None:
        self.config = config
        self._pool: GradingPool | None = None

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        """The reward; a response that was cut off, or has no final answer, is wrong."""
        answer = final_answer(trajectory.answer_text).text
        verdict = await self._verdict(task, answer) if answer else None
        right = verdict is not None and verdict.right
        if verdict is not None and verdict.reason.startswith("gave up"):
            trajectory.counters["grading_gave_up"] = 1
        trajectory.accuracy = float(right)
        return ((1.0 if right else -1.0) - self.config.reward_bias) * self.config.reward_scale

    async def _verdict(self, task: Task, answer: str) -> Verdict:
        if self._pool is None:
            self._pool = GradingPool(min(os.cpu_count() or 1, MOST_WORKERS))
        truths = [last_box(text) or text for text in task.answers]
        return await asyncio.wrap_future(self._pool.submit(truths, answer))
