"""r1 to r4 and the advantages made of them, against numbers worked out by hand; and answers that nobody gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from builders import small_config
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.advantages import gigpo_advantages
from trainer.config_parts import AlgorithmConfig
from trainer.config_rewards import MemalphaRewardConfig
from trainer.judge.reader import RuleReader, Unanswered
from trainer.rewards.memalpha import MemAlphaReward
from trainer.rollout.batch import make_batch
from trainer.rollout.controller import ScoreMeter
from trainer.rollout.turn_advantages import has_signal
from trainer.types import Completion, Group, Question, Task, Trajectory, Turn, TurnRewards


def call(content: str, ok: bool = True, tool: str = "new_memory_insert") -> dict[str, Any]:
    return {"tool": tool, "ok": ok, "store": "semantic", "content": content, "message": "", "memory_id": ""}


def trajectory(*turns: list[dict[str, Any]], memory: dict[str, str] | None = None) -> Trajectory:
    told = [
        {"chunk": "bako lamp . dilu chair .", "chunk_tokens": 20, "memory_tokens": 5 * (i + 1), "calls": calls}
        for i, calls in enumerate(turns)
    ]
    details = {"memory": {"core": "", "semantic": memory or {}, "episodic": {}}, "turns": told}
    ids = [Turn("update", [1, 2], Completion([3], [-0.1], "stop", 0)) for _ in turns]
    return Trajectory("t", ids, 0.0, details=details)


def task(source: str = "facts") -> Task:
    questions = (Question("bako", ("lamp",)), Question("dilu", ("chair",)))
    return Task("t", "bako", ("lamp",), meta={"source": source}, questions=questions)


def score(one: Trajectory, asked: Task | None = None, reader: Any = None) -> float:
    reward = MemAlphaReward(MemalphaRewardConfig(beta=0.05, gamma=0.1), reader or RuleReader())
    return asyncio.run(reward.score(asked or task(), one))


def test_the_four_rewards_of_two_turns_by_hand() -> None:
    one = trajectory(
        [call("bako lamp"), call("made up"), call("x", ok=False)],  # r2 = 2/3, r4 = 1/3: one is true to the chunk
        [],  # r2 = r4 = 0
        memory={"sem_0001": "bako lamp", "sem_0002": "made up"},
    )
    total = score(one)

    # r1: one of two questions. r3: 10 tokens of memory for 40 of text.
    assert one.metrics["r1"] == one.accuracy == 0.5
    assert one.metrics["r2"] == pytest.approx((2 / 3 + 0) / 2)
    assert one.metrics["r3"] == pytest.approx(1 - 10 / 40)
    assert one.metrics["r4"] == pytest.approx((1 / 3 + 0) / 2)
    assert one.turn_rewards is not None
    assert one.turn_rewards.totals == pytest.approx([0.5 + 0.05 * 0.75 + 2 / 3 + 0.1 / 3, 0.5 + 0.05 * 0.75])
    assert total == pytest.approx(sum(one.turn_rewards.totals) / 2)


def test_a_deletion_that_worked_counts_for_r2_and_not_for_r4() -> None:
    one = trajectory([call("", tool="memory_delete"), call("bako lamp")])
    score(one)

    assert one.details["turns"][0]["r2"] == 1.0
    assert one.details["turns"][0]["r4"] == 0.5


class Silent(RuleReader):
    """A reader that answers some questions only, and no verdict."""

    def __init__(self, *known: str) -> None:
        self.known = known

    async def answer(self, question: str, memory: dict[str, Any]) -> str:
        if question not in self.known:
            raise Unanswered("status 400")
        return await super().answer(question, memory)

    async def worth_keeping(self, store: str, content: str, chunk: str) -> bool:
        raise Unanswered("no verdict")


def test_what_nobody_answers_is_counted_and_left_out_never_scored_as_zero() -> None:
    one = trajectory([call("bako lamp")], memory={"sem_0001": "bako lamp"})
    score(one, reader=Silent("bako"))

    assert one.metrics["r1"] == 1.0
    assert one.counters["unscored_questions"] == 1
    assert one.counters["unjudged_entries"] == 1
    assert [q["score"] for q in one.details["questions"]] == [1.0, None]


def test_a_trajectory_of_which_no_question_is_answered_is_left_out_of_its_group() -> None:
    failed = trajectory([call("bako lamp")])
    score(failed, reader=Silent())
    good = trajectory([call("bako lamp")], memory={"sem_0001": "bako lamp"})
    good.reward = score(good)
    config = small_config("rollout.batch_size=1")
    batch = make_batch([Group(task(), [failed, good])], config, step=1)

    assert failed.error is not None
    assert [row.trajectory for row in batch.minibatches[0]] == [1]
    assert batch.stats["failed_trajectories"] == 1


def rewarded(outcome: float, *own: float) -> Trajectory:
    one = trajectory(*([] for _ in own))
    one.turn_rewards, one.reward = TurnRewards(outcome, list(own)), outcome + sum(own) / len(own)
    return one


def row_advantages(*overrides: str) -> list[float]:
    group = Group(task(), [rewarded(1.0, 1.0, 0.0), rewarded(0.0, 1.0, 1.0)])
    config = small_config("rollout.batch_size=1", "algorithm.advantage=mean", *overrides)
    return [row.advantage for row in make_batch([group], config, step=1).minibatches[0]]


def test_grpo_compares_all_turns_of_a_group() -> None:
    # Totals 2, 1, 1, 1: their mean is 1.25.
    assert row_advantages() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_gigpo_adds_the_trajectorys_part_and_that_of_turns_of_the_same_number() -> None:
    # Outcomes 1, 0: +-0.5. Returns of turn 0: 1 + 0.5*0 and 1 + 0.5*1, of turn 1: 0 and 1.
    found = row_advantages("algorithm.turn_advantage=gigpo", "algorithm.gigpo_discount=0.5")

    assert found == pytest.approx([0.5 - 0.25, 0.5 - 0.5, -0.5 + 0.25, -0.5 + 0.5])


@pytest.mark.parametrize("how", ["grpo", "gigpo"])
def test_a_group_whose_turns_differ_is_learned_from_though_its_trajectories_tie(how: str) -> None:
    """Turn rewards (1, 0) and (0, 1): equal means, and turn advantages of both signs."""
    tie = Group(task(), [rewarded(0.0, 1.0, 0.0), rewarded(0.0, 0.0, 1.0)])
    config = small_config("rollout.batch_size=1", "algorithm.advantage=mean", f"algorithm.turn_advantage={how}")

    batch = make_batch([tie], config, step=1)

    assert {t.reward for t in tie.trajectories} == {0.5}
    assert any(row.advantage for row in batch.minibatches[0])
    assert batch.stats["zero_variance_groups"] == 0
    assert has_signal(tie, config.algorithm)


@pytest.mark.parametrize("how", ["grpo", "gigpo"])
def test_a_group_whose_turns_are_all_alike_is_not(how: str) -> None:
    same = Group(task(), [rewarded(0.5, 1.0, 1.0), rewarded(0.5, 1.0, 1.0)])
    config = small_config("rollout.batch_size=1", f"algorithm.turn_advantage={how}")

    batch = make_batch([same], config, step=1)

    assert not any(row.advantage for row in batch.minibatches[0])
    assert batch.stats["zero_variance_groups"] == 1
    assert not has_signal(same, config.algorithm)


def test_gigpos_signal_is_that_of_the_advantages_it_gives() -> None:
    """Totals differ between turns of other numbers only, which gigpo does not compare."""
    group = Group(task(), [rewarded(0.0, 1.0, 0.0), rewarded(0.0, 1.0, 0.0)])

    assert has_signal(group, AlgorithmConfig(turn_advantage="grpo"))
    assert not has_signal(group, AlgorithmConfig(turn_advantage="gigpo"))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_group_has_a_signal_exactly_where_a_row_has_an_advantage(parts: list[list[float]]) -> None:
    plain = small_config("rollout.batch_size=1")
    for how in ("grpo", "gigpo"):
        config = plain.model_copy(update={"algorithm": AlgorithmConfig(advantage="mean", turn_advantage=how)})
        group = Group(task(), [rewarded(*values) for values in parts])

        rows = make_batch([group], config, step=1).minibatches[0]

        assert has_signal(group, config.algorithm) == any(row.advantage != 0 for row in rows)


def test_gigpo_with_turns_of_unequal_number_and_a_weight() -> None:
    found = gigpo_advantages(
        torch.tensor([3.0, 1.0]),
        torch.tensor([1.0, 2.0, 4.0, 0.0]),
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([7, 7]),
        "mean",
        1.0,
        2.0,
    )

    # Returns 7, 6, 4 and 0: turn 0 has two of them (mean 3.5), the others stand alone.
    assert found.tolist() == pytest.approx([2 * 1 + 3.5, 2 * 1, 2 * 1, 2 * -1 - 3.5])


def test_the_normalised_form_divides_by_the_deviation_over_all_turns() -> None:
    found = row_advantages("algorithm.advantage=mean_std")

    # Squares .75^2 + 3 * .25^2 = .75, over 3: deviation .5.
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_every_turn_that_is_rewarded_apart_can_lose_by_its_length() -> None:
    group = Group(task(), [rewarded(1.0, 1.0, 0.0), rewarded(0.0, 1.0, 1.0)])
    limit = small_config().agent.max_memory_tokens
    long = group.trajectories[0].turns[1].completion
    long.token_ids[:], long.logprobs[:] = [3] * limit, [-0.1] * limit
    settings = ("algorithm.overlong_tokens=1", "algorithm.overlong_penalty=0.5", "algorithm.advantage=mean")

    batch = make_batch([group], small_config("rollout.batch_size=1", *settings), step=1)

    # Totals 2, 1 - 0.5, 1, 1: their mean is 1.125.
    assert [row.advantage for row in batch.minibatches[0]] == pytest.approx([0.875, -0.625, -0.125, -0.125])
    assert batch.stats["overlong_penalty"] == pytest.approx(-0.25 / 2)


def test_controls_permute_or_turn_round_the_rewards_of_turns() -> None:
    assert row_advantages("control.rewards=flipped") == pytest.approx([-0.75, 0.25, 0.25, 0.25])
    assert sorted(row_advantages("control.rewards=shuffled")) == pytest.approx([-0.25, -0.25, -0.25, 0.75])
    assert row_advantages("control.zero_advantages=true") == [0.0] * 4


def test_the_meter_counts_scoring_that_nothing_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("trainer.rollout.controller.time.monotonic", lambda: now)
    meter = ScoreMeter()
    first, second = meter.during("generating"), meter.during("scoring")

    first.__enter__()
    now = 1.0
    second.__enter__()  # scored beside what is generated
    now = 3.0
    first.__exit__(None, None, None)  # from here on only scored
    now = 7.0
    second.__exit__(None, None, None)
    now = 9.0

    assert meter.take() == 4.0
    assert meter.take() == 0.0
