"""Agents: a task and an engine make a trajectory."""

from __future__ import annotations

from typing import Any

from trainer import custom
from trainer.agents.base import AnyAgent
from trainer.agents.memagent import MemAgent
from trainer.agents.memalpha import MemAlpha
from trainer.agents.single_turn import SingleTurn
from trainer.config import RunConfig
from trainer.config_agents import MemalphaAgentConfig, OwnAgentConfig, SingleTurnConfig


def make_agent(config: RunConfig, tokenizer: Any) -> AnyAgent:
    """The agent that a configuration names. Raises UserError for one that cannot be made."""
    settings = config.agent
    if isinstance(settings, OwnAgentConfig):
        agent: AnyAgent = custom.make("agent.name", settings.name, config.code_dir, settings, tokenizer)
        return agent
    if isinstance(settings, MemalphaAgentConfig):
        return MemAlpha(settings, tokenizer)
    if isinstance(settings, SingleTurnConfig):
        return SingleTurn(settings, tokenizer)
    return MemAgent(settings, tokenizer)
