"""Rewards that a configuration names, on whole trajectories."""

from __future__ import annotations

import pytest

from trainer.config import RunConfig
from trainer.rewards.make import make_reward
from trainer.types import Task, Trajectory


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("boxed", r"It is \boxed{Lake Como}.", 1.0),
        ("boxed", "Lake Como", 0.0),
        ("found", "I think it was lake como, in Italy", 1.0),
        ("found", "Como", 0.0),
        ("f1", "Lake Como", 1.0),
        ("f1", "It is lake Como", 2 * 2 / (4 + 2)),
        ("f1", r"It is in the far north, so \boxed{Lake Como}.", 1.0),  # the marked answer alone
        ("f1", "Rome", 0.0),
        ("f1", "", 0.0),
    ],
)
def test_what_an_answer_is_worth(name: str, answer: str, expected: float) -> None:
    reward = make_reward(RunConfig.model_validate({"reward": {"name": name}}))
    task = Task(id="1", question="Which lake?", answers=("Lake Como",), context="")
    assert reward.score(task, Trajectory("1", [], 0.0, answer_text=answer)) == pytest.approx(expected)
