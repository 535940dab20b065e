"""How the first held-out tasks were read before and after training, as a run has recorded it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.trace.evidence import GoldSentence, Held, gold_of, held
from clusterkit.runs.trace.source import Record, read_groups
from trainer.config_rewards import REWARD, RewardConfig
from trainer.errors import RunError, UserError

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class MemoryAt:
    """The memory after a section."""

    text: str
    held: Held


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over a task's document."""

    memories: tuple[MemoryAt | None, ...]  # after each section; None where it failed before
    answer: str  # the final response
    scores: dict[str, float]  # of the answer; `accuracy` is the one that the run counts
    error: str  # why it failed; "" if it did not
    score_name: str = "accuracy"  # what people call the one that counts

    @property
    def score(self) -> float:
        """What the answer is worth in the closing table."""
        return self.scores.get("accuracy", 0.0)


@dataclass(frozen=True, slots=True)
class HeldoutTask:
    """A held-out task, its sections, and what was read before and after training."""

    task: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[GoldSentence, ...]
    sections: tuple[str, ...]  # texts; "" where the agent does not tell what it read
    before: Reading | None  # None where that is not recorded
    after: Reading | None  # likewise

    def readings(self) -> list[tuple[str, Reading]]:
        """Return those that are recorded, by name."""
        both = ((BEFORE, self.before), (AFTER, self.after))
        return [(name, reading) for name, reading in both if reading is not None]


def heldout_tasks(run: RunDirectory) -> list[HeldoutTask]:
    """Return the tasks in the order of their numbers.

    Raises:
        RunError: none is recorded, or a record cannot be read.
    """
    before, after = _records(run, BEFORE), _records(run, AFTER)
    name = _score_name(run)
    tasks = [_task(before.get(one), after.get(one), name) for one in before | after]
    if tasks:
        return tasks
    raise RunError(
        f"{run.name} has no record of held-out tasks: runs write one before the first step and one "
        "after the last, unless eval.save_trajectories is 0 or nothing is held out, and those of earlier versions have "
        "none; clusterkit trace without --heldout shows training tasks"
    )


def choose_task(tasks: Sequence[HeldoutTask], wanted: str) -> int:
    """Return the number of a task from its number or its id. Raises UserError."""
    ids = [one.task for one in tasks]
    if wanted in ids:
        return ids.index(wanted)
    if wanted.isdecimal() and int(wanted) < len(tasks):
        return int(wanted)
    raise UserError(
        f"{len(tasks)} held-out tasks are recorded, none of them {wanted}: give --task-id a number from 0 to "
        f"{len(tasks) - 1}, or an id such as {', '.join(ids[:3])}; eval.save_trajectories says how many a run records"
    )


def learned_task(tasks: Sequence[HeldoutTask]) -> int:
    """Return the number of the first task whose answer training made better; 0 if there is none."""
    both = ((number, one.before, one.after) for number, one in enumerate(tasks))
    return next((number for number, before, after in both if before and after and after.score > before.score), 0)


def heldout_file(run: RunDirectory, name: str) -> Path:
    """File of the held-out tasks as they were read before training or after it. name: BEFORE or AFTER."""
    return run.logs / "rollouts" / f"eval_{name}.jsonl.zst"


def _records(run: RunDirectory, name: str) -> dict[str, Record]:
    path = heldout_file(run, name)
    if not path.is_file():
        return {}
    return {task: group[0] for task, group in read_groups(path, "clusterkit trace shows training steps").items()}


def _score_name(run: RunDirectory) -> str:
    reward = run.saved_values().get("reward")
    name = reward.get("name") if isinstance(reward, dict) else None
    chosen = REWARD.chosen(name or REWARD.default)
    assert issubclass(chosen, RewardConfig)
    return chosen.score_name


def _task(before: Record | None, after: Record | None, score_name: str) -> HeldoutTask:
    known = before or after
    assert known is not None
    sections = _sections(known)
    gold = gold_of(known, sections)
    return HeldoutTask(
        str(known["task_id"]),
        _question(known),
        tuple(known["answers"]),
        gold,
        sections,
        _reading(before, gold, score_name),
        _reading(after, gold, score_name),
    )


def _sections(record: Record) -> tuple[str, ...]:
    if record.get("sections") is not None:
        return tuple(str(one["text"]) for one in record["sections"])
    return tuple("" for turn in record["turns"] if turn["kind"] == "update")


def _reading(record: Record | None, gold: Sequence[GoldSentence], score_name: str) -> Reading | None:
    if record is None:
        return None
    if record.get("sections") is not None:
        texts = [one["memory"] for one in record["sections"]]
    else:  # an agent of the user's own
        texts = [turn["response"] for turn in record["turns"] if turn["kind"] == "update"]
    sentences = [one.sentence for one in gold]
    memories = (None if one is None else MemoryAt(one, held(one, record["answers"], sentences)) for one in texts)
    scores = {str(name): float(value) for name, value in (record.get("scores") or {}).items()}
    answer = str(record["answer"]) or "; ".join(f"{one['question']} {one['answer']}" for one in _asked(record))
    return Reading(tuple(memories), answer, scores, str(record.get("error") or ""), score_name)


def _question(record: Record) -> str:
    more = len(_asked(record)) - 1
    return str(record["question"]) + (f" (and {more} further questions)" if more > 0 else "")


def _asked(record: Record) -> list[dict[str, Any]]:
    """Return the questions that somebody else was asked after reading, with their answers."""
    return list((record.get("details") or {}).get("questions") or [])
