"""Files of 0.1, whose sections had the fields of every task, agent and reward: what does not apply is dropped.

A section that names every field that 0.1 had was written by 0.1, or by a program that writes whole sections; one that a
person wrote names a few, and a field of another name is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config_choice import Choice
from trainer.config_choices import CHOICES
from trainer.config_tasks import TASK

FIELDS: dict[str, frozenset[str]] = {
    "task": frozenset(
        "name options path dataset as_chat reward_scale reward_bias train_size num_documents eval_fraction "
        "compat_upstream min_chunks max_chunks facts_per_chunk filler_per_chunk num_questions max_per_source num_keys "
        "num_values".split()
    ),
    "agent": frozenset(
        "name options template template_file wording prompt_order chunk_tokens max_question_tokens max_memory_tokens "
        "max_final_tokens max_chunks overflow empty_memory enable_thinking context_tokens core_tokens shown_items "
        "tool_format".split()
    ),
    "reward": frozenset("name beta gamma options".split()),
    "servers": frozenset(
        "engine count min_required shutdown_on_exit context_length start_seconds patience_seconds restarts python "
        "flags".split()
    ),
}
"""Of 0.1's sections."""
YOUNG = frozenset({"template_file", "wording"})
"""Those that the first files of 0.1 lack."""


def without_others(values: Any) -> Any:
    """A configuration as it was read, whole sections of 0.1 with what their names have; anything else as it is."""
    if not isinstance(values, Mapping):
        return values
    _refuse_lost_scale(values)
    kept = {section: _own_part(CHOICES[section], values.get(section)) for section in CHOICES if section in values}
    return {**values, **kept}


def _refuse_lost_scale(values: Mapping[str, Any]) -> None:
    """In 0.1 reward.name=math took scale and bias from any task; dropped, they would change what a run learns."""
    task, reward = values.get("task"), values.get("reward")
    if not isinstance(task, Mapping) or not isinstance(reward, Mapping) or reward.get("name") != "math":
        return
    for field, neutral in (("reward_scale", 1.0), ("reward_bias", 0.0)):
        if task.get(field, neutral) != neutral and TASK.lacks(task.get("name", TASK.default), field):
            raise ValueError(
                f"task.{field}={task[field]} with reward.name=math and task.name={task.get('name')}: only "
                "task.name=math has it now, and without it rewards would be others; a reward of your own can scale them"
            )


def _own_part(choice: Choice, part: Any) -> Any:
    if not isinstance(part, Mapping) or not FIELDS[choice.section] - YOUNG <= part.keys():
        return part
    name = part[choice.key]
    return {field: value for field, value in part.items() if not choice.lacks(name, str(field))}
