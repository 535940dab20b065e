"""The sections of which a name chooses the class, together; and what pydantic says of them, in the settings' own words.

pydantic names the class that was chosen within an error's location: task.math.num_keys is the setting task.num_keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from trainer.config_agents import AGENT
from trainer.config_choice import OWN, Choice
from trainer.config_rewards import REWARD
from trainer.config_servers import SERVERS
from trainer.config_tasks import TASK

CHOICES: dict[str, Choice] = {choice.section: choice for choice in (TASK, AGENT, REWARD, SERVERS)}
"""By section."""


def setting_of(location: Sequence[int | str]) -> str:
    """Dotted name of what an error is about."""
    kept, _ = _without_tag(location)
    return ".".join(map(str, kept))


def tag_of(location: Sequence[int | str]) -> str:
    """The name whose class pydantic took for what an error is about; empty outside these sections."""
    return _without_tag(location)[1]


def refusal_of(error: Mapping[str, Any], what: str = "this run", advice: str = ": leave it out") -> str:
    """The sentence for a field of another name than the chosen one; empty for any other error. See Choice.refusal."""
    kept, tag = _without_tag(error["loc"])
    if error["type"] != "extra_forbidden" or not tag:
        return ""
    choice, field = CHOICES[str(kept[-2])], str(kept[-1])
    name = "module:Class" if tag == OWN else tag
    return choice.refusal(name, field, what, advice) if choice.known(field) else ""


def _without_tag(location: Sequence[int | str]) -> tuple[list[int | str], str]:
    for place, (part, tag) in enumerate(pairwise(location)):
        choice = CHOICES.get(str(part))
        if choice is not None and (tag in choice.ours or tag == OWN):
            return [*location[: place + 1], *location[place + 2 :]], str(tag)
    return list(location), ""
