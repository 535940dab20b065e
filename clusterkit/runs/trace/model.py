"""A recorded trajectory as turns: what was read and done, the size of the memory, and the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterkit.runs.trace.evidence import GoldSentence, Held, gold_of, held
from clusterkit.runs.trace.source import Record


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    tool: str
    ok: bool
    did: str  # the tool's answer
    store: str
    content: str
    valid: bool | None  # the judge's verdict, if any
    answers: tuple[str, ...]  # questions whose gold answer occurs in the written text


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn."""

    number: int
    chunk: str
    calls: tuple[Call, ...]
    response: str  # what the model wrote
    memory_tokens: int  # size of the memory after it
    reward: float | None  # of this turn; None if turns have no rewards
    over: float | None  # `reward` less the mean over all turns of the group
    r2: float | None
    r4: float | None
    shrunk: bool
    held: Held | None = None  # what the memory has of answer and gold sentences, where the response is the memory


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question with its answer from the memory. `score`: None if nobody could answer."""

    question: str
    gold: tuple[str, ...]
    answer: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory of a task."""

    step: int
    task: str
    sample: int
    reward: float
    others: tuple[float, ...]  # rewards of all trajectories of its group, with its own
    metrics: dict[str, float]
    turns: tuple[TurnView, ...]
    asked: tuple[AnsweredQuestion, ...]
    memory: dict[str, Any]
    error: str
    gold: tuple[GoldSentence, ...] = ()  # sentences that prove the answer, where they are known


def trace_of(step: int, group: list[Record], sample: int) -> Trace:
    """Return one trajectory of a group; raise IndexError if there is no such sample."""
    record = group[sample]
    details = record.get("details") or {}
    asked = tuple(
        AnsweredQuestion(q["question"], tuple(q["answers"]), q["answer"], q["score"])
        for q in details.get("questions", [])
    )
    if not asked:  # one question, answered by the agent itself
        right = float(record["reward"])
        asked = (AnsweredQuestion(record["question"], tuple(record["answers"]), record["answer"], right),)
    rewards = [value for one in group for value in one.get("turn_rewards") or []]
    mean = sum(rewards) / len(rewards) if rewards else None
    own = record.get("turn_rewards") or []
    detailed = details.get("turns") or []
    gold = gold_of(record)
    sentences = [one.sentence for one in gold]
    turns = []
    for number, turn in enumerate(record["turns"]):
        more = detailed[number] if number < len(detailed) else {}
        reward = own[number] if number < len(own) else None
        turns.append(
            TurnView(
                number=number + 1,
                chunk=str(more.get("chunk", "")),
                calls=tuple(_call(call, asked) for call in more.get("calls", [])),
                response=str(turn["response"]),
                memory_tokens=int(more.get("memory_tokens", len(turn["response_ids"]))),
                reward=reward,
                over=None if reward is None or mean is None else reward - mean,
                r2=more.get("r2"),
                r4=more.get("r4"),
                shrunk=bool(more.get("shrunk")),
                held=None if more or turn["kind"] == "final" else held(turn["response"], record["answers"], sentences),
            )
        )
    return Trace(
        step=step,
        task=str(record["task_id"]),
        sample=sample,
        reward=float(record["reward"]),
        others=tuple(float(one["reward"]) for one in group),
        metrics={str(k): float(v) for k, v in (record.get("metrics") or {}).items()},
        turns=tuple(turns),
        asked=asked,
        memory=details.get("memory") or {},
        error=str(record.get("error") or ""),
        gold=gold,
    )


def _call(call: dict[str, Any], asked: tuple[AnsweredQuestion, ...]) -> Call:
    content = str(call.get("content", ""))
    words = content.lower()
    held = tuple(q.question for q in asked if any(gold.lower() in words for gold in q.gold if gold)) if content else ()
    return Call(
        str(call.get("tool", "")),
        bool(call.get("ok")),
        str(call.get("message", "")),
        str(call.get("store", "")),
        content,
        call.get("valid"),
        held if call.get("ok") else (),
    )
