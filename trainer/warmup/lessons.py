"""What the warm-up teaches, by the agent that it is for: tasks, vocabulary, demonstrations, the gate's measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

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
from trainer.types import Row
from trainer.warmup.demos import Demonstrator
from trainer.warmup.memory_demos import CALL_WORDS, MemoryDemonstrator

FACT_TOKENS = 3
"""Of a memory that holds one fact, with its end."""


class Demonstrations(Protocol):
    """Training rows of the two phases."""

    def conversations(self, count: int, *seed_parts: str | int) -> list[Row]:
        """`count` demonstrated conversations."""
        ...

    def recall_rows(self, count: int, *seed_parts: str | int) -> tuple[list[Row], list[float]]:
        """Dense practice: rows, and a weight for every response token."""
        ...


class Lesson(ABC):
    """One kind of warm-up. source: the tasks that the gate asks."""

    source: Recall

    @abstractmethod
    def vocabulary(self) -> list[str]:
        """Words that the tokenizer needs."""

    @abstractmethod
    def make_agent(self, tokenizer: Any) -> AnyAgent:
        """The agent that is taught. Raises UserError where its limits do not fit the model."""

    @abstractmethod
    def demonstrations(self, agent: AnyAgent, tokenizer: Any) -> Demonstrations:
        """Who demonstrates."""

    @abstractmethod
    def reward(self) -> Reward:
        """What the gate scores with."""

    @abstractmethod
    def passed(self, result: EvalResult) -> float:
        """Share of the gate's documents of one section on which the model did what it was taught."""


class RecallLesson(Lesson):
    """Lookup and format for the agent that overwrites its memory."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.source = Recall(as_class(RecallConfig, config.task), config.seed)

    def vocabulary(self) -> list[str]:
        """As the task's."""
        return self.source.vocabulary()

    def make_agent(self, tokenizer: Any) -> MemAgent:
        """See Lesson."""
        agent = MemAgent(taught_agent(self.config), tokenizer)
        agent.check_window(self.config.model.tiny.max_position_embeddings)
        return agent

    def demonstrations(self, agent: AnyAgent, tokenizer: Any) -> Demonstrator:
        """See trainer.warmup.demos."""
        assert isinstance(agent, MemAgent)
        return Demonstrator(self.config, self.source, agent, tokenizer)

    def reward(self) -> Boxed:
        """The right value in the box."""
        return Boxed()

    def passed(self, result: EvalResult) -> float:
        """Right answers."""
        return result.accuracy


class MemoryLesson(Lesson):
    """Calls for the agent that keeps a structured memory."""

    def __init__(self, config: RunConfig, agent: MemalphaAgentConfig) -> None:
        self.config, self.agent = config, agent
        self.source = self.facts = Facts(as_class(FactsConfig, config.task), config.seed)

    def vocabulary(self) -> list[str]:
        """The task's words, and those that a call is made of."""
        return [*self.source.vocabulary(), *CALL_WORDS]

    def make_agent(self, tokenizer: Any) -> MemAlpha:
        """See Lesson; the configuration has seen to the limits."""
        return MemAlpha(self.agent, tokenizer)

    def demonstrations(self, agent: AnyAgent, tokenizer: Any) -> MemoryDemonstrator:
        """See trainer.warmup.memory_demos."""
        assert isinstance(agent, MemAlpha)
        return MemoryDemonstrator(self.config, self.facts, agent, tokenizer)

    def reward(self) -> MemAlphaReward:
        """Scored by rules, whoever judges the run."""
        settings = as_class(MemalphaRewardConfig, self.config.reward)
        return MemAlphaReward(settings.model_copy(update={"gamma": 1.0}), RuleReader())

    def passed(self, result: EvalResult) -> float:
        """Entries that say what the section says. What is left out is not the warm-up's business."""
        return result.metrics["r4"]


def make_lesson(config: RunConfig) -> Lesson:
    """The lesson for the run's agent; one of the user's own is taught like memagent."""
    return MemoryLesson(config, config.agent) if isinstance(config.agent, MemalphaAgentConfig) else RecallLesson(config)


def taught_agent(config: RunConfig) -> MemagentConfig:
    """The memory agent that the warm-up of recall teaches: with the run's limits, or those that the lesson needs."""
    agent = as_class(MemagentConfig, config.agent)
    if isinstance(config.agent, OverwritingAgentConfig):
        return agent
    section = as_class(RecallConfig, config.task).section_tokens
    return agent.model_copy(update={"chunk_tokens": section, "max_memory_tokens": FACT_TOKENS})
