"""The rollout controller: tasks in, groups of scored trajectories out, all in flight at once.

Every random choice is seeded by (run seed, purpose, task, sample, turn), so a batch of rollouts is a function of the
weights and of what was asked for.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.agents.base import AnyAgent, RolloutOptions
from trainer.engines.base import Engine, EngineError, EngineGoneError
from trainer.engines.embedded import GenerationCancelledError
from trainer.errors import RunError, UserError
from trainer.rewards import Begun, Boxed, Reward
from trainer.seeding import derive_seed
from trainer.types import Group, Task, Trajectory

log = logging.getLogger(__name__)

STOP_LOOK_S = 0.5
"""How often a reward's wait is interrupted by the question whether the run is to stop, in seconds."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How a batch of tasks is rolled out.

    purpose: names the seeds apart (training, greedy evaluation …). group_size: trajectories per task. temperature: 0
    is greedy. blank_memory, banned_final_ids: see `RolloutOptions`. method: of `trainer.agents.ways`, how the documents
    are read; empty: by the agent as it is.
    """

    purpose: str
    group_size: int = 1
    temperature: float = 1.0
    blank_memory: bool = False
    banned_final_ids: tuple[int, ...] = ()
    method: str = ""


class RolloutController:
    """Runs an agent on an engine. `stop_requested` is asked between turns; True cancels the batch.

    reward: scores the trajectories. window: tokens that a conversation of the agent may have; 0: the agent sees to
    that. ways: who reads by `SamplingPlan.method`; they see to the window themselves.
    """

    def __init__(
        self,
        agent: AnyAgent,
        engine: Engine,
        seed: int,
        stop_requested: Callable[[], bool] = lambda: False,
        reward: Reward | None = None,
        window: int = 0,
        ways: Mapping[str, AnyAgent] | None = None,
    ) -> None:
        self.agent, self.ways = agent, ways or {}
        self.reward = reward or Boxed()
        self.meter = ScoreMeter()
        self.window = window
        self.engine = engine
        self.seed = seed
        self.stop_requested = stop_requested

    def run(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """Roll out every task `plan.group_size` times and score the answers. Groups come in the order of the tasks.

        Raises:
            UserError: a task breaks a limit of the configuration, or an agent of the user's own failed on all of them.
            RunError: every request failed, or the engine has gone.
            RolloutInterruptedError: `stop_requested` said so; no trajectory is returned.
        """
        return asyncio.run(self.groups(tasks, plan))

    async def groups(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """As `run`, for an event loop that runs already."""
        reader, prepared = self._reader(plan), []
        for task in tasks:
            # A way to read takes BM25 and whole documents: a tenth of a second, in which trajectories under way go on.
            prepared.append(await asyncio.to_thread(reader.prepare, task) if plan.method else reader.prepare(task))
        jobs = [
            asyncio.ensure_future(self._trajectory(task, one, sample, plan))
            for task, one in zip(tasks, prepared, strict=True)
            for sample in range(plan.group_size)
        ]
        done = await _all_of(jobs)
        self._check_failures(done)
        size = plan.group_size
        return [Group(task, done[i * size : (i + 1) * size]) for i, task in enumerate(tasks)]

    def _reader(self, plan: SamplingPlan) -> AnyAgent:
        return self.ways[plan.method] if plan.method else self.agent

    @property
    def _is_ours(self) -> bool:
        """Whether the agent's class is ours; one of the user's own that inherits it is not."""
        return "builtin" in vars(type(self.agent))

    @property
    def asks_others(self) -> bool:
        """Whether scores may have to be waited for: the reward counts what it asks."""
        return callable(getattr(self.reward, "counts", None))

    async def group(
        self, task: Task, prepared: Any, plan: SamplingPlan, generated: Callable[[], None] = lambda: None
    ) -> Group:
        """One task's group.

        prepared: what the agent's `prepare` made of the task. generated: called when nothing but scores is missing.
        """
        left = plan.group_size

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                generated()

        jobs = [
            asyncio.ensure_future(self._trajectory(task, prepared, sample, plan, one_less))
            for sample in range(plan.group_size)
        ]
        return Group(task, await _all_of(jobs))

    def check(self, groups: Sequence[Group]) -> None:
        """Raise when all of these have failed: RunError, or UserError where an agent of the user's own is to blame."""
        self._check_failures([t for group in groups for t in group.trajectories])

    async def _trajectory(
        self, task: Task, prepared: Any, sample: int, plan: SamplingPlan, generated: Callable[[], None] = lambda: None
    ) -> Trajectory:
        def seed_of_turn(turn: int) -> int:
            if self.stop_requested():
                raise RolloutInterruptedError
            return derive_seed(self.seed, plan.purpose, task.id, sample, turn)

        begin = getattr(self.reward, "begin", None)
        begun: Begun | None = begin() if callable(begin) else None
        options = RolloutOptions(plan.temperature, seed_of_turn, plan.blank_memory, plan.banned_final_ids)
        if begun is not None:
            options = replace(options, turn_read=begun.turn_read)
        try:
            return await self._read_and_scored(self._reader(plan), task, prepared, sample, options, begun, generated)
        finally:
            if begun is not None:
                begun.close()

    async def _read_and_scored(
        self,
        reader: AnyAgent,
        task: Task,
        prepared: Any,
        sample: int,
        options: RolloutOptions,
        begun: Begun | None,
        generated: Callable[[], None],
    ) -> Trajectory:
        try:
            with self.meter.during("generating"):
                trajectory = await reader.rollout(prepared, self.engine, options)
        except (RolloutInterruptedError, EngineGoneError, asyncio.CancelledError):
            raise
        except GenerationCancelledError as error:
            raise RolloutInterruptedError from error
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, EngineError):
                raise
            # One lost request must not cost the step: the trajectory counts as failed, with reward 0.
            log.warning("trajectory %s/%d failed: %s: %s", task.id, sample, type(error).__name__, error)
            if not isinstance(error, EngineError):
                log.warning("%s", traceback.format_exc())
            generated()
            return Trajectory(task.id, [], reward=0.0, error=f"{type(error).__name__}: {error}")
        generated()  # not where it was given up: nothing new may begin while a run ends
        if reader is self.agent:
            self._check_window(trajectory)
        trajectory.begun = begun
        with self.meter.during("scoring"):
            trajectory.reward = await self._score(task, trajectory)
        trajectory.begun = None
        return trajectory

    def _check_failures(self, done: Sequence[Trajectory]) -> None:
        """A batch that failed as a whole is no step: nothing could be learned from it, nor from the next one."""
        errors = [t.error for t in done if t.error is not None]
        if not errors or len(errors) < len(done):
            return
        if self._is_ours:
            raise RunError(
                f"every one of {len(done)} trajectories failed, the first with: {errors[0]}. main.log says more"
            )
        raise UserError(
            f"the agent {type(self.agent).__name__} failed on every one of {len(done)} trajectories, on the first "
            f"with {errors[0]}: main.log has the traceback"
        )

    def _check_window(self, trajectory: Trajectory) -> None:
        longest = max((len(t.prompt_ids) + len(t.completion.token_ids) for t in trajectory.turns), default=0)
        if self.window and longest > self.window:
            raise UserError(
                f"task {trajectory.task_id}: the agent sent a conversation of {longest} tokens and {self.window} are "
                "the most, by the model's context window, train.max_tokens_per_mb and, where that is more, the agent's "
                "longest_conversation(): let it send less at a time"
            )

    async def _score(self, task: Task, trajectory: Trajectory) -> float:
        """The reward. One that fails ends the run: a reward of 0 in its place would be learned from."""
        name = type(self.reward).__name__
        try:
            found = self.reward.score(task, trajectory)
            value = float(await self._unless_stopped(found) if inspect.isawaitable(found) else found)
        except (UserError, RolloutInterruptedError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.exception("reward %s of task %s", name, task.id)
            raise UserError(
                f"the reward {name} failed on task {task.id}: {type(error).__name__}: {error}; main.log has the "
                "traceback"
            ) from error
        if not math.isfinite(value):
            raise UserError(f"the reward {name} of task {task.id} is {value}: return a finite number")
        if problem := _unusable(trajectory):
            raise UserError(f"the reward {name} of task {task.id}: {problem}")
        return value

    async def _unless_stopped(self, waiting: Awaitable[float]) -> float:
        """What a reward that waits for others returns; a run that is to stop does not wait for them."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=STOP_LOOK_S)
                if not task.done() and self.stop_requested():
                    raise RolloutInterruptedError
            return task.result()
        finally:
            task.cancel()


def _unusable(trajectory: Trajectory) -> str:
    """What a reward has left in a trajectory that no step can be made of; empty where there is nothing.

    Its metrics are plain numbers afterwards: what comes of numpy or torch goes into no JSON.
    """
    turns, accuracy = trajectory.turn_rewards, trajectory.accuracy
    if turns is not None and len(turns.turns) != len(trajectory.turns):
        return f"turn_rewards has {len(turns.turns)} turns of {len(trajectory.turns)}: give every turn a number"
    if turns is not None and not all(map(math.isfinite, turns.totals)):
        return f"turn_rewards is {turns.totals}: give every turn a finite number"
    if accuracy is not None and not math.isfinite(accuracy):
        return f"accuracy is {accuracy}: give a finite number, or None"
    try:
        trajectory.metrics = {str(key): float(value) for key, value in trajectory.metrics.items()}
    except (TypeError, ValueError) as error:
        return f"metrics has what is no number ({error}): keep anything else in details"
    return ""


async def _all_of(jobs: list[asyncio.Task[Trajectory]]) -> list[Trajectory]:
    """What all return; where one fails the others are cancelled and waited for."""
    try:
        return list(await asyncio.gather(*jobs))
    except BaseException:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        raise


class RolloutInterruptedError(Exception):
    """The batch was given up because the run is to stop."""


class ScoreMeter:
    """Adds up the seconds in which trajectories were scored while none was generated.

    What a judge can cost a run at most: while anything is generated beside it, its time is hidden.
    """

    def __init__(self) -> None:
        self._running = {"generating": 0, "scoring": 0}
        self._since, self._total, self._taken = time.monotonic(), 0.0, 0.0

    @contextmanager
    def during(self, what: Literal["generating", "scoring"]) -> Iterator[None]:
        """A trajectory is generated, or scored, during the block."""
        self._turn()
        self._running[what] += 1
        try:
            yield
        finally:
            self._turn()
            self._running[what] -= 1

    def take(self) -> float:
        """Seconds since the last call, of blocks that have begun or ended since."""
        taken, self._taken = self._taken, self._total
        return self._total - taken

    def _turn(self) -> None:
        now = time.monotonic()
        if self._running["scoring"] and not self._running["generating"]:
            self._total += now - self._since
        self._since = now
