"""A recorded trajectory as turns: what was read, what was done, how large the memory then was, what it was worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from clusterkit.runs.trace.source import Record


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. did: its answer. valid: the judge's verdict; None where there was none. answers: questions whose
    gold answer the written text holds.
    """

    tool: str
    ok: bool
    did: str
    store: str
    content: str
    valid: bool | None
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn. memory_tokens: after it. reward: its own, and over: that less the mean over all turns of the group;
    None where turns have no rewards of their own. response: the text, where the memory is that.
    """

    number: int
    chunk: str
    calls: tuple[Call, ...]
    response: str
    memory_tokens: int
    reward: float | None
    over: float | None
    r2: float | None
    r4: float | None
    shrunk: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its answer from the memory; score: None where nobody could answer."""

    question: str
    gold: tuple[str, ...]
    answer: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory of a task. others: rewards of all trajectories of its group, this one's among them."""

    step: int
    task: str
    sample: int
    reward: float
    others: tuple[float, ...]
    metrics: dict[str, float]
    turns: tuple[TurnView, ...]
    asked: tuple[Asked, ...]
    memory: dict[str, Any]
    error: str

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def trace_of(step: int, group: list[Record], sample: int) -> Trace:
    """One trajectory of a group; raises IndexError for a sample that it has not."""
    record = group[sample]
    details = record.get("details") or {}
    asked = tuple(
        Asked(q["question"], tuple(q["answers"]), q["answer"], q["score"]) for q in details.get("questions", [])
    )
    if not asked:  # one question, answered by the agent itself
        right = float(record["reward"])
        asked = (Asked(record["question"], tuple(record["answers"]), record["answer"], right),)
    rewards = [value for one in group for value in one.get("turn_rewards") or []]
    mean = sum(rewards) / len(rewards) if rewards else None
    own = record.get("turn_rewards") or []
    told = details.get("turns") or []
    turns = []
    for number, turn in enumerate(record["turns"]):
        more = told[number] if number < len(told) else {}
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
    )


def _call(call: dict[str, Any], asked: tuple[Asked, ...]) -> Call:
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
