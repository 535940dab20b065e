"""rollouts/step_N.jsonl.zst: every trajectory of a step, as it was sampled and scored."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import zstandard

from trainer.types import Group


def write_rollouts(path: Path, groups: list[Group], advantages: list[float], tokenizer: Any) -> None:
    """One JSON line per trajectory: ids, text, log-probs and weight versions of every turn, reward, advantage."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    remaining = iter(advantages)
    with zstandard.open(temporary, "wb") as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
        for group in groups:
            for sample, trajectory in enumerate(group.trajectories):
                record = {
                    "task_id": trajectory.task_id,
                    "sample": sample,
                    "question": group.task.question,
                    "answers": group.task.answers,
                    "answer": trajectory.answer_text,
                    "reward": trajectory.reward,
                    "advantage": next(remaining),
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
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    temporary.replace(path)
