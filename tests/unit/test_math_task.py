"""Problems with checkable answers: read, put to the model as they stand or in its template, and judged."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders import small_parts
from realparts import data_is_missing

from trainer.agents.single_turn import SingleTurn
from trainer.config import RunConfig
from trainer.config_tasks import MathConfig
from trainer.errors import UserError
from trainer.rewards.make import make_reward
from trainer.tasks import leave_out_misfits, make_source
from trainer.tasks.math import problems_file
from trainer.types import Completion, Task, Trajectory

REPOSITORY = Path(__file__).parents[2]


def problems(folder: Path, *rows: dict[str, Any]) -> RunConfig:
    """A run over these problems."""
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run(task={"path": str(folder), "dataset": file.name, "eval_fraction": 0.4})


def run(task: dict[str, Any], **sections: Any) -> RunConfig:
    values = {"model": {"path": "m"}, "task": {"name": "math", **task}, "rollout": {"batch_size": 1}}
    return RunConfig.model_validate(values | {"agent": {"name": "single_turn"}, "reward": {"name": "math"}} | sections)


def problem(number: int, **more: Any) -> dict[str, Any]:
    return {
        "query_id": f"q{number}",
        "prompt": f"What is {number} + 1?",
        "solutions": [f"\\boxed{{{number + 1}}}"],
    } | more


def test_every_problem_is_on_one_side_and_every_epoch_has_each_once(tmp_path: Path) -> None:
    source = make_source(problems(tmp_path, *(problem(n) for n in range(30)), problem(99, task="code")))
    heldout = [source.heldout("dev", i).question for i in range(source.num_heldout("dev"))]
    heldout += [source.heldout("test", i).question for i in range(source.num_heldout("test"))]
    epochs = [[source.train(e * source.train_size + i).question for i in range(source.train_size)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0] + heldout) == sorted(f"What is {n} + 1?" for n in range(30))  # the one of code is left out


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([problem(1), problem(1)], "line 2: query_id 'q1' occurs a second time"),
        ([{"query_id": "a", "prompt": "?"}], "line 1: column 'solutions' is missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_source(problems(tmp_path, *rows))


def test_data_that_is_not_there_is_looked_for_and_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no problems there; looked for .*boba\.jsonl"):
        make_source(run({"path": "inclusionAI/Nothing", "dataset": "boba.jsonl"}))
    with pytest.raises(UserError, match=r"task\.dataset=FILE"):
        make_source(run({"path": str(tmp_path)}))


def test_a_file_of_ones_own_takes_the_place_of_the_presets(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("{}\n")
    assert problems_file(MathConfig(path=str(file), dataset="data/boba.jsonl")) == file


def agent(limit: int) -> SingleTurn:
    parts = small_parts()
    config = parts.config.agent.model_copy(update={"max_question_tokens": limit, "template": "words"})
    return SingleTurn(config, parts.tokenizer)


def test_a_prompt_too_long_is_left_out_as_areal_does(tmp_path: Path) -> None:
    source = make_source(problems(tmp_path, *(problem(n) for n in range(20)), problem(77, prompt="now " * 300)))
    leave_out_misfits(source, agent(200))
    there = [source.train(i).question for i in range(source.train_size)]
    assert there
    assert not any(question.startswith("now now") for question in there)
    with pytest.raises(UserError, match="all problems are over"):
        leave_out_misfits(source, agent(2))


def test_a_prompt_that_holds_the_templates_marks_goes_as_it_is() -> None:
    one = agent(200)
    mark = next(mark for mark in one.tokenizer.added_tokens_encoder if len(mark) > 2)
    whole = f"{mark} what is it"
    assert one.prepare(Task("t", whole, ("a",))).ids == one.tokenizer(whole)["input_ids"]
    plain = one.prepare(Task("t", "what is it", ("a",))).ids
    assert one.tokenizer.decode(plain) == one.tokenizer.decode(one.tokenizer("<u> what is it <a>")["input_ids"])


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", 5.0),
        ("The answer is 0.5", 5.0),
        ("\\boxed{2}", -5.0),
        ("no idea", -5.0),
        ("\\boxed{" + "{" * 5000 + "}" * 5000 + "}", -5.0),
    ],
)
def test_answers_are_compared_as_values_and_scaled(answer: str, reward: float) -> None:
    judge = make_reward(run({"path": "p", "reward_scale": 5.0}))
    trajectory = Trajectory("t", [], 0.0, answer_text=answer)

    async def score() -> float:
        found = judge.score(Task("t", "?", ("\\boxed{1/2}",)), trajectory)
        return float(await found if not isinstance(found, float) else found)

    assert asyncio.run(score()) == reward
    assert trajectory.accuracy == float(reward > 0)


class Fixed:
    """An engine that answers the same to everybody."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, _prompt: list[int], _params: Any, *, key: str = "") -> Completion:
        assert key == Task("t", "what is it", ("a",)).key
        return Completion(self.ids, [-0.1] * len(self.ids), "length", 0)


def test_one_turn_is_the_whole_trajectory() -> None:
    from trainer.agents.base import RolloutOptions  # noqa: PLC0415

    one = agent(100)
    prepared = one.prepare(Task("t", "what is it", ("a",)))
    found = asyncio.run(one.rollout(prepared, Fixed([3, 4]), RolloutOptions(1.0, lambda turn: turn)))  # type: ignore[arg-type]
    assert [(turn.kind, turn.prompt_ids, turn.completion.token_ids) for turn in found.turns] == [
        ("final", prepared.ids, [3, 4])
    ]
    assert found.counters == {"truncated_final": 1}


def test_areals_own_sample_is_read() -> None:
    data = Path(os.environ.get("CLUSTERKIT_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    file = data / "areal_rl_sample" / "math_10.jsonl.gz"
    if not file.is_file():
        data_is_missing(f"no {file}")
    source = make_source(run({"path": str(file), "eval_fraction": 0.2}))
    assert source.train_size + source.num_heldout("dev") + source.num_heldout("test") == 10
    assert "\\boxed" in source.train(0).answers[0]
