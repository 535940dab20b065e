"""Dynamic sampling: which groups a step takes, and which tasks it has then consumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import small_config, small_parts

from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.rollout.sampler import EmbeddedSampler
from trainer.schedule import Schedule
from trainer.train.distributed import single_world
from trainer.types import Completion, Group, Task, Trajectory, Turn, TurnRewards

PARTS = small_parts()


class Scored(EmbeddedSampler):
    """The sampler over groups whose rewards are laid down here: random weights would earn none."""

    def __init__(self, rewards: list[list[float]], turns: list[list[list[float]]] | None, *settings: str) -> None:
        config = small_config("rollout.batch_size=2", "rollout.group_size=2", "train.total_steps=2", *settings)
        engine = PARTS.engine()
        controller = RolloutController(PARTS.agent, engine, config.seed)
        course = Schedule.of(config, PARTS.source.train_size)
        super().__init__(config, PARTS.source, course, engine, controller, single_world(), PARTS.lm, Any)
        self.rewards, self.turns = rewards, turns
        self.asked: list[str] = []

    def groups(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        found = []
        for task in tasks:
            number = len(self.asked)
            self.asked.append(task.id)
            found.append(Group(task, [self._one(task, number, sample) for sample in range(2)]))
        return found

    def _one(self, task: Task, number: int, sample: int) -> Trajectory:
        turn = Turn("update", [1], Completion([2], [-0.1], "stop", 0))
        one = Trajectory(task.id, [turn, turn], self.rewards[number][sample])
        if self.turns is not None:
            one.turn_rewards = TurnRewards(0.0, self.turns[number][sample])
        return one


def taken(sampler: Scored) -> list[str]:
    return [group.task.id for group in sampler.batch(1)]


def test_groups_of_equal_rewards_are_replaced() -> None:
    sampler = Scored([[1, 1], [0, 1], [0, 0], [1, 0]], None, "rollout.refill=true")

    assert taken(sampler) == [sampler.asked[1], sampler.asked[3]]
    assert sampler.cursor.next_task == 4
    assert sampler.stats()["refilled_groups"] == 2


def test_groups_are_kept_whose_turns_differ_though_their_means_tie() -> None:
    ties = [[[1.0, 0.0], [0.0, 1.0]]] * 2

    assert taken(Scored([[0.5, 0.5]] * 4, ties * 2, "rollout.refill=true")) == ["train-0", "train-1"]
    sampler = Scored([[0.5, 0.5]] * 4, [[[0.5, 0.5]] * 2, *ties, [[0.5, 0.5]] * 2], "rollout.refill=true")
    assert taken(sampler) == [sampler.asked[1], sampler.asked[2]]


def test_the_prompts_of_an_evaluation_are_not_counted_with_those_of_the_step_after_it() -> None:
    config = small_config("rollout.batch_size=2", "rollout.group_size=4", "train.total_steps=2")
    shares = []
    for evaluated in (0, 3):
        engine = PARTS.engine()
        controller = RolloutController(PARTS.agent, engine, config.seed)
        course = Schedule.of(config, PARTS.source.train_size)
        parts = (engine, controller, single_world(), PARTS.lm, Any)
        sampler = EmbeddedSampler(config, PARTS.source, course, *parts)
        sampler.groups([PARTS.source.train(7 + i) for i in range(evaluated)], SamplingPlan("eval", 1, 0.0))
        sampler.batch(1)
        shares.append(sampler.stats()["cached_share"])

    assert shares[0] == shares[1] > 0


def test_without_it_the_first_groups_are_taken() -> None:
    sampler = Scored([[1, 1], [0, 1]], None)

    assert taken(sampler) == sampler.asked
    assert "refilled_groups" not in sampler.stats()


def test_dapo_replaces_them_by_itself_and_looks_at_right_and_wrong_alone() -> None:
    """Groups whose answers differ in length only are left out, too, though their lengths cost them something."""
    settings = ("algorithm.name=dapo", "algorithm.overlong_tokens=1")
    sampler = Scored([[1, 1], [0, 1], [0, 0], [1, 0]], None, *settings)

    assert taken(sampler) == [sampler.asked[1], sampler.asked[3]]
    assert taken(Scored([[1, 1], [0, 0]], None, *settings, "rollout.refill=false")) == ["train-0", "train-1"]
