"""rollouts/*.jsonl.zst: every trajectory of a step, or of a held-out evaluation, as it was sampled and scored."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zstandard

from trainer.disk import bytes_text, disk_of, free_of
from trainer.files import sync
from trainer.types import Group, Task, Trajectory


def write_rollouts(path: Path, groups: list[Group], advantages: list[float], tokenizer: Any) -> None:
    """One JSON line per trajectory: ids, text, log-probs and weight versions of every turn, reward, advantage."""
    remaining = iter(advantages)
    write_records(
        path,
        (
            trajectory_record(group.task, sample, trajectory, tokenizer) | {"advantage": next(remaining)}
            for group in groups
            for sample, trajectory in enumerate(group.trajectories)
        ),
    )


def room_warning(file: Path, steps: int) -> str:
    """What to tell where the disk has no room for as many files like this one as steps are left; empty where it has."""
    size, free = file.stat().st_size, free_of(file)
    if free is None or free >= size * steps:
        return ""
    return (
        f"the disk will be full before the run ends: the trajectories of a step take {bytes_text(size)}, those of the "
        f"{steps} steps to come {bytes_text(size * steps)}. {disk_of(file)}: free some space or, once the run is "
        "stopped, go on with rollout.save_trajectories=false"
    )


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a compressed file by one with these records, one a line."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with zstandard.open(temporary, "wb") as raw, io.TextIOWrapper(raw, "utf-8", "replace") as file:
        for record in records:
            try:
                line = json.dumps(record, ensure_ascii=False, default=_plain)
            except TypeError:
                line = json.dumps(_text_keys(record), ensure_ascii=False, default=_plain)
            file.write(line + "\n")
    sync(temporary)  # what counts the files of a run that only rolls out is durable, too
    temporary.replace(path)


def _plain(value: Any) -> Any:
    """JSON's types of what an agent or a reward of the user's own left in a record: arrays as lists, the rest as text.

    A record is not worth the step that it is of.
    """
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _text_keys(value: Any) -> Any:
    """The same with texts as names: JSON knows no numpy numbers or tuples there."""
    if isinstance(value, dict):
        return {str(key): _text_keys(one) for key, one in value.items()}
    return [_text_keys(one) for one in value] if isinstance(value, list | tuple) else value


def trajectory_record(task: Task, sample: int, trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """Return what a file holds of a trajectory, as JSON types. sample: its number within the task's group."""
    return {
        "task_id": trajectory.task_id,
        "sample": sample,
        "question": task.question,
        "answers": task.answers,
        "evidence": [asdict(one) for one in task.evidence],
        "answer": trajectory.answer_text,
        "reward": trajectory.reward,
        "counters": trajectory.counters,
        "error": trajectory.error,
        "metrics": trajectory.metrics,
        "turn_rewards": trajectory.turn_rewards.totals if trajectory.turn_rewards else None,
        "details": trajectory.details,
        "turns": [
            {
                "kind": turn.kind,
                "prompt_ids": turn.prompt_ids,
                "response_ids": turn.completion.token_ids,
                "response": tokenizer.decode(turn.completion.token_ids, skip_special_tokens=True),
                "logprobs": [round(value, 7) for value in turn.completion.logprobs],
                "finish_reason": turn.completion.finish_reason,
                "version": turn.completion.version,
            }
            for turn in trajectory.turns
        ],
    }
