"""What an agent is, how its turns are sampled, and a base class for agents of one's own that speak in texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainer.agents.template import prompt_ids
from trainer.config_agents import AgentConfig, ChunksAgentConfig, OwnAgentConfig
from trainer.engines.base import Engine
from trainer.errors import UserError
from trainer.types import SamplingParams, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """How one trajectory is sampled.

    temperature: 0 is greedy.
    seed_of_turn: turn number -> seed of its response.
    blank_memory: reset the memory after every chunk (an ablation).
    banned_final_ids: tokens that the final answer may not hold, to force an answer.
    turn_read: called after every turn with its entry of `Trajectory.details`, by agents that keep such a record.
    """

    temperature: float
    seed_of_turn: Callable[[int], int]
    blank_memory: bool = False
    banned_final_ids: tuple[int, ...] = ()
    turn_read: Callable[[dict[str, Any]], None] = lambda _turn: None


@dataclass(frozen=True, slots=True)
class SectionRead:
    """A section of a document, and the memory after it was read; `memory` is None where a trajectory ended before."""

    text: str
    memory: str | None


class TurnSampler:
    """Samples the turns of one trajectory and keeps them.

    Args:
        config: the agent's section, which limits them.
        task: names the requests to the engine.

    Attributes:
        counters: responses that hit their limit, as truncated_memory and truncated_final.
    """

    def __init__(self, engine: Engine, options: RolloutOptions, config: AgentConfig, task: Task) -> None:
        self.engine, self.options, self.config, self.task = engine, options, config, task
        self.turns: list[Turn] = []
        self.counters: Counter[str] = Counter()

    async def sample(self, kind: Literal["update", "final"], prompt: list[int]) -> list[int]:
        """Send prompt ids; returns the response's ids without the end token, which is trained on all the same."""
        final = kind == "final"
        params = SamplingParams(
            max_new_tokens=self.config.response_limit(kind),
            temperature=self.options.temperature,
            seed=self.options.seed_of_turn(len(self.turns)),
            banned_token_ids=self.options.banned_final_ids if final else (),
        )
        completion = await self.engine.generate(prompt, params, key=self.task.key)
        self.turns.append(Turn(kind, prompt, completion))
        if completion.finish_reason == "length":
            self.counters["truncated_final" if final else "truncated_memory"] += 1
        return completion.text_ids

    def trajectory(self, answer_text: str = "", details: dict[str, Any] | None = None) -> Trajectory:
        """The trajectory of all turns. Its reward is left at 0: rewards are not the agent's business."""
        counters = dict(self.counters)
        return Trajectory(self.task.id, self.turns, 0.0, answer_text, counters, details=details or {})


class AnyAgent(Protocol):
    """What the rollout controller needs of an agent, which is made from (its section, tokenizer).

    An agent may also have `check_window` (see the function of that name), `fits(tasks)`, whether each task's question
    is within its limits (asked before the run, of tasks without their context), and `sections_read(task, trajectory)`,
    a `SectionRead` for each section of the document.
    Ours have `builtin = True`: when all trajectories fail, the user's class is not to blame.
    """

    def longest_conversation(self) -> int:
        """Tokens of the longest conversation that the limits allow, prompt plus response; 0 where that is unknown."""

    def prepare(self, task: Task) -> Any:
        """What `rollout` wants of a task; made once and shared by the trajectories of its group."""

    async def rollout(self, prepared: Any, engine: Engine, options: RolloutOptions) -> Trajectory:
        """One pass over a task. The reward is left at 0: rewards are not the agent's business."""


def check_window(agent: AnyAgent, window: int, max_tokens_per_mb: int = 0) -> None:
    """Refuse an agent whose limits allow conversations that are too long; agents that cannot tell pass.

    Args:
        window: the model's context window, in tokens.
        max_tokens_per_mb: size of a training micro-batch, in tokens; 0: nothing is trained. Ours pass with longer
            conversations, which are trained on alone.

    Raises:
        UserError: names the limits to lower.
    """
    if check := getattr(agent, "check_window", None):
        check(window, max_tokens_per_mb)


def split_chunks(ids: list[int], chunk_tokens: int) -> list[list[int]]:
    """Cut ids into runs of `chunk_tokens`; the last may be shorter, none is empty (no ids: no chunk)."""
    return [ids[i : i + chunk_tokens] for i in range(0, len(ids), chunk_tokens)]


def limit_chunks(task: Task, chunks: list[list[int]], c: ChunksAgentConfig) -> tuple[list[list[int]], int]:
    """Keep at most `max_chunks` chunks, the first and the last ones; returns them and the number of tokens left out.

    Raises:
        UserError: there are more, and `overflow` is "error".
    """
    if not c.max_chunks or len(chunks) <= c.max_chunks:
        return chunks, 0
    if c.overflow == "error":
        raise UserError(
            f"task {task.id}: the document has {len(chunks)} chunks and agent.max_chunks is {c.max_chunks}: raise it, "
            "or set agent.overflow=center to read only the first and the last of them"
        )
    head = c.max_chunks // 2
    kept = chunks[:head] + chunks[len(chunks) - (c.max_chunks - head) :]
    return kept, sum(map(len, chunks)) - sum(map(len, kept))


Ask = Callable[..., Awaitable[str]]
"""`await ask(prompt)` is the model's response to a text; `await ask(prompt, final=True)` the one with the answer."""


class Agent(ABC):
    """Base class of agents that speak in texts: write `answer`.

    Every prompt is a conversation of its own, and every response is trained on. `self.config` is the section `agent` of
    the run, `self.options` what the user set below `agent.options`. One object serves all trajectories of a run, so
    keep nothing about a task in it.
    """

    def __init__(self, config: OwnAgentConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer, self.options = config, tokenizer, config.options

    @abstractmethod
    async def answer(self, task: Task, ask: Ask) -> str:
        """Do the task with as many calls of `ask` as it takes, and return the text that the reward is to judge.

        A response has at most agent.max_memory_tokens tokens, one with `final=True` agent.max_final_tokens.
        """

    def longest_conversation(self) -> int:
        """Unknown before the prompts are: 0."""
        return 0

    def prepare(self, task: Task) -> Task:
        """The task as it is."""
        return task

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt: one message of the user, and the beginning of the response."""
        return prompt_ids(self.tokenizer, text, self.config, "the model's tokenizer has no chat template")

    async def rollout(self, prepared: Task, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `AnyAgent`; calls `answer` and keeps all of its turns."""
        sampler = TurnSampler(engine, options, self.config, prepared)

        async def ask(prompt: str, *, final: bool = False) -> str:
            ids = await sampler.sample("final" if final else "update", self.prompt_ids(prompt))
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

        text = await self.answer(prepared, ask)
        if not isinstance(text, str):
            raise UserError(f"answer of {type(self).__name__} returned {type(text).__name__}: return a text")
        return sampler.trajectory(text)
