"""What an agent is, and a base class for agents of one's own that speak in texts instead of token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from trainer.agents.memagent import RolloutOptions
from trainer.agents.template import prompt_ids
from trainer.config_agents import OwnAgentConfig
from trainer.engines.base import Engine
from trainer.errors import UserError
from trainer.types import SamplingParams, Task, Trajectory, Turn


class AnyAgent(Protocol):
    """What the rollout controller needs of an agent, which is made from (its section, tokenizer).

    An agent may also have `check_window` (see the function of that name) and `fits(task)`, whether a training task is
    within its limits. Ours have `builtin = True`: when all trajectories fail, the user's class is not to blame.
    """

    def longest_conversation(self) -> int:
        """Tokens of the longest conversation that the limits allow, prompt plus response; 0 where that is unknown."""
        ...

    def prepare(self, task: Task) -> Any:
        """What `rollout` wants of a task; made once and shared by the trajectories of its group."""
        ...

    async def rollout(self, prepared: Any, engine: Engine, options: RolloutOptions) -> Trajectory:
        """One pass over a task. The reward is left at 0: rewards are not the agent's business."""
        ...


def check_window(agent: AnyAgent, window: int, max_tokens_per_mb: int = 0) -> None:
    """Refuse an agent whose limits allow conversations that are too long; agents that cannot tell pass.

    Args:
        agent: the agent.
        window: the model's context window, in tokens.
        max_tokens_per_mb: size of a training micro-batch, in tokens; 0: nothing is trained.

    Raises:
        UserError: names the limits to lower.
    """
    if check := getattr(agent, "check_window", None):
        check(window, max_tokens_per_mb)


def is_builtin(agent: AnyAgent) -> bool:
    """Whether an agent is one of ours, so that the user's code is not to blame for its failures."""
    return bool(getattr(agent, "builtin", False))


Ask = Callable[..., Awaitable[str]]
"""`await ask(prompt)` is the model's response to a text; `await ask(prompt, final=True)` the one with the answer."""


class Agent(ABC):
    """Base class of agents that speak in texts: write `answer`.

    Every prompt is a conversation of its own, and every response is trained on. `self.config` is the section `agent` of
    the run, `self.options` what the user set below `agent.options`; there is one object for all trajectories of a run,
    so nothing about a task belongs into it.
    """

    def __init__(self, config: OwnAgentConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer, self.options = config, tokenizer, config.options

    @abstractmethod
    async def answer(self, task: Task, ask: Ask) -> str:
        """Do the task with as many calls of `ask` as it takes, and return the text that the reward is to judge.

        A response has at most agent.max_memory_tokens tokens, one with `final=True` agent.max_final_tokens.
        """

    def longest_conversation(self) -> int:
        """Not known before the prompts are."""
        return 0

    def prepare(self, task: Task) -> Task:
        """The task as it is."""
        return task

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt: one message of the user, and the beginning of the response."""
        return prompt_ids(self.tokenizer, text, self.config, "the model's tokenizer has no chat template")

    async def rollout(self, prepared: Task, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `AnyAgent`; calls `answer` and keeps all of its turns."""
        turns: list[Turn] = []
        counters: Counter[str] = Counter()

        async def ask(prompt: str, *, final: bool = False) -> str:
            params = SamplingParams(
                max_new_tokens=self.config.max_final_tokens if final else self.config.max_memory_tokens,
                temperature=options.temperature,
                seed=options.seed_of_turn(len(turns)),
                banned_token_ids=options.banned_final_ids if final else (),
            )
            ids = self.prompt_ids(prompt)
            completion = await engine.generate(ids, params, key=prepared.id)
            turns.append(Turn("final" if final else "update", ids, completion))
            if completion.finish_reason == "length":
                counters["truncated_final" if final else "truncated_memory"] += 1
            return str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))

        text = await self.answer(prepared, ask)
        if not isinstance(text, str):
            raise UserError(f"answer of {type(self).__name__} returned {type(text).__name__}: return a text")
        return Trajectory(prepared.id, turns, reward=0.0, answer_text=text, counters=dict(counters))
