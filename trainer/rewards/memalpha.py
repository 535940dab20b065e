"""The rewards of Mem-alpha (Wang et al. 2025, section 3): what turn t of a trajectory earns.

    r(t) = r1 + r2(t) + beta * r3 + gamma * r4(t)

    r1      mean score of the questions, answered from the final memory by a frozen reader (trainer.rewards.sources)
    r2(t)   share of the turn's calls that were carried out; 0 without a call
    r3      1 - tokens of the final memory / tokens of the text
    r4(t)   share of the turn's calls that wrote an entry which a judge finds valid; 0 without a call

Questions and verdicts without an answer are left out of their means and counted, never scored as 0. A trajectory none
of whose questions was answered has failed, and nothing is learned from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from trainer.agents.memory import DELETE
from trainer.config_rewards import MemoryRewardConfig
from trainer.judge.reader import Reader, Unanswered
from trainer.rewards.sources import needs_judge, scorer
from trainer.types import Question, Task, Trajectory, TurnRewards

log = logging.getLogger(__name__)

Turn = dict[str, Any]
"""A turn in the agent's details."""
Quality = tuple[float, int]
"""r4 of a turn, and the number of its entries without a verdict."""


class EarlyVerdicts:
    """Verdicts on the entries of one trajectory, asked for while the agent reads on.

    At the end only those of the last turns are missing. `of` asks for turns that `turn_read` was not called for.
    """

    def __init__(self, quality: Callable[[Turn], Coroutine[Any, Any, Quality]]) -> None:
        self._quality = quality
        self._verdicts: dict[int, tuple[Turn, asyncio.Task[Quality]]] = {}

    def turn_read(self, turn: Turn) -> None:
        """See Begun."""
        # Keeping the turn keeps its id unique.
        self._verdicts[id(turn)] = turn, asyncio.ensure_future(self._quality(turn))

    def of(self, turn: Turn) -> asyncio.Task[Quality]:
        """r4 of a turn, and the number of its entries without a verdict."""
        if id(turn) not in self._verdicts:
            self.turn_read(turn)
        return self._verdicts[id(turn)][1]

    def close(self) -> None:
        """See Begun."""
        for _, task in self._verdicts.values():
            if not task.cancel() and not task.cancelled():
                task.exception()  # of a trajectory that was given up: marks it as seen
        self._verdicts.clear()


class MemAlphaReward:
    """Reward over the `details` of agents.memalpha; sets turn_rewards, metrics and accuracy (r1)."""

    def __init__(self, config: MemoryRewardConfig, reader: Reader) -> None:
        self.config, self.reader = config, reader

    def begin(self) -> EarlyVerdicts:
        """See Reward."""
        return EarlyVerdicts(self._turn_quality)

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        """Mean reward of the turns. Raises RunError where no judge answers any more."""
        began = time.perf_counter()
        memory, turns = trajectory.details["memory"], trajectory.details["turns"]
        questions = task.questions or (Question(task.question, task.answers),)
        source = str(task.meta.get("source", ""))
        answers = asyncio.gather(*(self._question(source, one, memory) for one in questions))
        begun = trajectory.begun or self.begin()
        verdicts = asyncio.gather(*map(begun.of, turns))
        try:
            answered, quality = await answers, await verdicts
        finally:
            answers.cancel()
            verdicts.cancel()
            await asyncio.gather(answers, verdicts, return_exceptions=True)  # wait for what was cancelled
        trajectory.details["questions"] = answered
        trajectory.details["source"] = source
        scores = [one["score"] for one in answered if one["score"] is not None]
        trajectory.counters["unscored_questions"] = len(answered) - len(scores)
        trajectory.counters["unjudged_entries"] = sum(missing for _, missing in quality)
        if not scores:
            trajectory.error = f"none of {len(answered)} questions could be answered by the judge"
            log.warning("task %s: %s; it is left out of its group", task.id, trajectory.error)
            trajectory.turns = []
            return 0.0
        r1 = sum(scores) / len(scores)
        r3 = compression(turns)
        parts = [self._own_part(turn, r4) for turn, (r4, _) in zip(turns, quality, strict=True)]
        trajectory.turn_rewards = TurnRewards(r1 + self.config.beta * r3, parts)
        trajectory.accuracy = r1
        count = max(len(turns), 1)
        trajectory.metrics = {
            "r1": r1,
            "r2": sum(turn["r2"] for turn in turns) / count,
            "r3": r3,
            "r4": sum(r4 for r4, _ in quality) / count,
            "memory_tokens": float(turns[-1]["memory_tokens"]) if turns else 0.0,
            "score_seconds": time.perf_counter() - began,
        }
        return sum(trajectory.turn_rewards.totals) / count

    def counts(self) -> dict[str, float]:
        """What the reader counted since the last call."""
        return self.reader.counts()

    def _own_part(self, turn: dict[str, Any], r4: float) -> float:
        calls = turn["calls"]
        turn["r2"], turn["r4"] = (sum(call["ok"] for call in calls) / len(calls) if calls else 0.0), r4
        own: float = turn["r2"] + self.config.gamma * r4
        return own

    async def _question(self, source: str, one: Question, memory: dict[str, Any]) -> dict[str, Any]:
        """A question with its answer and score; the score is None where it could not be answered or judged."""
        verdict: dict[str, Any] = {"question": one.question, "answers": list(one.answers), "answer": "", "score": None}
        try:
            verdict["answer"] = await self.reader.answer(one.question, memory)
            if needs_judge(source):
                right = await self.reader.agrees(one.question, " ; ".join(one.answers), verdict["answer"])
                verdict["score"] = float(right)
            else:
                verdict["score"] = scorer(source)(verdict["answer"], one.answers)
        except Unanswered as problem:
            verdict["problem"] = str(problem)
        return verdict

    async def _turn_quality(self, turn: Turn) -> Quality:
        calls = turn["calls"]
        if not self.config.gamma or not calls:
            return 0.0, 0
        verdicts = await asyncio.gather(*(self._verdict(call, turn["chunk"]) for call in calls))
        for call, verdict in zip(calls, verdicts, strict=True):
            call["valid"] = verdict
        known = [verdict for verdict in verdicts if verdict is not None]
        return (sum(known) / len(known) if known else 0.0), len(verdicts) - len(known)

    async def _verdict(self, call: dict[str, Any], chunk: str) -> bool | None:
        """Whether a call wrote something worth keeping; None without a verdict."""
        if not call["ok"] or call["tool"] == DELETE:
            return False
        try:
            return await self.reader.worth_keeping(call["store"], call["content"], chunk)
        except Unanswered:
            return None


def compression(turns: list[dict[str, Any]]) -> float:
    """r3: 1 - tokens of the memory after the last turn / tokens of all chunks; negative where the memory is longer."""
    read = sum(turn["chunk_tokens"] for turn in turns)
    return 1.0 - turns[-1]["memory_tokens"] / read if read else 0.0
