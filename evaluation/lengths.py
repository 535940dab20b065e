"""Lengths of a memory agent that nobody has set: those that the model's context window has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.config import EvalConfig
from evaluation.progress import say
from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig

SECTION = "chunk_tokens"
SMALL_LENGTHS = {SECTION: 512, "max_question_tokens": 1024, "max_memory_tokens": 128, "max_final_tokens": 128}
"""Of an agent whose model has a small context window, about those of the presets of SmolLM2-135M; in tokens."""


def fitted_agent(config: EvalConfig, agent: MemagentConfig, tokenizer: Any, window: int) -> MemagentConfig:
    """The settings that a checkpoint reads with; which lengths it takes is told where nobody has set them all.

    Args:
        agent: the settings of `config`.
        window: most tokens of prompt plus response.
    """
    if not config.free_limits:
        return agent
    fitted = within_window(agent, config.free_limits, tokenizer, window)
    say(
        "nothing here says how this checkpoint was trained to read: sections have at most "
        f"{fitted.chunk_tokens} tokens, the memory {fitted.max_memory_tokens} and an answer {fitted.max_final_tokens}, "
        f"which its context window of {window} has room for. --preset NAME takes a preset's, --set "
        "agent.chunk_tokens=N your own"
    )
    return fitted


def within_window(agent: MemagentConfig, free: Sequence[str], tokenizer: Any, window: int) -> MemagentConfig:
    """The agent's settings, with lengths for a small model where the context window has no room for MemAgent's.

    Args:
        free: the lengths that may be changed.
        window: most tokens of prompt plus response.
    """
    if MemAgent(agent, tokenizer).longest_conversation() <= window:
        return agent
    lengths = {name: min(SMALL_LENGTHS[name], max(window // 8, 1)) for name in free if name != SECTION}
    agent = agent.model_copy(update=lengths)
    room = window - MemAgent(agent, tokenizer).longest_conversation(0)
    if SECTION not in free or room < 1:
        return agent
    return agent.model_copy(update={SECTION: min(SMALL_LENGTHS[SECTION], room)})
