"""The data that flows through a training step: Task -> Trajectory (turns) -> Group -> Row.

Token ids are plain lists of int all the way: what an engine received and returned is what the loss is computed on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its accepted gold answers (at least one)."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sentence of the document that helps to prove the answer. `title`: what stands above it; "" without one."""

    title: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Task:
    """One question about one document, or several.

    id: unique within the run.
    question: text of the question.
    answers: accepted gold answers, at least one.
    context: text of the document.
    chunks: the document as chunks of at most `chunk_tokens` tokens, in place of cutting `context`.
    meta: small facts for reports (source, number of documents, position of the evidence).
    questions: all questions, where they are asked after reading; `question` and `answers` are then the first one's.
    evidence: for records that people read, where it is known; no agent and no reward sees it.
    way: how the text was chosen of the task's document (`trainer.agents.ways`); empty: it is the document.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    context: str = ""
    chunks: tuple[str, ...] = ()
    meta: dict[str, str | int | float] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    way: str = ""

    @property
    def key(self) -> str:
        """Of requests about this text: evaluations may ask one question about several texts at once."""
        return f"{self.id} {len(self.context)} {len(self.chunks)}{self.way and f' {self.way}'}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled.

    max_new_tokens: response limit in tokens, the end token included.
    temperature: 0 is greedy (evaluation only).
    seed: of this response alone, so that it does not depend on the rest of the batch.
    banned_token_ids: tokens with probability zero (renormalised; evaluation only).
    top_p, top_k: draw only from the most likely tokens with this share of the probability, or from so many; 1 and -1:
        from all, as training must.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    banned_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned for one prompt.

    token_ids: sampled ids, the end token included when `finish_reason` is "stop".
    logprobs: natural log of each token's probability under the distribution that it was drawn from.
    version: weight version that sampled them; the oldest where there were several.
    spans: (version, number of tokens) in order, where the weights changed during the response; else empty.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def text_ids(self) -> list[int]:
        """The ids without the end token."""
        return self.token_ids if self.finish_reason == "length" else self.token_ids[:-1]


@dataclass(frozen=True, slots=True)
class Turn:
    """One conversation: the ids sent, the ids received. `kind` is "update" (a chunk was read) or "final".

    It goes from process to process as arrays, not as lists of numbers: four bytes a token sent, twelve a token
    received, and faster.
    """

    kind: Literal["update", "final"]
    prompt_ids: list[int]
    completion: Completion
    array: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Both as `packed_ids`, where they are known; empty otherwise. `dataclasses.replace` does not carry it over."""

    @property
    def ids(self) -> bytes:
        """Both as `packed_ids`, made once."""
        if not self.array:
            object.__setattr__(self, "array", packed_ids(self.prompt_ids, self.completion.token_ids))
        return self.array

    def __reduce__(self) -> tuple[Any, ...]:
        c = self.completion
        logprobs = array("d", c.logprobs).tobytes()
        return _turn, (self.kind, self.ids, len(self.prompt_ids), logprobs, c.finish_reason, c.version, c.spans)


def packed_ids(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> bytes:
    """Prompt and response as int32 in the machine's byte order."""
    return array("i", [*prompt_ids, *response_ids]).tobytes()


def _turn(
    kind: Literal["update", "final"],
    ids: bytes,
    prompt: int,
    logprobs: bytes,
    finish_reason: FinishReason,
    version: int,
    spans: tuple[tuple[int, int], ...],
) -> Turn:
    """A turn from what `Turn.__reduce__` made of it. prompt: tokens of `ids` that were sent."""
    tokens = array("i", ids).tolist()
    completion = Completion(tokens[prompt:], array("d", logprobs).tolist(), finish_reason, version, spans)
    turn = Turn(kind, tokens[:prompt], completion)
    object.__setattr__(turn, "array", ids)
    return turn


@dataclass(slots=True)
class TurnRewards:
    """Rewards of single turns: the reward of turn i is `outcome`, the trajectory's part, plus `turns[i]`."""

    outcome: float
    turns: list[float]

    @property
    def totals(self) -> list[float]:
        """Every turn's whole reward."""
        return [self.outcome + own for own in self.turns]


@dataclass(slots=True)
class Trajectory:
    """All turns of one pass over one document, with one scalar reward.

    answer_text: text of the final response.
    counters: counts of unusual events (empty_memory, truncated_memory, truncated_final, truncated_context ...).
    metrics: further numbers of the reward.
    error: why it failed; it then has reward 0 and no turns that are trained on.
    turn_rewards: rewards of single turns; `reward` is then their mean.
    accuracy: what an evaluation counts in place of the reward.
    details: what agent and reward record of it, as JSON types.
    begun: result of the reward's `begin`; None without that method, and after scoring.
    """

    task_id: str
    turns: list[Turn]
    reward: float
    answer_text: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    turn_rewards: TurnRewards | None = None
    accuracy: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    begun: Any = None


@dataclass(slots=True)
class Group:
    """The trajectories of one task, whose mean reward is their baseline."""

    task: Task
    trajectories: list[Trajectory]

    def scores(self) -> Group:
        """The group without texts and turns: what every rank is told of it."""
        task = replace(self.task, context="", chunks=())
        return Group(task, [replace(one, turns=[]) for one in self.trajectories])


@dataclass(slots=True)
class Row:
    """One turn as the trainer sees it: `prompt_ids + response_ids`, loss on the response only.

    Lists where rows are made; views of arrays on a rank that was sent them (`trainer.train.shares`).

    behave_logprobs: the engine's log-probs, one per response token.
    advantage: the trajectory's advantage, after credit.
    weight: factor of every token's loss, normalised over the whole optimizer step (all ranks, all micro-batches).
    trajectory: index into the step's flat list of trajectories.
    old_logprobs: the trainer's own before the step, where they were recomputed.
    ref_logprobs: the frozen reference's, where there is a KL term.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    behave_logprobs: Sequence[float]
    advantage: float
    weight: float
    trajectory: int
    old_logprobs: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None
    array: bytes = field(default=b"", init=False, repr=False, compare=False)

    @property
    def ids(self) -> bytes:
        """Prompt and response as `packed_ids`, made once: compared, hashed and laid down fast."""
        if not self.array:
            self.array = packed_ids(self.prompt_ids, self.response_ids)
        return self.array

    @property
    def num_tokens(self) -> int:
        """Length of prompt plus response."""
        return len(self.prompt_ids) + len(self.response_ids)
