"""The longest row that a configuration can make, and the largest micro-batch that follows from it."""

from __future__ import annotations

from clusterkit.capacity.plan import template_tokens
from trainer.config import RunConfig
from trainer.config_agents import MemalphaAgentConfig, SingleTurnConfig


def longest_sequence(config: RunConfig) -> int:
    """Return the tokens of the longest prompt with its response."""
    agent = config.agent
    if isinstance(agent, SingleTurnConfig):
        return agent.max_question_tokens + agent.max_final_tokens
    if isinstance(agent, MemalphaAgentConfig):
        return agent.context_tokens
    update = agent.question_limit("update") + agent.chunk_tokens + agent.max_memory_tokens
    final = agent.question_limit("final") + agent.max_final_tokens
    return template_tokens(agent) + agent.max_memory_tokens + max(update, final)


def largest_micro_batch(config: RunConfig) -> int:
    """Return the tokens of the largest micro-batch: train.max_tokens_per_mb, or one row that is longer."""
    packed = config.train.max_tokens_per_mb
    return packed if config.trainer.type == "sft" else max(packed, longest_sequence(config))
