"""The reward of reading: the answer's F1, and while a run is young a bonus for memories that hold the gold answer.

The answer alone says little of fifty memories before it: the bonus shows early which of them kept what matters. It
ends, so that a memory is in the end worth what the answer makes of it.
"""

from __future__ import annotations

from typing import Any

from trainer.config_rewards import ReadingRewardConfig
from trainer.rewards.qa import extract_answer, f1, normalize, sub_em_1way
from trainer.types import Task, Trajectory

CLOSED = frozenset({"yes", "no"})
"""Answers that stand in a memory by chance."""


class ReadingReward:
    """F1 of the answer plus `memory_bonus` times the share of memories with a gold answer, falling to 0 over the run.

    Sets accuracy, which evaluations count, to F1 alone, and the metric memory_holds to the share.
    """

    def __init__(self, config: ReadingRewardConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """See Reward; the step is that of the weights which read the first section."""
        text = trajectory.answer_text
        trajectory.accuracy = f1(extract_answer(text) or text, task.answers)
        golds = [answer for answer in task.answers if normalize(answer) not in CLOSED]
        written = [turn.completion for turn in trajectory.turns if turn.kind == "update"]
        if not golds or not written:
            return trajectory.accuracy
        memories = (str(self.tokenizer.decode(one.token_ids, skip_special_tokens=True)) for one in written)
        share = sum(sub_em_1way(memory, golds) for memory in memories) / len(written)
        trajectory.metrics["memory_holds"] = share
        left = max(0.0, 1.0 - written[0].version / self.config.memory_bonus_steps)
        return trajectory.accuracy + self.config.memory_bonus * left * share
