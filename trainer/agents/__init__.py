"""Agents: a task and an engine make a trajectory."""

from __future__ import annotations

from typing import Any

from trainer import custom
from trainer.agents.base import AnyAgent
from trainer.agents.memagent import MemAgent
from trainer.agents.memalpha import MemAlpha
from trainer.agents.single_turn import SingleTurn
from trainer.config import RunConfig


def make_agent(config: RunConfig, tokenizer: Any) -> AnyAgent:
    """The agent that a configuration names. Raises UserError for one that cannot be made."""
    name = config.agent.name
    if custom.is_custom(name):
        agent: AnyAgent = custom.make("agent.name", name, config.code_dir, config.agent, tokenizer)
        return agent
    if name == "memalpha":
        return MemAlpha(config.agent, tokenizer)
    if name == "single_turn":
        return SingleTurn(config.agent, tokenizer)
    return MemAgent(config.agent, tokenizer)
