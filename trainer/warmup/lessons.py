"""What the warm-up teaches the run's agent: tasks, vocabulary, demonstrations, and the measure of its gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.agents.base import AnyAgent
from trainer.agents.memagent import MemAgent
from trainer.agents.memalpha import MemAlpha
from trainer.config import RunConfig
from trainer.config_agents import MemagentConfig, MemalphaAgentConfig, OverwritingAgentConfig
from trainer.config_choice import as_class
from trainer.config_rewards import MemalphaRewardConfig
from trainer.config_tasks import FactsConfig, RecallConfig
from trainer.evaluate import EvalResult
from trainer.judge.reader import RuleReader
from trainer.rewards import Boxed, Reward
from trainer.rewards.memalpha import MemAlphaReward
from trainer.tasks.facts import Facts
from trainer.tasks.recall import Recall
from trainer.warmup.demos import Demonstrations, Demonstrator
from trainer.warmup.memory_demos import CALL_WORDS, MemoryDemonstrator

FACT_TOKENS = 3
"""Tokens of a memory that holds one fact, the end token included."""


@dataclass(frozen=True)
class Lesson:
    """One kind of warm-up.

    source: tasks of the gate.
    words: words that the tokenizer needs.
    reward: what the gate scores with.
    teach: tokenizer -> the agent that is taught, and its demonstrations. Raises UserError where the agent's limits do
        not fit the model.
    passed: result of the gate -> share of its documents, of one section each, on which the model did what it was
        taught.
    """

    source: Recall[Any]
    words: list[str]
    reward: Reward
    teach: Callable[[Any], tuple[AnyAgent, Demonstrations]]
    passed: Callable[[EvalResult], float]


def make_lesson(config: RunConfig) -> Lesson:
    """The lesson for the run's agent; one of the user's own is taught like memagent."""
    if isinstance(config.agent, MemalphaAgentConfig):
        return _memory_lesson(config, config.agent)
    return _recall_lesson(config)


def _recall_lesson(config: RunConfig) -> Lesson:
    """Lookup and format, for the agent that overwrites its memory."""
    source = Recall(as_class(RecallConfig, config.task), config.seed)

    def teach(tokenizer: Any) -> tuple[AnyAgent, Demonstrations]:
        agent = MemAgent(taught_agent(config), tokenizer)
        agent.check_window(config.model.tiny.max_position_embeddings)
        return agent, Demonstrator(config, source, agent, tokenizer)

    return Lesson(source, source.vocabulary(), Boxed(), teach, lambda result: result.accuracy)


def _memory_lesson(config: RunConfig, settings: MemalphaAgentConfig) -> Lesson:
    """Calls, for the agent that keeps a structured memory; rules score it, whoever judges the run."""
    source = Facts(as_class(FactsConfig, config.task), config.seed)
    rewards = as_class(MemalphaRewardConfig, config.reward).model_copy(update={"gamma": 1.0})

    def teach(tokenizer: Any) -> tuple[AnyAgent, Demonstrations]:
        agent = MemAlpha(settings, tokenizer)
        return agent, MemoryDemonstrator(config, source, agent, tokenizer)

    words = [*source.vocabulary(), *CALL_WORDS]
    # r4: entries that say what the section says. What the model leaves out is not the warm-up's business.
    return Lesson(source, words, MemAlphaReward(rewards, RuleReader()), teach, lambda result: result.metrics["r4"])


def taught_agent(config: RunConfig) -> MemagentConfig:
    """The memory agent that the warm-up of recall teaches: with the run's limits, or those that the lesson needs."""
    agent = as_class(MemagentConfig, config.agent)
    if isinstance(config.agent, OverwritingAgentConfig):
        return agent
    section = as_class(RecallConfig, config.task).section_tokens
    return agent.model_copy(update={"chunk_tokens": section, "max_memory_tokens": FACT_TOKENS})
