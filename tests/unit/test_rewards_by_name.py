"""Rewards that a configuration names, on whole trajectories."""

from __future__ import annotations

import pytest
from builders import byte_tokenizer

from trainer.config import RunConfig
from trainer.rewards.make import make_reward
from trainer.types import Completion, Task, Trajectory, Turn


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


def read(memories: list[str], answer: str, version: int) -> Trajectory:
    """A trajectory that wrote these memories with weights of that version."""
    tokenizer = byte_tokenizer()

    def turn(kind: str, text: str) -> Turn:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return Turn(kind, [1], Completion(ids, [0.0] * len(ids), "stop", version))  # type: ignore[arg-type]

    return Trajectory("1", [*(turn("update", m) for m in memories), turn("final", answer)], 0.0, answer_text=answer)


@pytest.mark.parametrize(
    ("memories", "gold", "answer", "version", "bonus"),
    [
        (["none so far", "It lies on lake Como.", "On Lake Como!", "a lake"], "Lake Como", "Rome", 0, 0.4 * 2 / 4),
        (["none so far", "It lies on lake Como.", "On Lake Como!", "a lake"], "Lake Como", "Rome", 5, 0.2 * 2 / 4),
        (["On Lake Como"], "Lake Como", r"\boxed{Lake Como}", 10, 0.0),
        (["On Lake Como"], "Lake Como", r"\boxed{Lake Como}", 99, 0.0),
        (["north of Como"], "Lake Como", "Rome", 0, 0.0),
        (["no, it is not"], "no", "yes", 0, 0.0),
        ([], "Lake Como", "Lake Como", 0, 0.0),
    ],
    ids=["young", "half", "end", "after", "a part", "closed", "no memory"],
)
def test_reading_adds_a_bonus_for_what_memories_hold_that_ends(
    memories: list[str], gold: str, answer: str, version: int, bonus: float
) -> None:
    settings = {"name": "reading", "memory_bonus": 0.4, "memory_bonus_steps": 10}
    reward = make_reward(RunConfig.model_validate({"reward": settings}), byte_tokenizer())
    trajectory = read(memories, answer, version)
    task = Task(id="1", question="Which?", answers=(gold,))
    f1 = 1.0 if gold in answer else 0.0
    assert reward.score(task, trajectory) == pytest.approx(f1 + bonus)
    assert trajectory.accuracy == f1
