"""From rollouts to training rows: groups, failures, controls, mini-batches and weights. Real engine, random weights."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Parts, RecordingEngine, gradients, learner, relative_difference, small_config, small_parts
from tokenversions import token_versions

from clusterkit.runs.trace.source import read_groups
from trainer.config_rewards import MathRewardConfig
from trainer.config_tasks import MathConfig
from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.http import HangsServersError
from trainer.errors import RunError, UserError
from trainer.rollout.batch import RewardMetrics, distinct_tokens, make_batch, turn_rows
from trainer.rollout.controller import RolloutController, RolloutInterruptedError, SamplingPlan
from trainer.rollout.record import write_rollouts
from trainer.types import Completion, Group, Row, SamplingParams, Task, Trajectory, Turn, TurnRewards, packed_ids

PARTS = small_parts()
GROUPS = PARTS.rollouts()


def batch_rows(groups: list[Group] | None = None, *overrides: str, step: int = 1) -> list[Row]:
    return [row for rows in make_batch(groups or GROUPS, small_config(*overrides), step).minibatches for row in rows]


def rewards(groups: list[Group]) -> list[list[float]]:
    return [[t.reward for t in group.trajectories] for group in groups]


def test_every_turn_of_a_trajectory_has_its_advantage() -> None:
    batch = make_batch(GROUPS, PARTS.config, step=1)
    flat = [t for group in GROUPS for t in group.trajectories]
    expected = [r - sum(group) / len(group) for group in rewards(GROUPS) for r in group]

    rows = batch.minibatches[0]
    assert batch.advantages == pytest.approx(expected)
    assert [row.advantage for row in rows] == pytest.approx([expected[row.trajectory] for row in rows])
    assert Counter(row.trajectory for row in rows) == {i: len(t.turns) for i, t in enumerate(flat)}
    assert len(set(Counter(row.trajectory for row in rows).values())) > 1  # documents of several lengths


def test_split_credit_reaches_the_rows() -> None:
    turns = Counter(row.trajectory for row in batch_rows())

    for shared, split in zip(batch_rows(), batch_rows(None, "algorithm.credit=split"), strict=True):
        assert split.advantage == pytest.approx(shared.advantage / turns[shared.trajectory])


@pytest.mark.parametrize("norm", ["token", "trajectory_mean"])
def test_weights_sum_to_one_in_every_minibatch(norm: str) -> None:
    config = small_config("train.minibatches=2", f"algorithm.loss_norm={norm}")
    batch = make_batch(GROUPS, config, step=1)

    assert len(batch.minibatches) == 2
    for rows in batch.minibatches:
        assert sum(row.weight * len(row.response_ids) for row in rows) == pytest.approx(1)
    # Tasks are not torn: eight trajectories, two groups of four, in each half.
    assert [sorted({row.trajectory for row in rows}) for rows in batch.minibatches] == [[*range(8)], [*range(8, 16)]]


def test_constant_weights_are_the_same_for_short_and_long_documents() -> None:
    short = copy.deepcopy(GROUPS)
    for one in (t for group in short for t in group.trajectories):
        del one.turns[:-1]  # no update at all
    agent, task = PARTS.config.agent, PARTS.config.task
    limit = task.max_chunks * agent.max_memory_tokens + agent.max_final_tokens

    found = [{row.weight for row in batch_rows(groups, "algorithm.name=dr_grpo")} for groups in (GROUPS, short)]

    assert found == [{1 / (16 * limit)}] * 2


def test_the_constant_can_be_set_and_counts_answers_that_were_left_out() -> None:
    settings = ("algorithm.loss_norm=constant", "algorithm.response_limit=50", "algorithm.drop_truncated_final=true")
    finals = copy.deepcopy(GROUPS)
    for one in (t for group in finals for t in group.trajectories):
        del one.turns[:-1]

    rows = batch_rows(finals, *settings)

    assert len(rows) < 16
    assert {row.weight for row in rows} == {1 / (16 * 50)}


def test_truncated_answers_can_be_left_out_of_the_rows_but_not_of_the_mean() -> None:
    everything, kept = batch_rows(), batch_rows(None, "algorithm.drop_truncated_final=true")
    truncated = sum(t.counters.get("truncated_final", 0) for group in GROUPS for t in group.trajectories)

    assert truncated > 0
    assert len(everything) - len(kept) == truncated
    by_trajectory = {row.trajectory: row.advantage for row in everything}
    assert all(row.advantage == by_trajectory[row.trajectory] for row in kept)
    assert sum(row.weight * len(row.response_ids) for row in kept) == pytest.approx(1)


OVERLONG = ("algorithm.overlong_tokens=3", "algorithm.overlong_penalty=0.5")


def test_a_long_answer_loses_reward_and_a_long_memory_does_not() -> None:
    """Limits 3 (memory) and 4 (answer): an answer of 2 tokens loses a sixth, one of 4 a half."""
    answers = [[len(t.turns[-1].completion.token_ids) for t in group.trajectories] for group in GROUPS]
    lost = [[0.5 * (length - 1) / 3 for length in group] for group in answers]
    shaped = [[r - x for r, x in zip(*pair, strict=True)] for pair in zip(rewards(GROUPS), lost, strict=True)]

    batch = make_batch(GROUPS, small_config(*OVERLONG), step=1)

    assert {length for group in answers for length in group} >= {1, 2, 4}
    assert batch.advantages == pytest.approx([r - sum(group) / 4 for group in shaped for r in group])
    assert batch.stats["overlong_penalty"] == pytest.approx(-sum(map(sum, lost)) / 16)
    assert batch.stats["final_reward"] == pytest.approx(sum(map(sum, shaped)) / 16)
    # What is reported as the task's reward knows nothing of it.
    assert batch.stats["task_reward"] == pytest.approx(sum(map(sum, rewards(GROUPS))) / 16)


def test_the_punishment_is_scaled_as_the_reward_of_problems_is() -> None:
    config = small_config(*OVERLONG)
    scaled = config.model_copy(update={"reward": MathRewardConfig(), "task": MathConfig(reward_scale=5.0)})

    plain, five = (make_batch(GROUPS, c, step=1).stats["overlong_penalty"] for c in (config, scaled))

    assert plain < 0
    assert five == pytest.approx(5 * plain)


def test_without_it_no_length_counts_and_nothing_is_told() -> None:
    plain = make_batch(GROUPS, small_config(), step=1)

    assert "overlong_penalty" not in plain.stats
    assert plain.advantages == make_batch(GROUPS, small_config("algorithm.overlong_tokens=0"), step=1).advantages


def test_controls_change_rewards_as_they_say() -> None:
    true = [r for group in rewards(GROUPS) for r in group]

    def seen(control: str, step: int = 1) -> tuple[dict[str, float], list[float]]:
        batch = make_batch(GROUPS, small_config(f"control.rewards={control}"), step)
        return batch.stats, batch.advantages

    plain, flipped, shuffled = seen("true"), seen("flipped"), seen("shuffled")
    assert flipped[1] == pytest.approx([-a for a in plain[1]])
    assert flipped[0]["final_reward"] == pytest.approx(-sum(true) / 16)
    assert shuffled[1] != plain[1]
    assert shuffled[0]["final_reward"] == pytest.approx(sum(true) / 16)
    assert seen("shuffled") == shuffled
    assert seen("shuffled", step=2)[1] != shuffled[1]
    # What is reported as the task's reward is the true one under every control.
    assert {stats["task_reward"] for stats, _ in (plain, flipped, shuffled)} == {sum(true) / 16}


def test_the_steps_numbers_are_counted_from_the_turns() -> None:
    stats = make_batch(GROUPS, PARTS.config, step=1).stats
    turns = [turn for group in GROUPS for t in group.trajectories for turn in t.turns]
    prompt, sampled = sum(len(t.prompt_ids) for t in turns), sum(len(t.completion.token_ids) for t in turns)
    cut = Counter((turn.kind, turn.completion.finish_reason) for turn in turns)

    assert (stats["turns"], stats["n_seqs"]) == (len(turns), 16)
    assert (stats["prompt_tokens"], stats["sampled_tokens"], stats["n_tokens"]) == (prompt, sampled, prompt + sampled)
    assert stats["truncated_memory"] == cut["update", "length"]
    assert stats["truncated_final"] == cut["final", "length"]
    assert stats["no_eos_ratio"] == pytest.approx(cut["final", "length"] / 16)
    assert stats["zero_variance_groups"] == 0


class FailingEngine(RecordingEngine):
    """The real engine, which loses `count` requests from that of number `lost` on."""

    def __init__(self, parts: Parts, lost: int, error: Exception, count: int = 1) -> None:
        super().__init__(parts.engine())
        self.lost, self.error, self.count = lost, error, count

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        if self.count and len(self.seen) >= self.lost:
            self.count -= 1
            raise self.error
        return await super().generate(prompt_ids, params, key=key)


@pytest.mark.parametrize("error", [ConnectionError("the server is gone"), EngineError("the server is gone")])
def test_a_lost_request_costs_one_trajectory_and_is_counted(error: Exception) -> None:
    groups = PARTS.rollouts(engine=FailingEngine(PARTS, 16, error))
    flat = [t for group in groups for t in group.trajectories]
    failed = [i for i, t in enumerate(flat) if t.error]
    flat[failed[0]].reward = 0.0

    batch = make_batch(groups, PARTS.config, step=1)

    assert len(failed) == 1
    assert flat[failed[0]].error == f"{type(error).__name__}: the server is gone"
    assert failed[0] not in {row.trajectory for row in batch.minibatches[0]}
    assert batch.stats["failed_trajectories"] == 1
    group = groups[failed[0] // 4]
    ok = [t.reward for t in group.trajectories if not t.error]
    found = [batch.advantages[i] for i in range(failed[0] // 4 * 4, failed[0] // 4 * 4 + 4) if i not in failed]
    assert found == pytest.approx([r - sum(ok) / 3 for r in ok])  # the lost one is not in the mean


def test_a_group_that_lost_a_trajectory_shares_prefixes_with_the_gradients_of_whole_rows() -> None:
    groups = PARTS.rollouts(engine=FailingEngine(PARTS, 16, ConnectionError("the server is gone")))
    batch = make_batch(groups, PARTS.config, step=1)
    free = ("train.grad_clip=1e9", "algorithm.clip_low=0.999", "algorithm.clip_high=1e9")

    (shared, work), (whole, _) = (
        gradients(learner(PARTS.lm, small_config(*free, f"train.share_prefixes={on}")), batch.minibatches[0])
        for on in ("true", "false")
    )

    assert batch.stats["failed_trajectories"] == 1
    assert work.work.tokens < work.work.row_tokens
    assert relative_difference(shared, whole) <= 1e-5


def test_a_batch_that_is_lost_as_a_whole_ends_the_run() -> None:
    with pytest.raises(RunError, match="every one of 16 trajectories failed, the first with: EngineError: s0 refused"):
        PARTS.rollouts(engine=FailingEngine(PARTS, 0, EngineError("s0 refused"), count=16))


@pytest.mark.parametrize("kind", [EngineGoneError, HangsServersError])
def test_an_engine_that_has_gone_ends_the_run_at_once(kind: type[RunError]) -> None:
    with pytest.raises(kind, match="no inference server is left"):
        PARTS.rollouts(engine=FailingEngine(PARTS, 16, kind("no inference server is left")))


def test_a_step_in_which_everything_failed_has_no_rows() -> None:
    groups = copy.deepcopy(GROUPS)
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.error, trajectory.turns = "lost", []

    batch = make_batch(groups, PARTS.config, step=1)

    assert batch.minibatches == [[]]
    assert set(batch.advantages) == {0.0}
    assert batch.stats["failed_trajectories"] == 16


# -- the controller --------------------------------------------------------------------------------------------------


def run(parts: Parts, tasks: list[Task], plan: SamplingPlan, **settings: Any) -> list[Group]:
    return RolloutController(parts.agent, parts.engine(), parts.config.seed, **settings).run(tasks, plan)


def tokens(groups: list[Group]) -> dict[tuple[str, int], list[list[int]]]:
    return {
        (g.task.id, n): [turn.completion.token_ids for turn in t.turns]
        for g in groups
        for n, t in enumerate(g.trajectories)
    }


def test_rollouts_are_a_function_of_what_was_asked_for() -> None:
    tasks = [PARTS.source.train(i) for i in range(3)]
    once = tokens(run(PARTS, tasks, SamplingPlan("p", 4)))

    assert tokens(run(PARTS, tasks[::-1], SamplingPlan("p", 4))) == once
    assert tokens(run(PARTS, tasks[1:2], SamplingPlan("p", 2))).items() <= once.items()
    assert tokens(run(PARTS, tasks, SamplingPlan("another", 4))) != once
    assert len({str(t) for t in once.values()}) == 12  # samples of a group differ


def test_groups_come_in_the_order_of_the_tasks() -> None:
    tasks = [PARTS.source.train(i) for i in (4, 1, 3)]
    groups = run(PARTS, tasks, SamplingPlan("p", 2))

    assert [g.task for g in groups] == tasks
    assert [[t.task_id for t in g.trajectories] for g in groups] == [[t.id] * 2 for t in tasks]


def test_answers_are_scored_against_the_task() -> None:
    task = PARTS.source.train(0)
    words = [w for w in PARTS.source.vocabulary()[:40] if w != task.question]

    class Answers:
        """A fake engine: the right answer or another one, by the seed."""

        version = 0

        async def generate(self, _: list[int], params: SamplingParams, **__: str) -> Completion:
            answer = task.answers[0] if params.seed % 2 else words[0]
            ids = PARTS.tokenizer(f"\\boxed{{ {answer} }}")["input_ids"]
            return Completion(ids, [-1.0] * len(ids), "length", 0)

    (group,) = RolloutController(PARTS.agent, Answers(), seed=1).run([task], SamplingPlan("p", 12))

    assert {t.reward for t in group.trajectories} == {0.0, 1.0}
    assert all(t.reward == (task.answers[0] in t.answer_text) for t in group.trajectories)


def test_stopping_gives_the_whole_batch_up() -> None:
    asked: list[None] = []

    def stop() -> bool:
        asked.append(None)
        return len(asked) > 20

    with pytest.raises(RolloutInterruptedError):
        run(PARTS, [PARTS.source.train(i) for i in range(4)], SamplingPlan("p", 4), stop_requested=stop)


def test_a_task_that_breaks_a_limit_ends_the_batch_before_anything_is_sampled() -> None:
    engine = PARTS.engine()
    broken = Task("long", " ".join(PARTS.source.keys[:9]), ("a",), chunks=("a",))

    with pytest.raises(UserError, match="task long: the question has 9 tokens"):
        RolloutController(PARTS.agent, engine, 1).run([PARTS.source.train(0), broken], SamplingPlan("p"))
    assert engine.stats.sampled_tokens == 0


def test_a_controller_can_be_used_again_after_an_interruption() -> None:
    engine = PARTS.engine()
    interrupted = RolloutController(PARTS.agent, engine, 1, stop_requested=lambda: engine.stats.batches > 0)
    tasks = [PARTS.source.train(i) for i in range(2)]
    with pytest.raises(RolloutInterruptedError):
        interrupted.run(tasks, SamplingPlan("p", 2))

    groups = RolloutController(PARTS.agent, engine, 1).run(tasks, SamplingPlan("p", 2))

    assert tokens(groups) == tokens(run(PARTS, tasks, SamplingPlan("p", 2)))


def test_turns_come_through_a_pipe_as_they_were_and_their_rows_know_their_array() -> None:
    cut = Completion([7, 8], [-0.5, -1.5], "length", 3, spans=((3, 1), (4, 1)))
    turn = Turn("update", [5, 6, 70000], cut)

    (found,) = pickle.loads(pickle.dumps([turn]))

    assert found == turn
    assert token_versions(found.completion) == [3, 4]
    assert array("i", found.array).tolist() == [5, 6, 70000, 7, 8]
    (row,) = turn_rows([Trajectory("t", [found], 0.0)], torch.ones(1), small_config())
    assert row.ids is found.array
    assert row.ids == Row(turn.prompt_ids, cut.token_ids, cut.logprobs, 1.0, 0.0, 0).ids
    changed = dataclasses.replace(found, prompt_ids=[9])
    assert pickle.loads(pickle.dumps(changed)) == changed


Left = Callable[[Trajectory], None]


class LeavingReward:
    """Rewards nothing; leaves what it is told to in every trajectory."""

    def __init__(self, leave: Left) -> None:
        self.leave = leave

    def score(self, task: Task, trajectory: Trajectory) -> float:
        self.leave(trajectory)
        return 0.0


def rewarded(leave: Left) -> list[Group]:
    controller = RolloutController(PARTS.agent, PARTS.engine(), 1, reward=LeavingReward(leave))
    return controller.run([PARTS.source.train(0)], SamplingPlan("train-1", 2))


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda t: setattr(t, "turn_rewards", TurnRewards(0.0, [0.0])), "turn_rewards has 1 turns of "),
        (lambda t: setattr(t, "turn_rewards", TurnRewards(math.nan, [0.0] * len(t.turns))), r"turn_rewards is \[nan"),
        (lambda t: setattr(t, "accuracy", math.inf), "accuracy is inf"),
        (lambda t: t.metrics.update(length="long"), "metrics has what is no number .*'long'"),
    ],
)
def test_what_a_reward_leaves_and_nothing_can_be_made_of_ends_the_run(leave: Left, said: str) -> None:
    with pytest.raises(UserError, match=f"the reward LeavingReward of task train-0: {said}"):
        rewarded(leave)


def test_metrics_of_some_trajectories_have_their_own_mean() -> None:
    values = iter([0.25, 0.75])

    def leave(trajectory: Trajectory) -> None:
        value = next(values)
        trajectory.metrics = {"n_tokens": np.float32(value)} | ({"late": 4} if value > 0.5 else {})

    batch = make_batch(rewarded(leave), small_config("rollout.batch_size=1"), step=1)

    assert batch.metrics == {"late": 4.0, "n_tokens": 0.5}
    assert batch.stats["n_tokens"] == batch.stats["prompt_tokens"] + batch.stats["sampled_tokens"]


def test_a_metric_with_the_name_of_a_number_has_another_one_from_then_on_and_is_told_once() -> None:
    told: list[str] = []
    metrics = RewardMetrics(told.append)
    mine = {"judge_wait_s": 7.0, "tokens_per_s": 8.0, "mine": 9.0}

    assert metrics.beside({"judge_wait_s": 1.0}, mine) == {
        "judge_wait_s": 1.0, "reward/judge_wait_s": 7.0, "reward/tokens_per_s": 8.0, "mine": 9.0,
    }  # fmt: skip
    assert metrics.beside({}, mine) == {"reward/judge_wait_s": 7.0, "reward/tokens_per_s": 8.0, "mine": 9.0}
    (message,) = told
    assert "judge_wait_s as reward/judge_wait_s, tokens_per_s as reward/tokens_per_s" in message


def test_records_take_what_json_does_not_know(tmp_path: Path) -> None:
    def leave(trajectory: Trajectory) -> None:
        trajectory.metrics = {"mine": np.float32(0.5)}
        trajectory.details = {"scores": np.arange(2), "one": torch.tensor(1.5), "path": tmp_path}
        trajectory.details |= {"by": [{np.int64(3): 1, (1, 2): 2}], "torn": "a\ud800b"}

    write_rollouts(tmp_path / "rollouts" / "step_1.jsonl.zst", rewarded(leave), [0.0, 0.0], PARTS.tokenizer)

    (group,) = read_groups(tmp_path / "rollouts" / "step_1.jsonl.zst").values()
    plain = {"scores": [0, 1], "one": 1.5, "path": str(tmp_path)}
    assert [one["details"] for one in group] == [{**plain, "by": [{"3": 1, "(1, 2)": 2}], "torn": "a?b"}] * 2
    assert [one["metrics"] for one in group] == [{"mine": 0.5}] * 2


def test_distinct_tokens_are_those_of_the_tree() -> None:
    assert distinct_tokens([]) == 0
    few = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 4, 5], [7]]
    assert distinct_tokens([packed_ids(prompt, ()) for prompt in few]) == 6
    draw = np.random.default_rng(0)
    for _ in range(50):
        prompts = [draw.integers(0, 3, draw.integers(0, 9)).tolist() for _ in range(12)]
        tree = {tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)}
        assert distinct_tokens([packed_ids(prompt, ()) for prompt in prompts]) == len(tree)
